"""What requests need, by a sample of a workload."""

import pytest

from tests.unit.planning.kit import MODEL, demand, workload
from tests.unit.sim.kit import FAMILY, IMAGE, MIX
from triptych.planning.demand import MOST_FORMS, Demand
from triptych.workload.requests import Distribution, Mix, Planned, Size, WorkloadError


def test_needs_are_those_of_the_requests() -> None:
    requests = [Planned(0.0, 100, (IMAGE, IMAGE), 20)] * 3 + [Planned(0.0, 40, (), 5)]
    found = Demand.of(requests, FAMILY, MODEL, 2.0)
    image, text = found.needs
    assert (image.kind, image.items, image.output_tokens, image.share) == ("image", 2, 20, 0.75)
    assert image.item_tokens == ((224 // 28) ** 2,) * 2
    assert image.item_pixels == (224 * 224,) * 2
    assert image.prompt_tokens > 100 + 2 * 64
    assert (text.kind, text.items, text.embedding_nbytes, text.share) == ("text", 0, 0, 0.25)
    assert (found.burstiness, found.served) == (2.0, 1.0)


def test_many_forms_become_few_of_the_same_mean() -> None:
    many = Mix(MIX.images, Distribution.parse(",".join(map(str, range(50, 900, 3)))), MIX.output_tokens, IMAGE)
    drawn = workload(many).plan(20.0)
    few = Demand.of(drawn.requests, FAMILY, MODEL, 1.0)
    sampled = drawn.requests[:: len(drawn.requests) // 300]
    assert len(few.needs) <= MOST_FORMS
    assert sum(need.share for need in few.needs) == pytest.approx(1.0)
    mean = sum(planned.text_tokens for planned in sampled) / len(sampled)
    found = sum(need.share * (need.prompt_tokens - 64 * need.items) for need in few.needs)
    assert found == pytest.approx(mean, rel=0.1)


def test_requests_that_the_model_cannot_serve_are_counted_and_left_out() -> None:
    requests = [Planned(0.0, 100, (), 20), Planned(0.0, 100_000, (), 20)]
    assert Demand.of(requests, FAMILY, MODEL, 1.0).served == 0.5
    with pytest.raises(WorkloadError, match="no request can be served: the prompt has 100"):
        Demand.of(requests[1:], FAMILY, MODEL, 1.0)


def test_the_same_sample_has_the_same_needs() -> None:
    assert demand() == demand()
    assert demand(Mix(Distribution.parse("1"), MIX.text_tokens, MIX.output_tokens, Size(448, 448))) != demand()
