from collections.abc import Sequence
from itertools import starmap

import pytest

from triptych.domain.engine import ScoredToken, Scores
from triptych.domain.generation import FinishReason
from triptych.domain.sampling import SamplingParams
from triptych.services.text.answer import Answer

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


class LetterDetokenizer:
    """Token 97 is ``a``."""

    def feed(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))

    def flush(self) -> str:
        return ""

    def show_special_tokens(self) -> None: ...

    def token_bytes(self, token_id: int) -> bytes:
        return chr(token_id).encode()


Said = tuple[tuple[int, ...], FinishReason | None, tuple[Scores, ...]]


def said(text: str, reason: FinishReason | None = None) -> Said:
    ids = tuple(map(ord, text))
    return ids, reason, tuple(Scores(ScoredToken(token, -0.5), ()) for token in ids)


def answer(*pieces: Said, **sampling: object) -> tuple[str, int, int, FinishReason | None]:
    """Text, tokens, log-probabilities and reason."""
    answering = Answer(LetterDetokenizer(), SamplingParams(**sampling))  # type: ignore[arg-type]  # whatever a test asks for
    text, scores, reason = "", 0, None
    for chunk, reason in starmap(answering.feed, pieces):
        text += chunk.text
        scores += len(chunk.logprobs)
        assert len(chunk.logprobs) == len(chunk.token_ids)
        if reason is not None:
            break
    return text, answering.completion_tokens, scores, reason


def test_tokens_up_to_the_end_of_a_stop_string_are_counted() -> None:
    assert answer(said("ab"), said("cdef"), stop=("cd",)) == ("ab", 4, 4, STOP)


@pytest.mark.parametrize(
    ("min_tokens", "expected"),
    [(0, ("", 2, 2, STOP)), (2, ("", 2, 2, STOP)), (3, ("ab", 4, 4, STOP)), (5, ("ababx", 5, 5, LENGTH))],
)
def test_a_stop_string_is_ignored_before_min_tokens(
    min_tokens: int, expected: tuple[str, int, int, FinishReason | None]
) -> None:
    assert answer(said("aba"), said("bx", LENGTH), stop=("ab",), min_tokens=min_tokens) == expected


def test_an_ignored_stop_string_is_not_found_later() -> None:
    # "ab" is complete too early, and still held back as a prefix of the other stop string.
    assert answer(said("ab"), said("z", LENGTH), stop=("ab", "abcd"), min_tokens=3) == ("abz", 3, 3, LENGTH)


def test_a_stop_ids_text_is_not_part_of_the_answer() -> None:
    assert answer(said("ab", STOP), stop_token_ids=(ord("b"),)) == ("a", 2, 2, STOP)
    assert answer(said("ab", LENGTH), stop_token_ids=(ord("b"),)) == ("ab", 2, 2, LENGTH)
    assert answer(said("ab", STOP)) == ("ab", 2, 2, STOP)
