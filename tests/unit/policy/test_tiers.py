"""Pools of one role on several kinds of devices: the cheapest grows first, the dearest shrinks first."""

import itertools
from dataclasses import replace

import pytest

from triptych.domain.decision import Bounds, InstancePhase, PoolFacts, PoolInstance, PoolLoad, PoolView, TierShare, Why
from triptych.domain.windows import Judged
from triptych.policy.scaling import ScalingLimits, decide, predicted_wait_s
from triptych.policy.tiers import TierView, shares

LIMITS = ScalingLimits()
CHEAP = TierView("m/PD@cheap", 1, 1, Bounds(1, 3), 100.0, 1.0)
DEAR = TierView("m/PD@dear", 1, 1, Bounds(0, 4), 200.0, 6.0)


def test_one_pool_alone_has_no_others() -> None:
    assert shares([CHEAP]) == {"m/PD@cheap": TierShare()}


def test_the_lowest_price_per_load_grows_first_and_shrinks_last() -> None:
    shared = shares([DEAR, CHEAP])
    assert shared["m/PD@cheap"] == TierShare(200.0, 200.0, grows_first="", shrinks_first="m/PD@dear")
    assert shared["m/PD@dear"] == TierShare(100.0, 100.0, grows_first="m/PD@cheap", shrinks_first="")
    assert shares([replace(DEAR, usd_per_hour=1.9), CHEAP])["m/PD@cheap"].grows_first == "m/PD@dear", "per load"


def test_a_dearer_tier_grows_when_no_cheaper_one_can() -> None:
    for full in (replace(CHEAP, wanted=3), replace(CHEAP, given_up=True), replace(CHEAP, capacity_per_s=None)):
        assert shares([full, DEAR])["m/PD@dear"].grows_first == ""
    assert shares([replace(CHEAP, capacity_per_s=0.0), DEAR])["m/PD@cheap"].grows_first == "m/PD@dear"


def test_a_cheaper_tier_shrinks_when_no_dearer_one_can() -> None:
    assert shares([CHEAP, replace(DEAR, wanted=0)])["m/PD@cheap"].shrinks_first == ""


def test_an_unknown_price_is_the_dearest() -> None:
    assert shares([replace(CHEAP, usd_per_hour=None), DEAR])["m/PD@cheap"].grows_first == "m/PD@dear"


def view(pool: str, size: int, per_s: float, share: TierShare, capacity_per_s: float = 100.0) -> PoolView:
    return PoolView(
        pool=pool,
        wanted=size,
        bounds=Bounds(0, 4),
        instances=tuple(PoolInstance(f"i{number}", InstancePhase.READY) for number in range(size)),
        load=PoolLoad(per_s, per_s, per_s, per_s, 0.0, 1.0),
        report_age_s=1.0,
        facts=PoolFacts(capacity_per_s, 1.0),
        tiers=share,
        attainment=Judged(1000, 0),
        start_s=10.0,
        period_due=True,
        low_periods=1,
    )


def test_a_pool_bears_what_the_others_of_its_role_do_not() -> None:
    decision = decide(view("m/PD@cheap", 1, 350, TierShare(100.0, 100.0)), LIMITS)
    assert (decision.target, decision.needed) == (3, 3)
    assert "other tiers bear 100" in decision.reasons[0].text
    assert decide(view("m/PD@cheap", 1, 190, TierShare(100.0, 100.0)), LIMITS).target == 1


def test_a_dearer_pool_waits_for_a_cheaper_one_also_when_attainment_is_missed() -> None:
    share = TierShare(100.0, 100.0, grows_first="m/PD@cheap")
    for waits in (
        view("m/PD@dear", 1, 350, share),
        replace(view("m/PD@dear", 1, 150, share), attainment=Judged(900, 100)),
    ):
        decision = decide(waits, LIMITS)
        assert (decision.target, decision.why) == (1, Why.TIER)
        assert decision.reasons[0].text == "m/PD@cheap is cheaper, and can grow"


def test_a_pool_shrinks_to_nothing_if_the_others_bear_the_load_and_no_dearer_one_shrinks_first() -> None:
    share = TierShare(200.0, 200.0)
    assert decide(view("m/PD@dear", 1, 100, share), LIMITS).target == 0
    held = decide(view("m/PD@dear", 1, 100, replace(share, shrinks_first="m/PD@gold")), LIMITS)
    assert (held.target, held.why) == (1, Why.CAUTION)
    assert held.reasons[0].text == "m/PD@gold is dearer, and shrinks first"
    assert decide(view("m/PD@dear", 1, 190, share), LIMITS).target == 1, "1.2 times the load is to be borne"


def test_what_waits_is_worked_off_by_all_tiers() -> None:
    waiting = PoolLoad(0, 0, 0, 0, 600.0, 1.0)
    assert predicted_wait_s(view("m/PD@a", 1, 0, TierShare(200.0, 200.0)), waiting) == pytest.approx(2.0)
    assert predicted_wait_s(view("m/PD@a", 0, 0, TierShare(200.0, 200.0)), waiting) == pytest.approx(3.0)
    assert predicted_wait_s(view("m/PD@a", 0, 0, TierShare()), waiting) == float("inf")


def sizes_over(loads: list[float]) -> list[tuple[int, int]]:
    """Sizes of the cheap and the dear pool, as each follows its decisions at once, with a step for each load."""
    sizes = {"m/PD@cheap": 1, "m/PD@dear": 0}
    found = []
    for per_s in loads:
        tiers = [
            replace(tier, wanted=sizes[tier.pool], ready=sizes[tier.pool], bounds=Bounds(0, 4))
            for tier in (CHEAP, DEAR)
        ]
        shared = shares(tiers)
        for tier in tiers:
            decision = decide(
                view(tier.pool, sizes[tier.pool], per_s, shared[tier.pool], tier.capacity_per_s or 0.0), LIMITS
            )
            sizes[tier.pool] = decision.target
        found.append((sizes["m/PD@cheap"], sizes["m/PD@dear"]))
    return found


def test_a_load_that_rises_and_falls_fills_the_cheap_tier_first_and_empties_the_dear_one_first() -> None:
    found = sizes_over([90, 390, 390, 900, 900, 900, 300, 300, 300, 300, 300, 50, 50, 50, 50, 50, 50])
    assert (4, 0) in found
    assert max(dear for _, dear in found) >= 2
    for (cheap, dear), (next_cheap, next_dear) in itertools.pairwise(found):
        assert next_dear <= dear or cheap == 4, "the dear tier grew although the cheap one could"
        assert next_cheap >= cheap or dear == 0, "the cheap tier shrank although the dear one could"
    assert found[-1] == (1, 0)
