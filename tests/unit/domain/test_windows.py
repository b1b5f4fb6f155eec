import math

from hypothesis import given
from hypothesis import strategies as st

from triptych.domain.windows import (
    SKETCH_BUCKETS,
    ClassWindow,
    Judged,
    NamedClass,
    Sketch,
    SketchBuilder,
    WindowReport,
    merged,
    total,
)

durations = st.lists(st.floats(2e-4, 1000), min_size=1, max_size=60)


def sketch_of(values: list[float]) -> Sketch:
    builder = SketchBuilder()
    for value in values:
        builder.add(value)
    return builder.sketch()


@given(durations, st.sampled_from([0.0, 0.5, 0.99, 1.0]))
def test_a_quantile_is_within_a_bucket_of_the_exact_one(values: list[float], share: float) -> None:
    exact = sorted(values)[max(1, math.ceil(share * len(values))) - 1]
    found = sketch_of(values).quantile_s(share)
    assert found is not None
    assert exact / 1.1 <= found <= exact * 1.1


@given(durations, durations)
def test_sketches_add_up(some: list[float], more: list[float]) -> None:
    assert sketch_of(some) + sketch_of(more) == sketch_of(some + more)
    assert sketch_of(some) + Sketch() == Sketch() + sketch_of(some) == sketch_of(some)


@given(st.lists(st.floats(0, 1e9, allow_nan=False), max_size=200))
def test_a_sketch_is_bounded_whatever_it_is_given(values: list[float]) -> None:
    sketch = sketch_of(values)
    assert sketch.count == len(values)
    assert sketch.first + len(sketch.counts) <= SKETCH_BUCKETS


def test_a_sketch_without_values_has_no_quantiles() -> None:
    assert Sketch().quantile_s(0.5) is None


def test_one_value_is_a_sketch_too() -> None:
    assert Sketch.of(0.5) == sketch_of([0.5])


def test_windows_add_up_by_class() -> None:
    first = ClassWindow(arrivals=2, media_tokens=10, ttft=Judged(1, 1), ttft_s=Sketch.of(0.1))
    second = ClassWindow(arrivals=1, missed_encode=1, ttft=Judged(0, 1), ttft_s=Sketch.of(0.2))
    reports = [
        WindowReport(1, 1, 1.0, 0.0, "m", (NamedClass("text", first), NamedClass("image-256", second))),
        WindowReport(1, 2, 1.0, 0.0, "m", (NamedClass("text", second),)),
    ]
    found = merged(reports)
    assert found["image-256"] == second
    assert found["text"].arrivals == 3
    assert found["text"].ttft == Judged(1, 2)
    assert found["text"].ttft_s.count == 2
    assert total(found.values()).arrivals == 4


def test_attainment_is_unknown_without_requests() -> None:
    assert Judged().attainment is None
    assert Judged(3, 1).attainment == 0.75
