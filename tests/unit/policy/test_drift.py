"""The drift of a mix of requests from another."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.domain.mix import NO_REQUESTS, Form, Mix
from triptych.policy.drift import by_chance, drifts, stability_index


def text(requests: int, *, output: int = 100) -> Form:
    """That came and were answered."""
    return Form("text", requests, requests, prompt_tokens=400 * requests, output_tokens=output * requests)


def images(requests: int, *, each: int = 2, side: int = 512) -> Form:
    items = 2 * each * requests
    return Form("image", requests, requests, items, side * side * items, items, 0.0, 1800 * requests, 100 * requests)


def drifted(before: Mix, now: Mix) -> set[str]:
    return {drift.figure for drift in drifts(before, now) if drift.is_one}


def test_the_index_is_that_of_the_definition() -> None:
    found = stability_index({1: 5000, 2: 5000}, {1: 8000, 2: 2000})
    assert found == pytest.approx(0.3 * 0.470004 + -0.3 * -0.916291, rel=1e-3)
    assert stability_index({1: 30, 2: 70}, {1: 30, 2: 70}) == 0


def test_what_only_one_mix_has_does_not_make_the_index_infinite() -> None:
    assert 1 < stability_index({0: 300}, {2: 300}) < 20


def test_text_that_becomes_images_drifts_in_items_and_prompts_but_not_in_answers() -> None:
    assert drifted(Mix.of([text(300)]), Mix.of([images(300)])) == {"items per request", "tokens per prompt"}


def test_larger_images_drift_in_their_size_alone() -> None:
    assert drifted(Mix.of([images(300)]), Mix.of([images(300, side=1500)])) == {"pixels per item"}


def test_longer_answers_drift_and_unanswered_requests_say_nothing_of_them() -> None:
    assert drifted(Mix.of([text(300)]), Mix.of([text(300, output=600)])) == {"tokens per answer"}
    unanswered = Form("text", 300, 0, prompt_tokens=60_000)
    assert drifted(Mix.of([text(300)]), Mix.of([unanswered])) == set()


def test_a_few_requests_that_differ_by_chance_are_no_drift() -> None:
    rng = random.Random(1)

    def drawn(count: int) -> Mix:
        return Mix.of(images(1, each=2 ** rng.randrange(4)) for _ in range(count))

    plan = drawn(300)
    assert sum("items per request" in drifted(plan, drawn(20)) for _ in range(200)) <= 2


def test_the_bound_by_chance_falls_with_the_number_of_requests() -> None:
    few, many = by_chance({1: 30, 2: 30}, {1: 30, 2: 30}), by_chance({1: 3000, 2: 3000}, {1: 3000, 2: 3000})
    assert few == pytest.approx(100 * many)


def test_a_mix_without_requests_has_no_drift() -> None:
    assert drifts(Mix.of([text(300)]), NO_REQUESTS) == ()


def test_equal_forms_are_added_up_and_the_rarest_give_way() -> None:
    mix = Mix.of([text(3), images(1), text(4), images(2, side=2000)], most=2)
    assert [(form.kind, form.requests) for form in mix.forms] == [("text", 7), ("image", 2)]
    assert mix.requests == 9


COUNTS = st.dictionaries(st.integers(0, 12), st.integers(1, 1000), min_size=1)


@given(COUNTS, COUNTS)
def test_the_index_is_never_negative_and_the_same_in_both_directions(
    before: dict[int, int], now: dict[int, int]
) -> None:
    index = stability_index(before, now)
    assert index >= -1e-12
    assert index == pytest.approx(stability_index(now, before), abs=1e-9)


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 40), st.integers(1, 9000)), min_size=1, max_size=20))
def test_the_sum_of_equal_forms_has_their_key(numbers: list[tuple[int, int, int]]) -> None:
    forms = [
        Form("image", count, 0, items * count, 100 * items * count, items * count, 0.0, prompt * count)
        for count, items, prompt in numbers
    ]
    for form in Mix.of(forms).forms:
        assert form.key in {each.key for each in forms}
