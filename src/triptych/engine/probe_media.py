"""Generated items for measurements and first passes. It imports no torch, for engines that delay."""

import wave
from io import BytesIO

from PIL import Image

_SOUND_S = 10
_SAMPLE_RATE_HZ = 16_000


def image(side_px: int, *, noise: bool = False) -> bytes:
    """A square JPEG, with few or with many bytes per pixel."""
    out = BytesIO()
    if noise:
        Image.effect_noise((side_px, side_px), 64).convert("RGB").save(out, "JPEG", quality=95)
    else:
        Image.radial_gradient("L").resize((side_px, side_px)).convert("RGB").save(out, "JPEG", quality=75)
    return out.getvalue()


def sound(seconds: int = _SOUND_S) -> bytes:
    """A WAV clip of silence."""
    out = BytesIO()
    with wave.open(out, "wb") as clip:
        clip.setnchannels(1)
        clip.setsampwidth(2)
        clip.setframerate(_SAMPLE_RATE_HZ)
        clip.writeframes(bytes(2 * _SAMPLE_RATE_HZ * seconds))
    return out.getvalue()
