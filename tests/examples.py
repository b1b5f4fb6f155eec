"""Numbers of examples of hypothesis tests."""

from hypothesis import settings

ALL = 100
"""``max_examples`` of the profile that tries all examples, which is also the number of a test that states none."""


def examples(number: int) -> int:
    """``max_examples`` of a test with ``number`` examples, in proportion to those of the loaded profile."""
    return max(1, number * settings().max_examples // ALL)
