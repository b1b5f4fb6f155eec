"""Turns an engine's tokens into the text of an answer, which ends before the first stop string."""

from collections.abc import Sequence

from triptych.domain.engine import ScoredToken, Scores
from triptych.domain.generation import Alternative, FinishReason, TokenChunk, TokenLogprobs
from triptych.domain.sampling import SamplingParams
from triptych.errors import InvalidRequest
from triptych.tokens.answer_text import AnswerText, Detokenizer


class Answer:
    """One choice's text. Counts tokens up to and including those of a stop string."""

    def __init__(self, detokenizer: Detokenizer, sampling: SamplingParams, choice: int = 0) -> None:
        self._detokenizer = detokenizer
        self._text = AnswerText(detokenizer, sampling)
        self._stop_ids = frozenset(sampling.stop_token_ids)
        self._choice = choice

    @property
    def completion_tokens(self) -> int:
        """Tokens so far, those without text included."""
        return self._text.tokens

    def replay(self, token_ids: Sequence[int]) -> None:
        """Begin after tokens whose text was sent already. Text that they leave incomplete comes with later tokens.

        Raises InvalidRequest if they contain a stop string.
        """
        _, reason = self.feed(tuple(token_ids))
        if reason is not None:
            raise InvalidRequest(f"choice {self._choice} has ended already, with a stop string", param="continued")

    def feed(
        self,
        ids: tuple[int, ...],
        reason: FinishReason | None = None,
        scores: Sequence[Scores] = (),
        waited_s: float = 0.0,
    ) -> tuple[TokenChunk, FinishReason | None]:
        """Add the engine's tokens of this choice, and return those to send, with a reason if they are its last.

        A stop id ends the answer and is not part of its text. ``waited_s``: how long the last token has waited for others.
        """
        before = self._text.tokens
        shown = ids[:-1] if reason is FinishReason.STOP and ids and ids[-1] in self._stop_ids else ids
        text = self._text.feed(shown)
        if self._text.stopped:
            used = self._text.tokens - before
            ids, scores, reason = ids[:used], scores[:used], FinishReason.STOP
        elif reason is not None:
            text += self._text.flush(len(ids) - len(shown))
            reason = FinishReason.STOP if self._text.stopped else reason
        logprobs = tuple(map(self._logprobs, scores))
        return TokenChunk(ids, text, self._choice, logprobs, waited_s), reason

    def _logprobs(self, score: Scores) -> TokenLogprobs:
        return TokenLogprobs(self._alternative(score.chosen), tuple(map(self._alternative, score.top)))

    def _alternative(self, scored: ScoredToken) -> Alternative:
        return Alternative(scored.token_id, self._detokenizer.token_bytes(scored.token_id), scored.logprob)
