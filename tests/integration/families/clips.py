"""Clips for the audio families."""

import random
import wave
from collections.abc import Sequence
from io import BytesIO

import numpy as np

from tests.integration.families.harness import Item
from triptych.domain.media import MediaInfo, Modality, digest_of
from triptych.engine.media.audio import Samples, decode_audio

RATE_HZ = 16_000
"""At which all of the families hear."""


def random_clip(rng: random.Random, samples: int, rate_hz: int) -> Item:
    """A few tones that change every 20 ms, so that all windows differ, as 16-bit WAV."""
    noise = np.random.default_rng(rng.getrandbits(32))
    steps = -(-samples * 50 // rate_hz)
    tones = noise.uniform(100, rate_hz / 2.2, size=(steps, 3)).repeat(-(-samples // steps), axis=0)[:samples]
    loudness = noise.uniform(0.02, 0.3, size=(steps, 1)).repeat(-(-samples // steps), axis=0)[:samples]
    heard = (np.sin(2 * np.pi * np.cumsum(tones, axis=0) / rate_hz) * loudness).sum(axis=1)
    out = BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate_hz)
        file.writeframes((heard * 32_767).astype("<i2").tobytes())
    media = out.getvalue()
    digest = digest_of(media)
    info = MediaInfo(
        Modality.AUDIO,
        "wav",
        0,
        0,
        len(media),
        digest,
        duration_s=samples / rate_hz,
        samples=samples,
        sample_rate_hz=rate_hz,
    )
    return Item(media, info)


def samples_of(items: Sequence[Item]) -> list[Samples]:
    return [decode_audio(item.media, item.info, RATE_HZ) for item in items]
