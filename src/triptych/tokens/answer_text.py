"""The text of one answer, from its tokens: it ends before the first stop string, however the tokens are grouped.

The text that tokens complete depends on them and on the request alone. So a text service that goes on with an answer, and
a router, know what was sent of the tokens that somebody has already.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from triptych.domain.sampling import SamplingParams
from triptych.tokens.stop import StopStrings


class Detokenizer(Protocol):
    """Satisfied by ``tokens.detokenize.IncrementalDetokenizer``."""

    def feed(self, token_ids: Sequence[int]) -> str: ...

    def flush(self) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...


class Piece(NamedTuple):
    """``text`` may be sent now. ``tokens`` of those that were given belong to the answer: all, unless it ``stopped``."""

    text: str
    tokens: int
    stopped: bool


class AnswerText:
    """Text of one choice. A stop string counts once ``min_tokens`` are there."""

    def __init__(self, detokenizer: Detokenizer, sampling: SamplingParams) -> None:
        self._detokenizer = detokenizer
        self._stops = StopStrings(sampling.stop) if any(sampling.stop) else None
        self._min_tokens = sampling.min_tokens
        self._tokens = 0

    def feed(self, token_ids: Sequence[int]) -> Piece:
        """Add tokens. Text that they leave incomplete comes with later ones."""
        if self._stops is None:
            return Piece(self._detokenizer.feed(token_ids), len(token_ids), stopped=False)
        text = ""
        for end, token_id in enumerate(token_ids, 1):  # it matters which one completes a stop string
            self._tokens += 1
            result = self._stops.feed(self._detokenizer.feed((token_id,)), counts=self._tokens >= self._min_tokens)
            text += result.text
            if result.stopped:
                return Piece(text, end, stopped=True)
        return Piece(text, len(token_ids), stopped=False)

    def flush(self, hidden_tokens: int = 0) -> Piece:
        """The rest, at the end of the answer, after ``hidden_tokens`` that have no text."""
        if self._stops is None:
            return Piece(self._detokenizer.flush(), 0, stopped=False)
        self._tokens += hidden_tokens
        result = self._stops.feed(self._detokenizer.flush(), counts=self._tokens >= self._min_tokens)
        return Piece(result.text if result.stopped else result.text + self._stops.flush(), 0, result.stopped)
