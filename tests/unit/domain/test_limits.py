import math
from dataclasses import dataclass
from typing import Annotated

import pytest

from triptych.domain.bounds import Between
from triptych.domain.limits import Count, Positive, PositiveSeconds, Seconds, check_limits


@dataclass(frozen=True, slots=True)
class Lock:
    keys: Positive = 1
    spares: Count = 0
    turns: Annotated[int, Between(1, 4)] = 1
    first_s: PositiveSeconds = 1.0
    longest_s: Seconds = 1.0
    unset_s: Annotated[float | None, Between(0, above=True)] = None
    name: str = ""

    def __post_init__(self) -> None:
        check_limits(self, ("first_s", "longest_s"))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"keys": 0}, "keys is 0, must be at least 1"),
        ({"spares": -1}, "spares is -1, must be at least 0"),
        ({"turns": 5}, "turns is 5, must be from 1 to 4"),
        ({"first_s": 0.0}, "first_s is 0.0, must be above 0"),
        ({"unset_s": 0.0}, "unset_s is 0.0, must be above 0"),
        ({"longest_s": math.inf}, "longest_s is inf"),
        ({"longest_s": math.nan}, "longest_s is nan"),
        ({"first_s": 2.0}, r"first_s \(2.0\) exceeds longest_s \(1.0\)"),
    ],
    ids=str,
)
def test_a_value_out_of_bounds_is_named(wrong: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Lock(**wrong)  # type: ignore[arg-type]


def test_a_value_within_bounds_is_accepted() -> None:
    assert Lock(keys=2**64, turns=4, first_s=2.0, longest_s=2.0).turns == 4
