"""When the prefix of a prompt is sent while items after it are missing."""

from hypothesis import given
from hypothesis import strategies as st

from triptych.policy.dispatching import LEAST_TOKENS, prefix


def test_a_beginning_is_sent_once_it_is_long_enough_and_twice_the_one_before() -> None:
    assert [prefix(tokens=tokens, sent_tokens=0) for tokens in (0, LEAST_TOKENS - 1, LEAST_TOKENS)] == [
        False,
        False,
        True,
    ]
    assert [prefix(tokens=tokens, sent_tokens=300) for tokens in (300, 599, 600)] == [False, False, True]


@given(st.lists(st.integers(0, 10_000), max_size=50))
def test_all_beginnings_together_have_at_most_twice_the_tokens_of_the_longest(lengths: list[int]) -> None:
    sent: list[int] = []
    for tokens in sorted(lengths):
        if prefix(tokens=tokens, sent_tokens=sent[-1] if sent else 0):
            sent.append(tokens)
    assert sum(sent) <= 2 * max(sent, default=0)
