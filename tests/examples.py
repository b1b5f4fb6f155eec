"""How many cases a test has in each suite: examples of hypothesis, and seeds."""

import pytest
from _pytest.mark.structures import ParameterSet
from hypothesis import settings

ALL = 100
"""``max_examples`` of the profile that tries all examples, which is also the number of a test that states none."""


def examples(number: int) -> int:
    """``max_examples`` of a test with ``number`` examples, in proportion to those of the loaded profile."""
    return max(1, number * settings().max_examples // ALL)


def seeds(number: int, *, usual: int) -> list[ParameterSet]:
    """Parameters from 0 on: the first ``usual`` for `make test`, the others for `make test-all`."""
    return [pytest.param(seed, marks=() if seed < usual else pytest.mark.extended) for seed in range(number)]
