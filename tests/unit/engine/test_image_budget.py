"""The image budget is the largest batch that the encoder was measured to finish beside the decodes; a pass has no more than is faster together."""

from collections.abc import Callable

import pytest

from tests.unit.engine.tiny import TOKENS_PER_IMAGE
from triptych.engine import image_budget
from triptych.engine.encoder import TransformersEncoderEngine
from triptych.engine.image_budget import measured_image_budget, tokens_worth_batching


def takes(
    encoder: TransformersEncoderEngine, monkeypatch: pytest.MonkeyPatch, seconds: Callable[[int], float]
) -> list[int]:
    """Passes of the encoder take so long, by their number of items. Returns the passes, which are encoded with one item only."""
    batches: list[int] = []
    encode = encoder.encode

    def counted(batch: list[object]) -> object:
        batches.append(len(batch))
        return encode(batch[:1])  # type: ignore[arg-type]

    def timed_s(work: Callable[[], object]) -> float:
        work()
        return seconds(batches[-1])

    monkeypatch.setattr(encoder, "encode", counted)
    monkeypatch.setattr(image_budget, "fastest_s", timed_s)
    return batches


@pytest.mark.parametrize(("tpot_slo_s", "items"), [(0.1, 5), (0.06, 1), (0.001, 1), (9.0, 8)])
def test_the_largest_batch_that_fits_beside_the_decodes_is_found(
    encoder: TransformersEncoderEngine, monkeypatch: pytest.MonkeyPatch, tpot_slo_s: float, items: int
) -> None:
    """With an encoder that takes 10 ms for each item, and decodes that take 50 ms."""
    batches = takes(encoder, monkeypatch, lambda items: 0.01 * items)
    budget, iteration_s = measured_image_budget(encoder, decode_s=0.05, tpot_slo_s=tpot_slo_s, most_items=8)
    assert budget.tokens == items * TOKENS_PER_IMAGE
    assert budget.nbytes == items * 3 * 32 * 32 * 4
    assert iteration_s == pytest.approx(0.05 + 0.01 * items)
    assert max(batches) <= max(2 * items, 2), "no batch far beyond the objective is measured"


def test_a_real_vision_encoder_is_measured(encoder: TransformersEncoderEngine) -> None:
    budget, iteration_s = measured_image_budget(encoder, decode_s=0.001, tpot_slo_s=60.0, most_items=4)
    assert budget.tokens == 4 * TOKENS_PER_IMAGE
    assert 0.001 < iteration_s < 60.0


@pytest.mark.parametrize(
    ("pass_s", "item_s", "items"), [(0.003, 0.001, 8), (0.0004, 0.001, 4), (0.0, 0.001, 1), (0.2, 0.001, 1)]
)
def test_a_pass_has_no_more_items_than_are_faster_together(
    encoder: TransformersEncoderEngine, monkeypatch: pytest.MonkeyPatch, pass_s: float, item_s: float, items: int
) -> None:
    """With an encoder that takes so long for each pass, and for each item of it; one that takes 0.05 s is long enough."""
    takes(encoder, monkeypatch, lambda items: pass_s + item_s * items)
    assert tokens_worth_batching(encoder, most_items=8) == items * TOKENS_PER_IMAGE


def test_a_real_vision_encoder_finds_what_it_does_faster_together(encoder: TransformersEncoderEngine) -> None:
    assert tokens_worth_batching(encoder, most_items=4) in {TOKENS_PER_IMAGE * items for items in (1, 2, 4)}
