"""Measures, at start, how much the encoder may do between two decode steps on the same device."""

from triptych.engine.encoder import TransformersEncoderEngine
from triptych.engine.measuring import EncoderProbe
from triptych.engine.timing import fastest_s
from triptych.policy.batching import largest_within
from triptych.policy.iteration import ImageBudget


def measured_image_budget(
    encoder: TransformersEncoderEngine, *, decode_s: float, tpot_slo_s: float, most_items: int
) -> tuple[ImageBudget, float]:
    """The largest batch of equal items that can be encoded beside decodes within the objective (HydraInfer, 4.2).

    Items are images of 448 x 448 pixels, or clips of 10 s for audio-only models. ``decode_s`` is the duration of an
    iteration's decodes. Returns the batch (at least one item, even if it misses the objective) and the duration of such
    an iteration.
    """
    item = EncoderProbe(encoder).item()

    def iteration_s(items: int) -> float:
        return decode_s + fastest_s(lambda: encoder.encode([item] * items))

    iteration_s(1)
    items = largest_within(tpot_slo_s, most_items, iteration_s)
    return ImageBudget(items * item.tokens, items * item.nbytes), iteration_s(items)
