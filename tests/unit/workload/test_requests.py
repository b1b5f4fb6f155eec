import contextlib
import itertools
import random
import statistics
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.workload.requests import Clip, Distribution, Mix, Planned, Size, WorkloadError, arrivals, synthetic


def rng(seed: int = 0) -> random.Random:
    return random.Random(seed)


def test_a_mix_is_sampled_by_its_weights() -> None:
    distribution = Distribution.parse("1:0.6, 4:0.3,8:0.1")
    draw = rng()
    drawn = [distribution.draw(draw) for _ in range(20_000)]
    shares = {value: drawn.count(value) / len(drawn) for value in (1, 4, 8)}
    assert shares == pytest.approx({1: 0.6, 4: 0.3, 8: 0.1}, abs=0.02)


def test_a_plain_number_is_a_constant() -> None:
    assert {Distribution.parse("64").draw(rng(seed)) for seed in range(20)} == {64}


@pytest.mark.parametrize("text", ["", "a", "1:", "1:x", "1:-1", "1:0", "-1", "1:inf", "1:nan", "99", "1,,2"])
def test_an_invalid_distribution_is_refused(text: str) -> None:
    with pytest.raises(WorkloadError):
        Distribution.parse(text, most=50)


@given(st.text(max_size=30))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    for parse in (Distribution.parse, Size.parse):
        with contextlib.suppress(WorkloadError):
            parse(text)


@pytest.mark.parametrize("text", ["336", "0x3", "3x0", "99999x1", "axb", "-1x2"])
def test_an_invalid_size_is_refused(text: str) -> None:
    with pytest.raises(WorkloadError):
        Size.parse(text)


@pytest.mark.parametrize(("burstiness", "variation"), [(0.0, 0.0), (1.0, 1.0), (4.0, 2.0)])
def test_arrivals_have_their_rate_and_their_burstiness(burstiness: float, variation: float) -> None:
    times = arrivals(20.0, 1000.0, burstiness, rng())
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert len(times) / 1000 == pytest.approx(20, rel=0.05)
    assert statistics.pstdev(gaps) / statistics.fmean(gaps) == pytest.approx(variation, abs=0.15)
    assert times == sorted(times)
    assert all(0 <= at_s < 1000 for at_s in times)


@pytest.mark.parametrize("burstiness", [0.0, 1.0, 50.0])
def test_short_runs_have_their_rate_on_average(burstiness: float) -> None:
    draw = rng()
    numbers = [len(arrivals(10.0, 0.4, burstiness, draw)) for _ in range(20_000)]
    assert statistics.fmean(numbers) == pytest.approx(4, rel=0.1)


def test_the_same_seed_makes_the_same_requests() -> None:
    mix = Mix(Distribution.parse("1:1,2:1"), Distribution.parse("5,9"), Distribution.parse("7"), Size(8, 8))
    first, again, other = (synthetic(mix, rate=3, duration_s=20, burstiness=1, rng=rng(seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert {len(request.images) for request in first.requests} == {1, 2}


@pytest.mark.parametrize("burstiness", [0.0, 1.0, 5.0])
def test_plans_of_one_seed_are_the_same_draws_at_every_rate(burstiness: float) -> None:
    mix = Mix(Distribution.parse("0,1,2"), Distribution.parse("5,9"), Distribution.parse("7,8"), Size(8, 8))
    slow, fast = (synthetic(mix, rate=rate, duration_s=40, burstiness=burstiness, rng=rng(3)) for rate in (2.0, 6.0))
    assert len(fast.requests) > 2 * len(slow.requests) > 80
    for late, early in zip(slow.requests, fast.requests, strict=False):
        assert replace(late, arrival_s=0.0) == replace(early, arrival_s=0.0)
        assert late.arrival_s == pytest.approx(3 * early.arrival_s)


def test_another_distribution_of_one_part_leaves_the_other_parts_as_they_are() -> None:
    mix = Mix(Distribution.parse("1,2"), Distribution.parse("5,9"), Distribution.parse("7,8"), Size(8, 8))
    other = replace(mix, images=Distribution.parse("0,3,7"), videos=Distribution.parse("0,1"))
    plans = [synthetic(drawn, rate=5, duration_s=40, burstiness=1, rng=rng()) for drawn in (mix, other)]
    parts = [
        [(request.arrival_s, request.text_tokens, request.output_tokens) for request in plan.requests] for plan in plans
    ]
    assert parts[0] == parts[1]
    assert {len(request.videos) for request in plans[1].requests} == {0, 1}


def test_a_request_is_never_empty() -> None:
    one = Distribution.parse("1")
    mix = Mix(one, one, one, Size(8, 8))
    plan = synthetic(mix, rate=0.001, duration_s=0.1, burstiness=1, rng=rng())
    assert (len(plan.requests), plan.rate) == (1, 10.0), "the rate is that of what is sent"


@pytest.mark.parametrize(
    ("planned", "kind"),
    [
        (Planned(0, 1, (), 1), "text"),
        (Planned(0, 1, (Size(1, 1),), 1), "image"),
        (Planned(0, 1, (Size(1, 1),), 1, sounds_s=(1.0,)), "audio"),
        (Planned(0, 1, (), 1, videos=(Clip(Size(2, 2), 1.0),), sounds_s=(1.0,)), "video"),
    ],
)
def test_a_request_is_of_the_kind_of_its_costliest_items(planned: Planned, kind: str) -> None:
    assert planned.kind == kind


def test_videos_and_sounds_leave_the_other_draws_as_they_are() -> None:
    """So that workloads with and without them can be compared."""
    plain = Mix(Distribution.parse("0,1,2"), Distribution.parse("3,4"), Distribution.parse("5,6"), Size(8, 8))
    richer = replace(plain, videos=Distribution.parse("1"), sounds=Distribution.parse("2"), sound_s=1.5)
    of_plain, of_richer = plain.request(0.0, rng()), richer.request(0.0, rng())
    assert (of_plain.images, of_plain.text_tokens, of_plain.output_tokens) == (
        of_richer.images,
        of_richer.text_tokens,
        of_richer.output_tokens,
    )
    assert of_richer.videos == (richer.clip,)
    assert of_richer.sounds_s == (1.5, 1.5)
