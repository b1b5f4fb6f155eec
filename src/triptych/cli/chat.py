"""``triptych chat``: a question, its answer as it comes, and where it was answered."""

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from triptych.cli import show
from triptych.cli.rest import RestClient


@dataclass(frozen=True, slots=True)
class Question:
    text: str
    images: tuple[Path, ...] = ()
    model: str | None = None
    """None asks the first model that is served."""
    max_tokens: int | None = None
    temperature: float = 0.0


async def chat(url: str, question: Question, console: Console, *, show_timeline: bool) -> None:
    """Print the answer token by token, then the timeline. Raises RestError."""
    async with RestClient(url) as client:
        model = question.model or await client.first_model()
        async with client.ask(
            question.text,
            question.images,
            model=model,
            max_tokens=question.max_tokens,
            temperature=question.temperature,
        ) as answer:
            async for text in answer.texts():
                console.print(show.printable(text), end="", soft_wrap=True)
        console.print()
        if show_timeline:
            console.print()
            console.print(show.timeline(await client.timeline(answer.request_id)))
