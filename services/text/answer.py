"""From an engine's tokens to the text of an answer, which ends before the first stop string."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from triptych.domain.generation import FinishReason, TokenChunk
from triptych.tokens.stop import StopStrings

from .engine_loop import Tokens


class Detokenizer(Protocol):
    """What ``tokens.detokenize.IncrementalDetokenizer`` satisfies: one answer's tokens to text."""

    def feed(self, token_ids: Sequence[int]) -> str: ...

    def flush(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Piece:
    """``finish_reason`` is set with the last piece of an answer."""

    chunk: TokenChunk
    finish_reason: FinishReason | None


class Answer:
    """One answer's text as it grows. Tokens are counted as far as a stop string needed them, its own included."""

    def __init__(self, detokenizer: Detokenizer, stop: tuple[str, ...]) -> None:
        self._detokenizer = detokenizer
        self._stops = StopStrings(stop)
        self._step = 1 if any(stop) else None
        self.completion_tokens = 0

    def feed(self, tokens: Tokens) -> Piece:
        ids = tokens.token_ids
        text = ""
        # Token by token only where it matters which one completes a stop string.
        step = self._step or max(len(ids), 1)
        for end in range(step, len(ids) + 1, step):
            result = self._stops.feed(self._detokenizer.feed(ids[end - step : end]))
            text += result.text
            if result.stopped:
                return self._piece(ids[:end], text, FinishReason.STOP)
        reason = tokens.finish_reason
        if reason is not None:
            result = self._stops.feed(self._detokenizer.flush())
            text += result.text
            if result.stopped:
                reason = FinishReason.STOP
            else:
                text += self._stops.flush()
        return self._piece(ids, text, reason)

    def _piece(self, ids: tuple[int, ...], text: str, reason: FinishReason | None) -> Piece:
        self.completion_tokens += len(ids)
        return Piece(TokenChunk(ids, text), reason)
