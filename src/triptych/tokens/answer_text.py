"""The text of one answer, from its tokens: it ends before the first stop string, however the tokens are grouped.

The text that tokens complete depends on them and on the request alone. So a text service that goes on with an answer, and
a router, know what was sent of the tokens that somebody has already.
"""

from collections.abc import Sequence
from typing import Protocol

from triptych.domain.sampling import SamplingParams
from triptych.tokens.stop import StopStrings


class Detokenizer(Protocol):
    """Satisfied by ``tokens.detokenize.IncrementalDetokenizer``."""

    def feed(self, token_ids: Sequence[int]) -> str: ...

    def flush(self) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def show_special_tokens(self) -> None: ...


class AnswerText:
    """Text of one choice. A stop string counts once ``min_tokens`` are there."""

    def __init__(self, detokenizer: Detokenizer, sampling: SamplingParams) -> None:
        if sampling.special_tokens:
            detokenizer.show_special_tokens()
        self._detokenizer = detokenizer
        self._stops = StopStrings(sampling.stop) if any(sampling.stop) else None
        self._min_tokens = sampling.min_tokens
        self.tokens = 0
        """Tokens of the answer so far, up to the one that completes a stop string."""
        self.stopped = False
        """Whether a stop string has ended it."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """Add tokens. Returns the text to send; what they leave incomplete comes with later ones."""
        if self._stops is None:
            self.tokens += len(token_ids)
            return self._detokenizer.feed(token_ids)
        text = ""
        for token_id in token_ids:  # it matters which one completes a stop string
            self.tokens += 1
            result = self._stops.feed(self._detokenizer.feed((token_id,)), counts=self.tokens >= self._min_tokens)
            text += result.text
            if result.stopped:
                self.stopped = True
                break
        return text

    def flush(self, hidden_tokens: int = 0) -> str:
        """The rest, at the end of the answer, after ``hidden_tokens`` that have no text."""
        self.tokens += hidden_tokens
        if self._stops is None:
            return self._detokenizer.flush()
        result = self._stops.feed(self._detokenizer.flush(), counts=self.tokens >= self._min_tokens)
        self.stopped = result.stopped
        return result.text if result.stopped else result.text + self._stops.flush()
