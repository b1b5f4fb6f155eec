"""Damaged files of every format are refused, or decoded as their header says, within bounds of time and memory.

The header's reader or the decoder detects the damage; neither takes long or ends the process.
"""

from collections.abc import Callable, Iterator
from io import BytesIO
from random import Random
from time import process_time

import numpy as np
import pytest
from PIL import Image

from triptych.domain.media import MediaInfo, Modality
from triptych.engine.media.decoders import DecodeLimits, DecoderProcesses
from triptych.errors import InvalidMedia
from triptych.media.sniff import MediaLimits, inspect_media
from triptych.testing import clips

pytestmark = pytest.mark.process

LIMITS = MediaLimits(
    max_image_pixels=1 << 20, max_scanned_pixels=1 << 26, max_video_pixels=1 << 26, max_audio_samples=1 << 22
)
DECODING = DecodeLimits(max_decode_s=5.0, max_decode_bytes=512 << 20)
MUTATIONS = 100
"""Of each file; seconds of CPU time for all."""
MAX_INSPECT_S = 0.5
SAMPLE_RATE_HZ = 16_000


@pytest.fixture(scope="module")
def decoders() -> Iterator[DecoderProcesses]:
    processes = DecoderProcesses(DECODING)
    yield processes
    processes.close()


def photo(mode: str) -> Image.Image:
    pixels = Random(mode).randbytes(40 * 30 * 3)
    return Image.frombytes("RGB", (40, 30), pixels).convert(mode)


def saved(form: str, mode: str = "RGB", **options: object) -> bytes:
    out = BytesIO()
    photo(mode).save(out, form, **options)
    return out.getvalue()


FILES: dict[str, Callable[[], bytes]] = {
    "png": lambda: saved("png"),
    "png of a palette": lambda: saved("png", "P", transparency=3),
    "png of 16 bits": lambda: saved("png", "I;16"),
    "jpeg": lambda: saved("jpeg"),
    "progressive jpeg": lambda: saved("jpeg", progressive=True),
    "cmyk jpeg": lambda: saved("jpeg", "CMYK"),
    "webp": lambda: saved("webp"),
    "webp with alpha": lambda: saved("webp", "RGBA"),
    "lossless webp": lambda: saved("webp", lossless=True),
    "animated webp": lambda: saved("webp", save_all=True, append_images=[photo("RGB").rotate(90)]),
    "gif": lambda: saved("gif", "P"),
    "animated gif": lambda: saved("gif", "P", save_all=True, append_images=[photo("P").rotate(90)]),
    "bmp": lambda: saved("bmp"),
    "bmp of a palette": lambda: saved("bmp", "P"),
    "mp4": lambda: clips.video(frames=8),
    "webm": lambda: clips.video(frames=8, form="webm"),
    "wav": lambda: clips.audio(0.2),
    "flac": lambda: clips.audio(0.2, form="flac"),
    "mp3": lambda: clips.audio(0.2, form="mp3"),
    "ogg": lambda: clips.audio(0.2, 48_000, form="ogg"),
    "m4a": lambda: clips.audio(0.2, form="m4a"),
}


def mutated(data: bytes, rng: Random) -> bytes:
    """Bytes changed, removed, repeated or inserted; numbers made extreme. The head is hit as often as the rest."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 6)):
        place = rng.randrange(min(len(out), 200) if rng.random() < 0.5 else len(out))
        match rng.randrange(5):
            case 0:
                out[place] = rng.randrange(256)
            case 1:
                out[place] ^= 1 << rng.randrange(8)
            case 2:
                out[place : place + 4] = rng.choice([b"\xff\xff\xff\xff", bytes(4), b"\x7f\xff\xff\xff", b"\0\0\0\1"])
            case 3:
                del out[place : place + rng.randint(1, 40)]
            case _:
                out[place:place] = out[place : place + rng.randint(1, 40)] * rng.randint(1, 50)
        if not out:
            break
    return bytes(out)


def decode(decoders: DecoderProcesses, data: bytes, info: MediaInfo) -> None:
    item = decoders.item(data, info)
    match info.modality:
        case Modality.IMAGE:
            assert item.pixels().shape == (info.height, info.width, 3)
        case Modality.VIDEO:
            frames = list(item.frames([0, info.frames - 1]))
            assert [frame.shape for frame in frames] == [(info.height, info.width, 3)] * 2
        case Modality.AUDIO:
            assert np.isfinite(item.samples(SAMPLE_RATE_HZ)).all()


@pytest.mark.parametrize("name", FILES)
def test_damaged_files_are_refused_or_decoded(
    decoders: DecoderProcesses, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A frame may declare a far larger size than the file: the memory limit ends its decode."""
    data, rng = FILES[name](), Random(name)
    decode(decoders, data, inspect_media(data, LIMITS))
    for number in range(MUTATIONS):
        damaged = mutated(data, rng)
        started_s = process_time()
        refusal = ""
        try:
            decode(decoders, damaged, inspect_media(damaged, LIMITS))
        except InvalidMedia as error:
            refusal = error.message
        assert "s to decode" not in refusal, f"mutation {number}: {refusal}"
        assert process_time() - started_s < MAX_INSPECT_S, f"mutation {number}"
    assert not caplog.records, "a decoder crashed"
