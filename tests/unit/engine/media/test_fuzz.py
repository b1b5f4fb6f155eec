"""Damaged files of every format are refused, or decoded as their header says, within bounds of time and memory.

The header's reader or the decoder detects the damage; neither takes long or ends the process. TRIPTYCH_TEST_MUTATIONS
is the number of damaged copies of each odd file.
"""

import os
from collections.abc import Iterator
from random import Random
from time import process_time

import numpy as np
import pytest

from tests.unit.engine.media.odd_files import FILES
from triptych.domain.media import MediaInfo, Modality
from triptych.engine.media.decoders import DecoderProcesses
from triptych.engine.media.limits import DecodeLimits
from triptych.errors import InvalidMedia
from triptych.media.sniff import MediaLimits, inspect_media

pytestmark = pytest.mark.slow

LIMITS = MediaLimits(
    max_image_pixels=1 << 20, max_scanned_pixels=1 << 26, max_video_pixels=1 << 26, max_audio_samples=1 << 22
)
DECODING = DecodeLimits(max_decode_s=5.0, max_decode_bytes=512 << 20)
MUTATIONS = int(os.environ.get("TRIPTYCH_TEST_MUTATIONS", "6"))  # noqa: TID251  # names an optional, larger run
MAX_INSPECT_S = 0.5
SAMPLE_RATE_HZ = 16_000
GROUPS = sorted({name.split()[0].strip(",") for name in FILES})


@pytest.fixture(scope="module")
def decoders() -> Iterator[DecoderProcesses]:
    processes = DecoderProcesses(DECODING)
    yield processes
    processes.close()


def mutated(data: bytes, rng: Random) -> bytes:
    """Bytes changed, removed, repeated or inserted; numbers made extreme; the end cut off.

    The head is hit as often as the rest.
    """
    out = bytearray(data)
    for _ in range(rng.randint(1, 6)):
        place = rng.randrange(min(len(out), 200) if rng.random() < 0.5 else len(out))
        match rng.randrange(6):
            case 0:
                out[place] = rng.randrange(256)
            case 1:
                out[place] ^= 1 << rng.randrange(8)
            case 2:
                out[place : place + 4] = rng.choice([b"\xff\xff\xff\xff", bytes(4), b"\x7f\xff\xff\xff", b"\0\0\0\1"])
            case 3:
                del out[place : place + rng.randint(1, 40)]
            case 4:
                del out[-rng.randint(1, max(1, len(out) // 3)) :]
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


@pytest.mark.parametrize("group", GROUPS)
def test_damaged_files_are_refused_or_decoded(
    decoders: DecoderProcesses, group: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A frame may declare a far larger size than the file: the memory limit ends its decode."""
    for name in (name for name in FILES if name.split()[0].strip(",") == group):
        data, rng = FILES[name](), Random(name)
        for number in range(MUTATIONS):
            damaged = mutated(data, rng)
            started_s = process_time()
            refusal = ""
            try:
                decode(decoders, damaged, inspect_media(damaged, LIMITS))
            except InvalidMedia as error:
                refusal = error.message
            assert "s to decode" not in refusal, f"mutation {number} of {name}: {refusal}"
            assert process_time() - started_s < MAX_INSPECT_S, f"mutation {number} of {name}"
        assert not caplog.records, f"a decoder crashed on {name}"
