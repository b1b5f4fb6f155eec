import pytest

from triptych.policy.prefixes import LEAST_TOKENS, PrefixGain, always, by_cost

LONG = LEAST_TOKENS


@pytest.mark.parametrize(
    ("gain", "pulls"),
    [
        (PrefixGain(LONG - 1, compute_s=1.0, pull_s=0.001), False),
        (PrefixGain(LONG), True),
        (PrefixGain(LONG, compute_s=0.001), True),
        (PrefixGain(LONG, pull_s=1.0), True),
        (PrefixGain(LONG, compute_s=0.05, pull_s=0.02), True),
        (PrefixGain(LONG, compute_s=0.05, pull_s=0.025), False),
    ],
)
def test_by_cost_pulls_what_is_long_and_clearly_faster_to_pull(gain: PrefixGain, pulls: bool) -> None:
    assert by_cost(gain) is pulls


def test_the_others_look_at_no_cost() -> None:
    slow = PrefixGain(1, compute_s=0.001, pull_s=1.0)
    assert (always(slow), always(PrefixGain(0))) == (True, False)
