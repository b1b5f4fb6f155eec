"""Measures, at start, how much an encoder does in one pass: what is faster together, and what fits between two decode steps on the same device."""

from triptych.engine.encoder import TransformersEncoderEngine
from triptych.engine.measuring import EncoderProbe
from triptych.engine.probe_media import image
from triptych.engine.timing import fastest_s
from triptych.errors import InvalidMedia
from triptych.policy.batching import largest_within, smallest_efficient
from triptych.policy.iteration import ImageBudget

_SMALL_PX = 64
_ENOUGH_S = 0.05
"""A pass that takes so long spends its time in large products, which on a CPU are no faster for more rows."""
_WORTHWHILE = 0.95


def tokens_worth_batching(encoder: TransformersEncoderEngine, *, most_items: int) -> int:
    """Embedding tokens of the smallest pass, of small images, that twice as many would hardly make faster per token.

    All items of a pass are done at its end, and on a CPU large passes take no less time per item than small ones: longer ones only make
    the first item wait. Takes about 0.3 s, or as long as three passes over one small image.
    """
    probe = EncoderProbe(encoder)
    try:
        item = probe.prepared(image(_SMALL_PX))
    except InvalidMedia:
        item = probe.item()
    items = smallest_efficient(
        most_items,
        lambda count: fastest_s(lambda: encoder.encode([item] * count)),
        enough_s=_ENOUGH_S,
        worthwhile=_WORTHWHILE,
    )
    return items * item.tokens


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
