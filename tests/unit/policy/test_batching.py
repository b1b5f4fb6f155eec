from hypothesis import given
from hypothesis import strategies as st

from triptych.policy.batching import Prefill, StepPlan, plan_step


def works(prefix: str, sizes: list[int]) -> list[Prefill]:
    return [Prefill(f"{prefix}{index}", size) for index, size in enumerate(sizes)]


def test_decodes_go_first_then_ongoing_prefills_then_new_ones() -> None:
    plan = plan_step(["d0", "d1"], works("p", [5]), works("w", [4, 9]), token_budget=16, max_sequences=8)
    assert plan == StepPlan(("d0", "d1"), (Prefill("p0", 5), Prefill("w0", 4), Prefill("w1", 5)))
    assert plan.tokens == 16


def test_a_prefill_is_cut_to_what_the_budget_leaves() -> None:
    plan = plan_step(["d0"], works("p", [100, 3]), [], token_budget=8, max_sequences=8)
    assert plan.prefills == (Prefill("p0", 7),)


def test_nothing_is_left_for_prefills_when_decodes_fill_the_budget() -> None:
    plan = plan_step(["d0", "d1"], works("p", [3]), works("w", [3]), token_budget=2, max_sequences=8)
    assert plan == StepPlan(("d0", "d1"), ())


def test_new_sequences_join_only_while_there_are_places() -> None:
    plan = plan_step(["d0"], works("p", [1]), works("w", [1, 1, 1]), token_budget=99, max_sequences=3)
    assert [prefill.request_id for prefill in plan.prefills] == ["p0", "w0"]


def test_waiting_is_read_no_further_than_needed() -> None:
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
    order = [work.request_id for work in (*ongoing, *new)]
    assert [prefill.request_id for prefill in plan.prefills] == order[: len(plan.prefills)]
    left = {work.request_id: work.tokens for work in (*ongoing, *new)}
    assert all(1 <= prefill.tokens <= left[prefill.request_id] for prefill in plan.prefills)
    assert all(prefill.tokens == left[prefill.request_id] for prefill in plan.prefills[:-1])
    assert sum(prefill.request_id.startswith("w") for prefill in plan.prefills) <= extra
    assert plan.tokens or not (ids or ongoing or (new and extra))
