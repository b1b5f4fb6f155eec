import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.domain.stage import Role
from triptych.families.base import Span
from triptych.policy.batching import (
    Prefill,
    StepPlan,
    chunk,
    largest_within,
    most_copied_nbytes,
    plan_step,
    preemption_victim,
    smallest_efficient,
)


def works(prefix: str, sizes: list[int]) -> list[Prefill]:
    return [Prefill(f"{prefix}{index}", size) for index, size in enumerate(sizes)]


def test_decodes_go_first_then_prompts_in_their_order() -> None:
    plan = plan_step(["d0", "d1"], works("p", [5, 4, 9]), token_budget=16)
    assert plan == StepPlan(("d0", "d1"), (Prefill("p0", 5), Prefill("p1", 4), Prefill("p2", 5)))
    assert plan.tokens == 16


def test_a_prefill_is_cut_to_the_remaining_budget() -> None:
    plan = plan_step(["d0"], works("p", [100, 3]), token_budget=8)
    assert plan.prefills == (Prefill("p0", 7),)


def test_the_last_token_of_a_budget_is_used() -> None:
    plan = plan_step(["d0"], works("p", [5]), token_budget=2)
    assert plan.prefills == (Prefill("p0", 1),)


def test_nothing_is_left_for_prefills_when_decodes_fill_the_budget() -> None:
    plan = plan_step(["d0", "d1"], works("p", [3, 3]), token_budget=2)
    assert plan == StepPlan(("d0", "d1"), ())


def test_fewer_tokens_of_prompts_are_computed_beside_decodes() -> None:
    plan = plan_step(["d0"], works("p", [2, 100]), token_budget=64, beside_decodes=5)
    assert plan == StepPlan(("d0",), (Prefill("p0", 2), Prefill("p1", 3)))
    assert plan_step([], works("p", [100]), token_budget=64, beside_decodes=5).tokens == 64
    assert plan_step(["d0", "d1"], works("p", [100]), token_budget=4, beside_decodes=5).tokens == 4


def test_the_queue_is_read_no_further_than_needed() -> None:
    prompts = iter(works("p", [10] * 1000))
    plan_step([], prompts, token_budget=15)
    assert len(list(prompts)) == 998


@given(st.integers(0, 8), st.lists(st.integers(1, 50), max_size=20), st.integers(8, 64))
def test_a_plan_is_within_its_bounds_and_makes_progress(decoding: int, sizes: list[int], token_budget: int) -> None:
    ids = [f"d{index}" for index in range(decoding)]
    prompts = works("p", sizes)
    plan = plan_step(ids, prompts, token_budget=token_budget)
    assert list(plan.decodes) == ids
    assert plan.tokens <= token_budget
    order = [work.sequence_id for work in prompts]
    assert [prefill.sequence_id for prefill in plan.prefills] == order[: len(plan.prefills)]
    left = {work.sequence_id: work.tokens for work in prompts}
    assert all(1 <= prefill.tokens <= left[prefill.sequence_id] for prefill in plan.prefills)
    assert all(prefill.tokens == left[prefill.sequence_id] for prefill in plan.prefills[:-1])
    assert plan.tokens == min(token_budget, decoding + sum(sizes))


# --- bidirectional spans --------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 12)), max_size=5),
    st.integers(-9, 40),
    st.integers(0, 60),
    st.integers(0, 30),
)
def test_a_chunk_does_not_cut_a_bidirectional_span(
    gaps: list[tuple[int, int]], limit: int, length: int, first: int
) -> None:
    runs: list[Span] = []
    for gap, tokens in gaps:
        start = (runs[-1].start + runs[-1].tokens if runs else 0) + gap
        runs.append(Span(start, tokens))
    inside = {position for run in runs for position in range(run.start + 1, run.start + run.tokens)}
    while first in inside:
        first -= 1
    tokens = chunk(Prefill("a", length, first, bidirectional=tuple(runs)), limit)
    most = max(0, min(limit, length))
    assert 0 <= tokens <= most
    assert first + tokens not in inside
    assert all(first + larger in inside for larger in range(tokens + 1, most + 1))


def test_a_span_larger_than_the_budget_runs_first_or_waits() -> None:
    large = Prefill("large", 30, bidirectional=(Span(0, 20),))
    plan = plan_step(["d"], [large], token_budget=8)
    assert plan.prefills == (Prefill("large", 20, bidirectional=(Span(0, 20),)),)
    rest = Prefill("rest", 30, 10, bidirectional=(Span(10, 20),))
    plan = plan_step(["d"], [rest], token_budget=8)
    assert plan.prefills == (Prefill("rest", 20, 10, bidirectional=(Span(10, 20),)),)
    plan = plan_step(["d"], [Prefill("p", 3), large, *works("w", [9])], token_budget=8)
    assert [(prefill.sequence_id, prefill.tokens) for prefill in plan.prefills] == [("p", 3), ("w0", 4)]


# --- memory, budgets -------------------------------------------------------------------------------------------------


def test_the_latest_arrival_is_preempted() -> None:
    assert preemption_victim(["old", "older than", "young"]) == "young"


def test_idle_sequences_are_spared_until_one_other_is_left() -> None:
    assert preemption_victim(["old", "young", "idle"], {"idle"}) == "young"
    assert preemption_victim(["idle", "old", "also idle"], {"idle", "also idle"}) == "also idle"
    assert preemption_victim(["old"]) == "old"


@given(st.integers(1, 50), st.integers(0, 5000), st.integers(0, 6000))
def test_the_largest_batch_within_an_objective_is_found_with_few_measurements(
    least: int, extra: int, fitting: int
) -> None:
    asked: list[int] = []

    def measure_s(batch: int) -> float:
        asked.append(batch)
        return float(batch)

    found = largest_within(float(fitting), least + extra, measure_s, least=least)
    assert found == max(least, min(least + extra, fitting))
    assert all(least <= batch <= min(least + extra, 2 * max(least, fitting)) for batch in asked)
    assert len(asked) <= 30


@pytest.mark.parametrize(
    ("pass_s", "most", "expected"),
    [(1.0, 64, 16), (1.0, 8, 8), (0.0, 64, 1), (0.05, 64, 1), (0.5, 64, 8), (1.0, 1, 1), (1.0, 3, 2)],
)
def test_the_smallest_batch_is_found_that_a_larger_one_hardly_improves_upon(
    pass_s: float, most: int, expected: int
) -> None:
    """Each item takes 1 s, and each batch ``pass_s`` more: 16 take 17 s, 32 take 33 s, which is 0.97 of twice that."""
    measured: list[int] = []

    def measure_s(size: int) -> float:
        measured.append(size)
        return pass_s + size

    assert smallest_efficient(most, measure_s, enough_s=100.0, worthwhile=0.95) == expected
    assert max(measured) <= most


@pytest.mark.parametrize(("short_s", "expected"), [(0.0, 1), (3.0, 4), (4.0, 4), (4.5, 8), (1000.0, 64)])
def test_a_batch_that_takes_less_than_a_short_time_is_too_small(short_s: float, expected: int) -> None:
    assert smallest_efficient(64, float, enough_s=2000.0, worthwhile=0.95, short_s=short_s) == expected


def test_no_batch_is_measured_that_is_larger_than_one_that_took_long_enough() -> None:
    measured: list[int] = []

    def measure_s(size: int) -> float:
        measured.append(size)
        return 10.0 + size

    assert smallest_efficient(64, measure_s, enough_s=12.0, worthwhile=0.95) == 2
    assert measured == [1, 2]


@pytest.mark.parametrize("role", list(Role))
def test_copies_between_steps_are_bounded_where_decodes_would_wait_for_them(role: Role) -> None:
    bounded = most_copied_nbytes(role.stages, 1 << 20) == 1 << 20
    assert bounded == ("D" in role.value)
