"""Separates reasoning and tool calls from the model's text."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from triptych.domain.chat import ToolCall
from triptych.domain.generation import (
    ChatEvent,
    ChoiceFinished,
    Finished,
    FinishReason,
    Reasoned,
    TokenChunk,
    ToolArguments,
    ToolCallMade,
)
from triptych.tokens.call_reader import Arguments, CallBegun, CallEnded, CallReader, Part
from triptych.tokens.reasoning import ReasoningReader, ReasoningSyntax, Thought
from triptych.tokens.tool_calls import CallSyntax


@dataclass(frozen=True, slots=True)
class Calling:
    """The call syntax; the schema of each tool's parameters, by name; and whether an answer may contain several calls."""

    syntax: CallSyntax
    tools: Mapping[str, Mapping[str, Any]]
    parallel: bool
    streams_arguments: bool = False
    """As in ``ChatRequest``."""


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The syntax of reasoning, and the end of the prompt, which may open it."""

    syntax: ReasoningSyntax
    prompt_tail: str
    closing_id: int | None
    """The token of the closing mark; None if it is no single token."""


@dataclass(frozen=True, slots=True)
class Hidden:
    """Special tokens that the text shows only because marks are special too."""

    tokens: re.Pattern[str]
    ids: frozenset[int]
    """What is only spelled like them stays."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What is read from the text. ``passed_on`` is what another router has read of each choice that goes on: the text that each
    token has completed.
    """

    calling: Calling | None = None
    reasoning: Reasoning | None = None
    passed_on: Mapping[int, Sequence[str]] = field(default_factory=dict)
    hidden: Hidden | None = None


class AnswerReader:
    """Converts the events of one answer.

    ``begun`` has the choices, and the tokens of each that another router passed on: what these completed is not returned again.
    ``new_id`` makes the ids of calls, which must be unique, as conversations keep them.
    """

    def __init__(self, reading: Reading, begun: Mapping[int, Sequence[int]], new_id: Callable[[], str]) -> None:
        self._choices = {choice: _Choice(reading) for choice in begun}
        self._most_calls = 1 if reading.calling is not None and not reading.calling.parallel else 0
        self._streams = reading.calling is not None and reading.calling.streams_arguments
        self._new_id = new_id
        for choice, texts in reading.passed_on.items():
            for text, token_id in zip(texts, begun[choice], strict=True):
                self._events(self._choices[choice].feed(text, (token_id,)), choice)

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of all reasoning so far, with its marks. Where it ends within a chunk, and not with a token of its own, all of
        the chunk.
        """
        return sum(choice.reasoning_tokens for choice in self._choices.values())

    def chunk(self, event: TokenChunk) -> list[ChatEvent]:
        """The tokens with the text before the first call or thought; then calls, thoughts and further text in order."""
        pieces = self._choices[event.choice].feed(event.text, event.token_ids)
        match pieces:
            case [str(text), *rest]:
                return [replace(event, text=text), *self._events(rest, event.choice)]
            case _:
                return [replace(event, text=""), *self._events(pieces, event.choice)]

    def finished(self, event: Finished) -> list[ChatEvent]:
        """Ends with ``ChoiceFinished``."""
        choice = self._choices[event.choice]
        last = self._events(choice.flush(), event.choice)
        called = choice.calls_made > 0 and event.reason is FinishReason.STOP
        return [*last, ChoiceFinished(FinishReason.TOOL_CALLS if called else event.reason, event.choice)]

    def _events(self, pieces: Sequence[Part | Thought], choice: int) -> list[ChatEvent]:
        events: list[ChatEvent] = []
        known = self._choices[choice]
        for piece in pieces:
            match piece:
                case str():
                    events.append(TokenChunk((), piece, choice))
                case Thought():
                    events.append(Reasoned(piece.text, choice))
                case CallBegun():
                    known.call = ToolCall("", piece.name, "")
                    known.arguments = []
                    if self._streams and self._may_call(known):
                        events.append(
                            ToolCallMade(replace(known.call, call_id=self._new_id()), known.calls_made, choice)
                        )
                case Arguments():
                    if not self._streams:
                        known.arguments.append(piece.text)
                    elif self._may_call(known):
                        events.append(ToolArguments(piece.text, known.calls_made, choice))
                case CallEnded():
                    events += self._ended(piece, known, choice)
        return events

    def _ended(self, end: CallEnded, known: "_Choice", choice: int) -> list[ChatEvent]:
        if not (self._streams or end.is_whole):
            return [TokenChunk((), end.text, choice)]
        if not self._may_call(known):
            return []
        known.calls_made += 1
        if self._streams:
            return []
        call = replace(known.call, call_id=self._new_id(), arguments="".join(known.arguments))
        return [ToolCallMade(call, known.calls_made - 1, choice)]

    def _may_call(self, known: "_Choice") -> bool:
        return not self._most_calls or known.calls_made < self._most_calls


class _Choice:
    """The readers of one choice: calls are read from what is no reasoning."""

    def __init__(self, reading: Reading) -> None:
        calling, reasoning = reading.calling, reading.reasoning
        self._calls = None if calling is None else CallReader(calling.syntax, calling.tools)
        self._hidden = reading.hidden
        self._thoughts: ReasoningReader | None = None
        if reasoning is not None:
            self._thoughts = ReasoningReader(reasoning.syntax, reasoning.prompt_tail)
            self._closing_id = reasoning.closing_id
        self.calls_made = 0
        self.call = ToolCall("", "", "")
        """The call that has begun last ..."""
        self.arguments: list[str] = []
        """... and its arguments, unless they are streamed."""
        self.reasoning_tokens = 0
        self._open_tokens = 0
        """Tokens of what may become a mark that opens reasoning."""

    def feed(self, text: str, token_ids: Sequence[int]) -> list[Part | Thought]:
        thoughts = self._thoughts
        if self._hidden is not None and not self._hidden.ids.isdisjoint(token_ids):
            text = self._hidden.tokens.sub("", text)
        if thoughts is None:
            return self._called([text])
        was_thinking, pieces = thoughts.thinking, thoughts.feed(text)
        if was_thinking or thoughts.thinking or any(isinstance(piece, Thought) for piece in pieces):
            used = len(token_ids) if thoughts.thinking else self._up_to_closing(token_ids)
            self.reasoning_tokens += self._open_tokens + used
            self._open_tokens = 0
        else:
            self._open_tokens = self._open_tokens + len(token_ids) if thoughts.thinking is None else 0
        return self._called(pieces)

    def _up_to_closing(self, token_ids: Sequence[int]) -> int:
        if self._closing_id not in token_ids:
            return len(token_ids)
        return len(token_ids) - token_ids[::-1].index(self._closing_id)

    def _called(self, pieces: Sequence[str | Thought]) -> list[Part | Thought]:
        if self._calls is None:
            return list(pieces)
        out: list[Part | Thought] = []
        for piece in pieces:
            out += self._calls.feed(piece) if isinstance(piece, str) else [piece]
        return out

    def flush(self) -> list[Part | Thought]:
        out: list[Part | Thought] = []
        if self._thoughts is not None:
            out += self._called(self._thoughts.flush())
        if self._calls is not None:
            out += self._calls.flush()
        return out
