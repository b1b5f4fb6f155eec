"""``triptych chat``: a question or a conversation with streamed answers and timelines."""

import asyncio
import contextlib
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rich.console import Console

from triptych.cli import show
from triptych.cli.files import local_file
from triptych.cli.outcome import CliError
from triptych.cli.rest import Attachment, RestClient, RestError, Turn
from triptych.errors import ContextTooLong

HELP = """/image PATH   attach an image to your next message; may be repeated
/video PATH   attach a video; /audio PATH: an audio file (if the model accepts them)
/timeline     show where the last answer was computed, and how long each stage took
/clear        start a new conversation
/quit         leave (or Ctrl-D); Ctrl-C stops an answer"""

_CONTENT_REFUSED = frozenset({400, 413, 422})
"""Statuses that the same message would get again, unlike a missing key or a full server."""


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """The server and options of a chat."""

    url: str
    api_key: str | None = None
    model: str | None = None
    """Model to ask. None: the first one served."""
    max_tokens: int | None = None
    temperature: float = 0.0
    show_timeline: bool = True

    def client(self) -> RestClient:
        return RestClient(self.url, api_key=self.api_key)


async def ask(settings: ChatSettings, question: str, files: Sequence[Attachment], console: Console) -> None:
    """Print the answer token by token, then the timeline. Raises RestError."""
    async with settings.client() as client:
        answer = _StreamedAnswer()
        await answer.receive(client, settings, [Turn.user(question, files)], console)
        if settings.show_timeline:
            console.print()
            await _print_timeline(client, answer.request_id, console)


def converse(
    settings: ChatSettings, files: Sequence[Attachment], console: Console, read: Callable[[str], str] = input
) -> None:
    """Take turns until the end of input; ``files`` go with the first. Raises RestError when the server cannot be
    reached.
    """
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives ``input`` a history and its keys

    with asyncio.Runner() as runner:
        client = settings.client()
        try:
            model = settings.model or runner.run(client.first_model())
            console.print(f"{model}; /help lists the commands", style="dim")
            conversation = Conversation(client, settings, console, list(files))
            while conversation.open:
                try:
                    line = read("> ")
                except EOFError:
                    break
                except KeyboardInterrupt:
                    console.print()
                    continue
                try:
                    runner.run(conversation.take(line))
                except KeyboardInterrupt:
                    console.print(" (stopped)")
                except CliError as error:
                    console.print(f"triptych: {error}", soft_wrap=True)
        finally:
            runner.run(client.aclose())


@dataclass(slots=True)
class Conversation:
    """The conversation so far, and the files attached to the next line."""

    client: RestClient
    settings: ChatSettings
    console: Console
    files: list[Attachment] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    last_request_id: str = ""
    open: bool = True

    async def take(self, line: str) -> None:
        """Handle a line of input: a command or the next turn. Raises CliError, with the conversation unchanged.

        When a message is refused for its content, its attached files are dropped.
        """
        command, _, argument = line.strip().partition(" ")
        match command:
            case "":
                pass
            case "/quit" | "/exit":
                self.open = False
            case "/help":
                self.console.print(HELP)
            case "/clear":
                self.turns, self.files = [], []
            case "/image":
                self._attach(argument, "image")
            case "/video":
                self._attach(argument, "video")
            case "/audio":
                self._attach(argument, "audio")
            case "/timeline":
                await self._timeline()
            case _ if command.startswith("/"):
                raise RestError(f"unknown command {command}; /help lists the commands", caller=True)
            case _:
                await self._say(line.strip())

    def _attach(self, argument: str, kind: Literal["image", "video", "audio"]) -> None:
        try:
            names = shlex.split(argument)
        except ValueError as error:
            raise RestError(f"{argument}: {error}", caller=True) from None
        if not names:
            raise RestError(f"a path is missing: /{kind} PATH", caller=True)
        self.files += [Attachment(local_file(name), kind) for name in names]
        self.console.print(f"{len(self.files)} attached to your next message", style="dim")

    async def _timeline(self) -> None:
        if not self.last_request_id:
            raise RestError("there is no answer yet", caller=True)
        await _print_timeline(self.client, self.last_request_id, self.console)

    async def _say(self, text: str) -> None:
        answer = _StreamedAnswer()
        try:
            turn = Turn.user(text, self.files)
        except RestError as error:
            raise self._drop_files(error) from None
        try:
            await answer.receive(self.client, self.settings, [*self.turns, turn], self.console)
        except RestError as error:
            if error.status not in _CONTENT_REFUSED:
                raise
            raise self._drop_files(error) from None
        finally:
            if answer.text:  # a stopped answer stays in the conversation
                self.turns += [turn, Turn.assistant(answer.text)]
                self.files = []
                self.last_request_id = answer.request_id
        if self.settings.show_timeline:
            await self._timeline()

    def _drop_files(self, error: RestError) -> RestError:
        """Drop the attached files, so that they do not fail the next line, too, and return an error that says so."""
        line = "your line and its files are" if self.files else "your line is"
        self.files = []
        remedy = f"{line} not part of the conversation"
        if error.code == ContextTooLong.code or self._is_of_an_earlier_turn(error):
            remedy += "; /clear begins a new one"
        return error.with_message(f"{error} ({remedy})")

    def _is_of_an_earlier_turn(self, error: RestError) -> bool:
        place = re.match(r"messages\[(\d{1,9})\]", error.param)
        return place is not None and int(place[1]) < len(self.turns)


@dataclass(slots=True)
class _StreamedAnswer:
    """The answer so far."""

    text: str = ""
    request_id: str = ""

    async def receive(
        self, client: RestClient, settings: ChatSettings, turns: Sequence[Turn], console: Console
    ) -> None:
        model = settings.model or await client.first_model()
        async with client.converse(
            turns, model=model, max_tokens=settings.max_tokens, temperature=settings.temperature
        ) as response:
            self.request_id = response.request_id
            async for text in response.texts():
                self.text += text
                console.print(text, end="", soft_wrap=True)
        console.print()


async def _print_timeline(client: RestClient, request_id: str, console: Console) -> None:
    document = await client.timeline(request_id)
    try:
        drawn = show.timeline(document), show.bars(document)
    except (KeyError, TypeError, ValueError):
        raise RestError(f"{client.url} returned a timeline in an unknown format", caller=False) from None
    for part in drawn:
        console.print(part)
