"""Measures, at start, how much the encoder may do between two decode steps on the same device."""

import wave
from io import BytesIO

from PIL import Image

from triptych.engine.decoder.setup import fastest_s
from triptych.engine.encoder import PreparedMedia, TransformersEncoderEngine
from triptych.errors import InvalidMedia
from triptych.media.sniff import MediaLimits, inspect_media
from triptych.policy.batching import largest_within
from triptych.policy.iteration import ImageBudget

_SIDE_PX = 448
_SOUND_S = 10
_SAMPLE_RATE_HZ = 16_000


def measured_image_budget(
    encoder: TransformersEncoderEngine, *, decode_s: float, tpot_slo_s: float, most_items: int
) -> tuple[ImageBudget, float]:
    """The largest batch of equal items that can be encoded beside decodes within the objective (HydraInfer, 4.2).

    Items are images of 448 x 448 pixels, or clips of 10 s for audio-only models. ``decode_s`` is the duration of an
    iteration's decodes. Returns the batch (at least one item, even if it misses the objective) and the duration of such
    an iteration.
    """
    item = _probe(encoder)

    def iteration_s(items: int) -> float:
        return decode_s + fastest_s(lambda: encoder.encode([item] * items))

    iteration_s(1)
    items = largest_within(tpot_slo_s, most_items, iteration_s)
    return ImageBudget(items * item.tokens, items * item.nbytes), iteration_s(items)


def _probe(encoder: TransformersEncoderEngine) -> PreparedMedia:
    """An item that the model takes."""
    media = _image()
    try:
        return encoder.prepare(media, inspect_media(media, MediaLimits()))
    except InvalidMedia:
        media = _sound()
        return encoder.prepare(media, inspect_media(media, MediaLimits()))


def _image() -> bytes:
    out = BytesIO()
    Image.radial_gradient("L").resize((_SIDE_PX, _SIDE_PX)).convert("RGB").save(out, "PNG")
    return out.getvalue()


def _sound() -> bytes:
    out = BytesIO()
    with wave.open(out, "wb") as clip:
        clip.setnchannels(1)
        clip.setsampwidth(2)
        clip.setframerate(_SAMPLE_RATE_HZ)
        clip.writeframes(bytes(2 * _SAMPLE_RATE_HZ * _SOUND_S))
    return out.getvalue()
