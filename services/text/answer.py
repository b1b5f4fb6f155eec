"""Turns an engine's tokens into the text of an answer, which ends before the first stop string."""

from collections.abc import Sequence

from triptych.domain.engine import ScoredToken, Scores
from triptych.domain.generation import Alternative, FinishReason, TokenChunk, TokenLogprobs
from triptych.domain.sampling import SamplingParams
from triptych.errors import InvalidRequest
from triptych.tokens.answer_text import AnswerText, Detokenizer

from .sequences import Tokens


class Answer:
    """One choice's text. Counts tokens up to and including those of a stop string."""

    def __init__(self, detokenizer: Detokenizer, sampling: SamplingParams, choice: int = 0) -> None:
        self._detokenizer = detokenizer
        self._text = AnswerText(detokenizer, sampling)
        self._stop_ids = frozenset(sampling.stop_token_ids)
        self._choice = choice
        self.completion_tokens = 0

    def replay(self, token_ids: Sequence[int]) -> None:
        """Begin after tokens whose text was sent already. Text that they leave incomplete comes with later tokens.

        Raises InvalidRequest if they contain a stop string.
        """
        _, reason = self.feed(Tokens(self._choice, tuple(token_ids), (), None))
        if reason is not None:
            raise InvalidRequest(f"choice {self._choice} has ended already, with a stop string", param="continued")

    def feed(self, tokens: Tokens) -> tuple[TokenChunk, FinishReason | None]:
        """Add the engine's tokens of this choice, and return those to send, with a reason if they are its last.

        A stop id ends the answer and is not part of its text.
        """
        ids, reason = tokens.token_ids, tokens.finish_reason
        shown = ids[:-1] if reason is FinishReason.STOP and ids and ids[-1] in self._stop_ids else ids
        text, used, stopped = self._text.feed(shown)
        scores = tokens.scores
        if stopped:
            ids, scores, reason = ids[:used], scores[:used], FinishReason.STOP
        elif reason is not None:
            rest, _, stopped = self._text.flush(len(ids) - len(shown))
            text, reason = text + rest, FinishReason.STOP if stopped else reason
        self.completion_tokens += len(ids)
        logprobs = tuple(map(self._logprobs, scores))
        return TokenChunk(ids, text, self._choice, logprobs), reason

    def _logprobs(self, score: Scores) -> TokenLogprobs:
        return TokenLogprobs(self._alternative(score.chosen), tuple(map(self._alternative, score.top)))

    def _alternative(self, scored: ScoredToken) -> Alternative:
        return Alternative(scored.token_id, self._detokenizer.token_bytes(scored.token_id), scored.logprob)
