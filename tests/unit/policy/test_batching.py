from hypothesis import given
from hypothesis import strategies as st

from triptych.families.base import Span
from triptych.policy.batching import (
    Prefill,
    StepPlan,
    chunk,
    largest_within,
    plan_step,
    preemption_victim,
)


def works(prefix: str, sizes: list[int]) -> list[Prefill]:
    return [Prefill(f"{prefix}{index}", size) for index, size in enumerate(sizes)]


def test_decodes_go_first_then_ongoing_prefills_then_new_ones() -> None:
    plan = plan_step(["d0", "d1"], works("p", [5]), works("w", [4, 9]), token_budget=16, max_sequences=8)
    assert plan == StepPlan(("d0", "d1"), (Prefill("p0", 5), Prefill("w0", 4), Prefill("w1", 5)))
    assert plan.tokens == 16


def test_a_prefill_is_cut_to_the_remaining_budget() -> None:
    plan = plan_step(["d0"], works("p", [100, 3]), [], token_budget=8, max_sequences=8)
    assert plan.prefills == (Prefill("p0", 7),)


def test_the_last_token_of_a_budget_is_used() -> None:
    plan = plan_step(["d0"], works("p", [5]), [], token_budget=2, max_sequences=8)
    assert plan.prefills == (Prefill("p0", 1),)
    plan = plan_step(["d0"], [], works("w", [5]), token_budget=2, max_sequences=8)
    assert plan.prefills == (Prefill("w0", 1),)


def test_nothing_is_left_for_prefills_when_decodes_fill_the_budget() -> None:
    plan = plan_step(["d0", "d1"], works("p", [3]), works("w", [3]), token_budget=2, max_sequences=8)
    assert plan == StepPlan(("d0", "d1"), ())


def test_new_sequences_join_only_while_places_are_free() -> None:
    plan = plan_step(["d0"], works("p", [1]), works("w", [1, 1, 1]), token_budget=99, max_sequences=3)
    assert [prefill.sequence_id for prefill in plan.prefills] == ["p0", "w0"]


def test_the_waiting_queue_is_read_no_further_than_needed() -> None:
    waiting = iter(works("w", [10] * 1000))
    plan_step([], [], waiting, token_budget=15, max_sequences=8)
    assert len(list(waiting)) >= 997


sizes = st.lists(st.integers(1, 50), max_size=10)


@given(st.integers(0, 8), sizes, sizes, st.integers(8, 64), st.integers(0, 12))
def test_a_plan_is_within_its_bounds_and_makes_progress(
    decoding: int, prefilling: list[int], waiting: list[int], token_budget: int, extra: int
) -> None:
    ids = [f"d{index}" for index in range(decoding)]
    ongoing, new = works("p", prefilling), works("w", waiting)
    max_sequences = decoding + len(prefilling) + extra
    plan = plan_step(ids, ongoing, new, token_budget=token_budget, max_sequences=max_sequences)
    assert list(plan.decodes) == ids
    assert plan.tokens <= token_budget
    order = [work.sequence_id for work in (*ongoing, *new)]
    assert [prefill.sequence_id for prefill in plan.prefills] == order[: len(plan.prefills)]
    left = {work.sequence_id: work.tokens for work in (*ongoing, *new)}
    assert all(1 <= prefill.tokens <= left[prefill.sequence_id] for prefill in plan.prefills)
    assert all(prefill.tokens == left[prefill.sequence_id] for prefill in plan.prefills[:-1])
    assert sum(prefill.sequence_id.startswith("w") for prefill in plan.prefills) <= extra
    assert plan.tokens or not (ids or ongoing or (new and extra))


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
    plan = plan_step(["d"], [large], [], token_budget=8, max_sequences=8)
    assert plan.prefills == (Prefill("large", 20, bidirectional=(Span(0, 20),)),)
    rest = Prefill("rest", 30, 10, bidirectional=(Span(10, 20),))
    plan = plan_step(["d"], [rest], [], token_budget=8, max_sequences=8)
    assert plan.prefills == (Prefill("rest", 20, 10, bidirectional=(Span(10, 20),)),)
    plan = plan_step(["d"], [Prefill("p", 3), large], works("w", [9]), token_budget=8, max_sequences=8)
    assert [(one.sequence_id, one.tokens) for one in plan.prefills] == [("p", 3), ("w0", 4)]


def test_choices_take_a_place_each() -> None:
    waiting = [Prefill("w", 1, sequences=3), Prefill("v", 1)]
    plan = plan_step([], [Prefill("p", 1, sequences=2)], waiting, token_budget=9, max_sequences=5)
    assert [one.sequence_id for one in plan.prefills] == ["p", "w"]


# --- memory, budgets -------------------------------------------------------------------------------------------------


def test_the_latest_arrival_is_preempted() -> None:
    assert preemption_victim(["old", "older than", "young"]) == "young"


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
