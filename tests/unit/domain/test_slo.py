import re

import pytest

from triptych.domain.media import Modality
from triptych.domain.slo import CLASSES, Isolated, Metric, Objective, Slo, modality_of, request_class

ALONE = Isolated(prepare_s=0.01, encode_s=0.09, prefill_s=0.1, tbt_s=0.02)


def test_objectives_are_seconds_milliseconds_or_factors() -> None:
    slo = Slo.parse(["ttft=5x", "tbt=100ms", "e2e=20.5s"])
    assert slo.objective("text", Metric.TTFT) == Objective(5.0, relative=True)
    assert slo.objective("image-256", Metric.TBT) == Objective(0.1)
    assert slo.objective("text", Metric.E2E) == Objective(20.5)


def test_the_most_specific_objective_applies() -> None:
    slo = Slo.parse(["ttft=1s", "image:ttft=2s", "image-1024:ttft=3s"])
    of = {name: slo.objective(name, Metric.TTFT) for name in ("text", "image-256", "image-1024", "video-256")}
    assert {name: objective.value for name, objective in of.items() if objective} == {
        "text": 1.0,
        "image-256": 2.0,
        "image-1024": 3.0,
        "video-256": 1.0,
    }


def test_without_entries_there_are_no_objectives() -> None:
    assert Slo.parse([]).objective("text", Metric.TTFT) is None


def test_a_factor_is_of_the_isolated_latency_and_unknown_without_it() -> None:
    factor = Objective(5, relative=True)
    assert factor.seconds(Metric.TTFT, ALONE) == pytest.approx(1.0)
    assert factor.seconds(Metric.TBT, ALONE) == pytest.approx(0.1)
    assert factor.seconds(Metric.E2E, ALONE, output_tokens=11) == pytest.approx(5 * (0.2 + 10 * 0.02))
    assert factor.seconds(Metric.TTFT, None) is None
    assert Objective(0.5).seconds(Metric.TTFT, None) == 0.5


@pytest.mark.parametrize(
    "entry",
    [
        "ttft",
        "ttft=5",
        "ttft=-1s",
        "ttft=0s",
        "ttft=0.5x",
        "ttft=nan",
        "ttft=1e3s",
        "tpot=1s",
        "dog:ttft=1s",
        "ttft=4000s",
        "ttft=1001x",
        "image-99:ttft=1s",
        "ttft=1s;drop",
    ],
)
def test_an_invalid_entry_is_named(entry: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(entry))):
        Slo.parse([entry])


def test_a_second_objective_for_the_same_class_is_refused() -> None:
    with pytest.raises(ValueError, match="already"):
        Slo.parse(["ttft=1s", "ttft=2s"])


@pytest.mark.parametrize(
    ("tokens", "name"),
    [
        ({}, "text"),
        ({Modality.IMAGE: 256}, "image-256"),
        ({Modality.IMAGE: 257}, "image-1024"),
        ({Modality.IMAGE: 20_000}, "image-more"),
        ({Modality.IMAGE: 100, Modality.VIDEO: 5000}, "video-16384"),
    ],
)
def test_classes_are_text_or_the_largest_modality_with_its_tokens(tokens: dict[Modality, int], name: str) -> None:
    assert request_class(tokens) == name
    assert name in CLASSES
    assert modality_of(name) == name.partition("-")[0]
