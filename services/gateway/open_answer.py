"""The router's answer to a request: a stream of events, or collected into a complete answer."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from triptych.domain.chat import ToolCall
from triptych.domain.generation import (
    ChatEvent,
    ChatFinished,
    ChoiceFinished,
    FieldsIgnored,
    FinishReason,
    Reasoned,
    TokenChunk,
    TokenLogprobs,
    ToolCallMade,
    Usage,
)
from triptych.errors import InstanceLost

from .openai_api import ParsedRequest


@dataclass(slots=True)
class WholeChoice:
    """Choice as collected so far. ``logprobs`` has one entry per token if requested."""

    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    reason: FinishReason = FinishReason.STOP
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def reasoning(self) -> str:
        return "".join(self.thoughts)


class OpenAnswer:
    """An answer of the router. After its first event the request can no longer be refused."""

    def __init__(self, request: ParsedRequest, events: AsyncGenerator[Sequence[ChatEvent]]) -> None:
        self.request = request
        self._rest = events
        self._first: Sequence[ChatEvent] = ()
        self.ignored = request.ignored
        """Fields of the request without effect, once it has begun."""
        self.spent_tokens = 0
        """The answer's tokens so far; at the end the prompt's tokens too."""
        self.finished = False

    async def begin(self) -> None:
        """Wait for the first event. Raises the error that comes instead of it."""
        self._first = await _next(self._rest)
        for event in self._first:
            if isinstance(event, FieldsIgnored):
                self.ignored = (*self.ignored, *(self.request.fields.get(name, name) for name in event.names))

    async def aclose(self) -> None:
        await self._rest.aclose()

    async def events(self) -> AsyncGenerator[Sequence[ChatEvent]]:
        """Yield events up to ChatFinished, batched as they arrived. Raises InstanceLost when the stream ends without
        it.
        """
        events = self._first
        while True:
            for event in events:
                match event:
                    case TokenChunk():
                        self.spent_tokens += len(event.token_ids)
                    case ChatFinished(usage=usage):
                        self.spent_tokens, self.finished = usage.total_tokens, True
            if not self.request.includes_reasoning:
                events = [event for event in events if not isinstance(event, Reasoned)]
            yield events
            if events and isinstance(events[-1], ChatFinished):
                return
            events = await _next(self._rest)

    async def collect(self) -> tuple[list[WholeChoice], Usage]:
        """The whole answer."""
        choices = [WholeChoice() for _ in range(self.request.choices)]
        async with aclosing(self.events()) as stream:
            async for events in stream:
                for event in events:
                    match event:
                        case TokenChunk():
                            choices[event.choice].texts.append(event.text)
                            choices[event.choice].logprobs += event.logprobs
                        case Reasoned():
                            choices[event.choice].thoughts.append(event.text)
                        case ToolCallMade():
                            choices[event.choice].calls.append(event.call)
                        case ChoiceFinished():
                            choices[event.choice].reason = event.reason
                        case ChatFinished():
                            return choices, event.usage
        raise AssertionError("events() ends with ChatFinished or raises")


async def _next(events: AsyncGenerator[Sequence[ChatEvent]]) -> Sequence[ChatEvent]:
    try:
        return await anext(events)
    except StopAsyncIteration:
        raise InstanceLost("the answer's stream ended early") from None
