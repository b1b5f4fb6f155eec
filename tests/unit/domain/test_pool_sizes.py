import pytest

from triptych.domain.decision import Bounds
from triptych.domain.pool_sizes import bounds_of, parse_bounds
from triptych.domain.scaling import PoolName
from triptych.domain.stage import Role
from triptych.services.pool_manager.limits import ControlLimits


def test_the_entry_of_the_pool_comes_before_that_of_its_role() -> None:
    entries = ("E=1-8", "owner/m/E=2-4")
    assert bounds_of(PoolName("owner/m", Role.E), entries) == Bounds(2, 4)
    assert bounds_of(PoolName("other", Role.E), entries) == Bounds(1, 8)
    assert bounds_of(PoolName("owner/m", Role.PD), entries) is None


@pytest.mark.parametrize("entry", ["", "E", "E=", "E=3", "=1-2", "E=a-b", "E=-1-2", "1-2"])
def test_another_form_is_refused_with_an_example(entry: str) -> None:
    with pytest.raises(ValueError, match="such as E=1-8"):
        parse_bounds(entry)


def test_the_roles_are_listed_for_an_unknown_one() -> None:
    with pytest.raises(ValueError, match="'X=1-2': 'X' is no role; roles are E, P, D, PD, EP, ED, EPD"):
        parse_bounds("X=1-2")


@pytest.mark.parametrize("entry", ["E=0-2", "E=3-2", "E=1-4097"])
def test_sizes_that_no_pool_can_have_are_refused(entry: str) -> None:
    with pytest.raises(ValueError, match="the smallest size is at least 1"):
        parse_bounds(entry)
    with pytest.raises(ValueError, match="pool_sizes: "):
        ControlLimits(pool_sizes=(entry,))


def test_a_tier_has_bounds_of_its_own_and_may_have_no_instance() -> None:
    entries = ("PD=1-4", "PD@l4=0-8", "m/PD@h100=0-2")
    assert bounds_of(PoolName("m", Role.PD, "l4"), entries) == Bounds(0, 8)
    assert bounds_of(PoolName("m", Role.PD, "h100"), entries) == Bounds(0, 2)
    assert bounds_of(PoolName("n", Role.PD, "h100"), entries) == Bounds(1, 4)
    for entry in ("PD=0-2", "PD@l4=0-0", "PD@L4=1-2", "PD@l4=3-2"):
        with pytest.raises(ValueError, match="PD"):
            parse_bounds(entry)
