"""Extracts tool calls from the model's text."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from triptych.domain.chat import ToolCall
from triptych.domain.generation import ChatEvent, ChoiceFinished, Finished, FinishReason, TokenChunk, ToolCallMade
from triptych.tokens.tool_calls import Call, CallReader, CallSyntax


@dataclass(frozen=True, slots=True)
class Calling:
    """The call syntax, the names of the tools, and whether an answer may contain several calls."""

    syntax: CallSyntax
    names: frozenset[str]
    parallel: bool


class ToolCallStream:
    """Converts the events of one answer, for a request with tools.

    ``new_id`` makes the ids of calls, which must be unique, as conversations keep them. ``passed_on`` is the text of each
    choice that another router has converted: what it completed is not returned again.
    """

    def __init__(
        self,
        calling: Calling,
        choices: Iterable[int],
        new_id: Callable[[], str],
        passed_on: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        self._readers = {choice: CallReader(calling.syntax, calling.names) for choice in choices}
        self._most_calls = 0 if calling.parallel else 1
        self._made = dict.fromkeys(self._readers, 0)
        self._new_id = new_id
        for choice, text in passed_on.items():
            self._events(self._readers[choice].feed(text), choice)

    def chunk(self, event: TokenChunk) -> list[ChatEvent]:
        """The tokens with the text before the first call, then calls and further text in order."""
        pieces = self._readers[event.choice].feed(event.text)
        match pieces:
            case [str(text), *rest]:
                return [replace(event, text=text), *self._events(rest, event.choice)]
            case _:
                return [replace(event, text=""), *self._events(pieces, event.choice)]

    def finished(self, event: Finished) -> list[ChatEvent]:
        """Ends with ``ChoiceFinished``."""
        last = self._events(self._readers[event.choice].flush(), event.choice)
        called = self._made[event.choice] > 0 and event.reason is FinishReason.STOP
        return [*last, ChoiceFinished(FinishReason.TOOL_CALLS if called else event.reason, event.choice)]

    def _events(self, pieces: list[str | Call], choice: int) -> list[ChatEvent]:
        events: list[ChatEvent] = []
        for piece in pieces:
            if isinstance(piece, str):
                events.append(TokenChunk((), piece, choice))
            elif not self._most_calls or self._made[choice] < self._most_calls:
                call = ToolCall(self._new_id(), piece.name, piece.arguments)
                events.append(ToolCallMade(call, self._made[choice], choice))
                self._made[choice] += 1
        return events
