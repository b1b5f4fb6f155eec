"""Converts the text streams of one request into the events sent to the caller."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from uuid import uuid4

from triptych.domain.continuation import ContinuedChoice
from triptych.domain.generation import (
    ChatEvent,
    ChatFinished,
    ChoiceFinished,
    FieldsIgnored,
    Finished,
    TextEvent,
    TokenChunk,
    Usage,
)
from triptych.errors import EngineFailure
from triptych.machine.router.attainment import Gaps
from triptych.ports import Clock

from .answer_reader import AnswerReader, Reading
from .stream_buffer import StreamBuffer


class Answer:
    """Converts text events to chat events, and keeps what another text instance needs to go on: the tokens passed on."""

    def __init__(
        self,
        buffer: StreamBuffer,
        reading: Reading | None,
        *,
        begun: Mapping[int, Sequence[int]],
        usage: Usage,
        ignored: tuple[str, ...] = (),
        most_tokens: float = inf,
        gaps: Gaps | None = None,
        clock: Clock,
    ) -> None:
        """``begun`` has the choices, and the tokens of each that another router passed on. ``usage`` is that of the prompt.
        ``ignored`` are request fields that its template does not use. No choice has more than ``most_tokens``. The gaps between
        tokens are counted in ``gaps``.
        """
        self._most_tokens = most_tokens
        self._gaps = gaps
        self._clock = clock
        self._buffer = buffer
        self._reader = None if reading is None else AnswerReader(reading, begun, _new_call_id)
        self._ignored = ignored
        self._sent: dict[int, array[int]] = {choice: array("I", tokens) for choice, tokens in begun.items()}
        """By choice that has not finished: the ids of the tokens passed on."""
        self._usage = usage
        self._completion_tokens = 0
        self._cached_tokens = 0
        self.streamed_tokens = sum(map(len, begun.values()))
        self.finish_reason = ""
        """The reason of the choice that finished last."""
        self.has_ended = False

    def continued(self) -> tuple[ContinuedChoice, ...]:
        """The choices that have not finished, for a text instance that goes on with them."""
        return tuple(ContinuedChoice(choice, tuple(sent)) for choice, sent in self._sent.items())

    def take(self, events: Sequence[TextEvent]) -> list[Finished]:
        """Forward a batch of events. Returns the choices that finish with it.

        Raises EngineFailure if a text instance may not send that: tokens or the end of a choice that is not running, or too many tokens.
        Then nothing of it has been forwarded, and another instance may go on.
        """
        self._check(events)
        out: list[ChatEvent] = []
        ended: list[Finished] = []
        now_s = self._clock()
        for event in events:
            if isinstance(event, TokenChunk):
                self._sent[event.choice].extend(event.token_ids)
                self.streamed_tokens += len(event.token_ids)
                if self._gaps is not None:
                    self._gaps.tokens(event.choice, len(event.token_ids), now_s - event.waited_s)
                if self._reader is None:
                    out.append(event)
                else:
                    out += self._reader.chunk(event)
            elif isinstance(event, Finished):
                ended.append(event)
                out += self._finished(event)
        if out:
            if self._ignored:
                out.insert(0, FieldsIgnored(self._ignored))
                self._ignored = ()
            self._buffer.put(out)
        return ended

    def _check(self, events: Sequence[TextEvent]) -> None:
        tokens: dict[int, int] = {}
        """By choice, with those passed on before."""
        finished: set[int] = set()
        for event in events:
            if not isinstance(event, TokenChunk | Finished):
                continue
            choice, sent = event.choice, self._sent.get(event.choice)
            if sent is None or choice in finished:
                raise EngineFailure(f"the text instance sent choice {choice}, which is not running")
            if isinstance(event, Finished):
                finished.add(choice)
                continue
            tokens[choice] = tokens.get(choice, len(sent)) + len(event.token_ids)
            if tokens[choice] > self._most_tokens:
                raise EngineFailure(f"the text instance sent more than {self._most_tokens} tokens")

    def _finished(self, event: Finished) -> list[ChatEvent]:
        del self._sent[event.choice]
        self._completion_tokens += event.completion_tokens
        self._cached_tokens = max(self._cached_tokens, min(event.cached_tokens, self._usage.prompt_tokens))
        self.finish_reason = event.reason.value
        self.has_ended = not self._sent
        out: list[ChatEvent] = [ChoiceFinished(event.reason, event.choice)]
        if self._reader is not None:
            out = self._reader.finished(event)
        if self.has_ended:
            thought = 0 if self._reader is None else self._reader.reasoning_tokens
            usage = replace(
                self._usage,
                completion_tokens=self._completion_tokens,
                cached_tokens=self._cached_tokens,
                reasoning_tokens=thought,
            )
            out.append(ChatFinished(usage))
        return out


def _new_call_id() -> str:
    return f"call_{uuid4().hex[:24]}"
