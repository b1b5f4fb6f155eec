"""Videos and audio are decoded as their headers announced, or refused."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from io import BytesIO

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.unit.engine.media import odd_audio
from triptych.domain.media import MediaInfo, Modality
from triptych.engine.media.audio import decode_audio
from triptych.engine.media.videos import Frame, decode_video
from triptych.errors import InvalidMedia
from triptych.media.sniff import MediaLimits, inspect_media
from triptych.testing import clips

LIMITS = MediaLimits()
_VIDEOS = {form: clips.video(form=form) for form in ("mp4", "webm")}

CODECS = {
    "h264": ("mp4", "libx264", {"bf": "3"}),
    "hevc": ("mp4", "libx265", {"x265-params": "log-level=none"}),
    "vp8": ("webm", "libvpx", {"auto-alt-ref": "1", "lag-in-frames": "16"}),
    "vp9": ("webm", "libvpx-vp9", {}),
    "h264 in mov": ("mov", "libx264", {}),
}


def decoded(data: bytes, info: MediaInfo, indices: Sequence[int]) -> Frame:
    """The frames, [frames, height, width, 3]."""
    return np.stack(list(decode_video(data, info, indices)))


def brightness(frames: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> list[float]:
    return [float(frame.mean()) for frame in frames]


@pytest.mark.parametrize("name", CODECS)
def test_every_frame_of_a_video_is_decoded_at_its_index(name: str) -> None:
    form, codec, encoder = CODECS[name]
    data = clips.video(64, 48, 30, form=form, codec=codec, encoder=encoder)
    info = inspect_media(data, LIMITS)
    frames = decoded(data, info, range(30))
    assert frames.shape == (30, 48, 64, 3)
    assert frames.dtype == np.uint8
    assert brightness(frames) == sorted(brightness(frames))
    chosen = [0, 3, 3, 17, 29]
    assert np.array_equal(decoded(data, info, chosen), frames[chosen])


def test_a_fragmented_video_is_decoded() -> None:
    options = {"movflags": "frag_keyframe+empty_moov"}
    data = clips.video(frames=20, options=options, encoder={"g": "5"})
    assert len(decoded(data, inspect_media(data, LIMITS), range(20))) == 20


@pytest.mark.parametrize("degrees", [0, 90, 180, 270])
def test_frames_are_rotated_upright(degrees: int) -> None:
    data = clips.video(64, 48, 3)
    info = inspect_media(data, LIMITS)
    plain = decoded(data, info, [1])[0]
    sides = (48, 64) if degrees in (90, 270) else (64, 48)
    turned = decoded(data, replace(info, width=sides[0], height=sides[1], rotation_deg=degrees), [1])[0]
    assert turned.shape == (sides[1], sides[0], 3)
    clockwise = {0: plain[0, 0], 90: plain[-1, 0], 180: plain[-1, -1], 270: plain[0, -1]}
    assert np.array_equal(turned[0, 0], clockwise[degrees])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"frames": 11}, "more than the 11 frames"),
        ({"frames": 17}, "12 frames of the mp4 video can be decoded, its header says 17"),
        ({"width": 62}, "a frame of the video is 64x48, its header says 62x48"),
        ({"rotation_deg": 90}, "its header says 48x64"),
        ({"format": "webm"}, "cannot be decoded"),
        ({"format": "concat"}, "of format 'concat' is not supported"),
    ],
)
def test_a_video_that_differs_from_its_header_is_refused(change: dict[str, object], message: str) -> None:
    data = clips.video(64, 48, 12)
    info = replace(inspect_media(data, LIMITS), **change)  # type: ignore[arg-type]
    with pytest.raises(InvalidMedia, match=message):
        decoded(data, info, [0])


@pytest.mark.parametrize("indices", [[], [2, 1], [-1], [12]])
def test_frame_indices_out_of_range_are_refused(indices: list[int]) -> None:
    data = clips.video(frames=12)
    with pytest.raises(ValueError, match="frame indices must ascend"):
        decoded(data, inspect_media(data, LIMITS), indices)


def test_an_unsupported_codec_is_not_decoded() -> None:
    data = clips.video(codec="mpeg4", frames=4)
    info = MediaInfo(
        modality=Modality.VIDEO,
        format="mp4",
        width=64,
        height=48,
        nbytes=len(data),
        digest=b"",
        frames=4,
        duration_s=0.5,
    )
    with pytest.raises(InvalidMedia):
        decoded(data, info, [0])


@settings(max_examples=examples(40), deadline=None)
@given(seed=st.integers(0, 1 << 30), form=st.sampled_from(["mp4", "webm"]))
def test_a_damaged_video_is_refused_or_decoded_completely(seed: int, form: str) -> None:
    data = bytearray(_VIDEOS[form])
    noise = np.random.default_rng(seed)
    for place in noise.integers(0, len(data), 20):
        data[place] = noise.integers(0, 256)
    with suppress(InvalidMedia):
        info = inspect_media(bytes(data), LIMITS)
        assert info.modality is Modality.VIDEO
        if info.pixels <= 1 << 20:
            frames = decoded(bytes(data), info, range(info.frames))
            assert frames.shape == (info.frames, info.height, info.width, 3)


def _inner(
    samples: np.ndarray[tuple[int, ...], np.dtype[np.floating]],
) -> np.ndarray[tuple[int, ...], np.dtype[np.floating]]:
    return samples[2000:-2000]


@pytest.mark.parametrize("form", ["wav", "flac", "mp3", "ogg", "m4a"])
@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("rate_hz", [16_000, 44_100, 48_000])
def test_audio_is_the_mean_of_its_channels_at_the_requested_rate(form: str, channels: int, rate_hz: int) -> None:
    rate_hz = 48_000 if form == "ogg" else rate_hz
    data = clips.audio(1.0, rate_hz, form=form, channels=channels)
    info = inspect_media(data, LIMITS)
    samples = decode_audio(data, info, 16_000)
    assert samples.dtype == np.float32
    assert samples.shape == (info.samples_at(16_000),)
    wanted = clips.tone(1.0, 16_000, channels=channels).mean(axis=0)
    tolerance = {"wav": 2e-3, "flac": 2e-3}.get(form, 0.05)
    assert np.abs(samples[2000:14_000] - wanted[2000:14_000]).max() < tolerance


@pytest.mark.parametrize("form", ["wav", "flac"])
def test_audio_that_needs_no_resampling_is_exact(form: str) -> None:
    data = clips.audio(0.5, 16_000, form=form)
    wanted = (clips.tone(0.5, 16_000)[0] * 32767).astype(np.int16) / 32768
    samples = decode_audio(data, inspect_media(data, LIMITS), 16_000)
    assert np.array_equal(samples, wanted.astype(np.float32))


@pytest.mark.parametrize(("form", "samples"), [("wav", 15_000), ("wav", 17_000), ("mp3", 12_000), ("mp3", 20_000)])
def test_audio_that_differs_from_its_header_is_refused(form: str, samples: int) -> None:
    data = clips.audio(1.0, 16_000, form=form)
    info = inspect_media(data, LIMITS)
    with pytest.raises(InvalidMedia, match="header"):
        decode_audio(data, replace(info, samples=samples), 16_000)
    with pytest.raises(InvalidMedia, match="cannot be decoded"):
        decode_audio(data, replace(info, format="ogg"), 16_000)


def float_wav(value: float, *, bits: int = 32) -> bytes:
    """A tone of which one sample has this value."""
    values = clips.tone(0.5, 16_000)[0]
    values[77] = value
    return odd_audio.wav(bits=bits, tag=3, samples=values.astype(f"<f{bits // 8}").tobytes())


@pytest.mark.parametrize(
    ("value", "bits"), [(np.nan, 32), (np.inf, 32), (-np.inf, 32), (3e38, 32), (-3e38, 32), (1e300, 64), (np.nan, 64)]
)
def test_samples_that_are_not_finite_or_far_out_of_range_are_refused(value: float, bits: int) -> None:
    data = float_wav(value, bits=bits)
    with pytest.raises(InvalidMedia, match="the wav audio has samples that are not finite, or far beyond -1 to 1"):
        decode_audio(data, inspect_media(data, LIMITS), 16_000)


@pytest.mark.parametrize("value", [1.5, -32_768.0, float(1 << 31), 1e-44])
def test_samples_a_little_out_of_range_are_taken_as_they_are(value: float) -> None:
    """Floats from integers that nobody scaled; features are normalized."""
    data = float_wav(value)
    assert decode_audio(data, inspect_media(data, LIMITS), 16_000)[77] == np.float32(value)


def test_a_wav_of_24_bits_in_32_is_not_taken_for_floats() -> None:
    """FFmpeg reads such a file as floats of an old editor."""
    data = odd_audio.wav(bits=32, extra=odd_audio.extensible(24))
    samples = decode_audio(data, inspect_media(data, LIMITS), odd_audio.RATE_HZ)
    wanted = 0.5 * np.sin(np.arange(odd_audio.SAMPLES) / 9)
    assert np.abs(samples - wanted).max() < 1e-6


def test_audio_of_which_a_packet_does_not_decode_is_silent_there() -> None:
    data = bytearray(clips.audio(2.0, form="m4a"))
    with av.open(BytesIO(bytes(data)), "r") as container:
        packets = [bytes(packet) for packet in container.demux(container.streams.audio[0]) if packet.size]
    place = bytes(data).index(packets[12])
    data[place : place + len(packets[12])] = b"\xff" * len(packets[12])
    info = inspect_media(bytes(data), LIMITS)
    samples = decode_audio(bytes(data), info, 16_000)
    assert samples.shape == (info.samples_at(16_000),)
    loudness = np.abs(samples[: len(samples) // 64 * 64]).reshape(-1, 64).max(axis=1)
    assert (loudness[20:-20] == 0).sum() in range(8, 33)  # a packet has 1024 samples, and overlaps its neighbours


def test_audio_of_which_much_does_not_decode_is_refused() -> None:
    data = bytearray(clips.audio(2.0, form="m4a"))
    start = data.index(b"mdat") + 4
    data[start + 300 : start + 9000] = b"\xff" * 8700
    with pytest.raises(InvalidMedia, match="more than a quarter of the m4a audio cannot be decoded"):
        decode_audio(bytes(data), inspect_media(bytes(data), LIMITS), 16_000)


_MATRICES = {2: (0.299, 0.114), 1: (0.2126, 0.0722), 6: (0.299, 0.114), 7: (0.212, 0.087), 9: (0.2627, 0.0593)}
"""The weights of red and blue (ITU-T H.273); unspecified is BT.601, as in the reference processors."""


@pytest.mark.parametrize("full_range", [False, True])
@pytest.mark.parametrize("matrix", _MATRICES)
@pytest.mark.parametrize("pixels", ["yuv420p", "yuv444p", "yuv420p10le"])
def test_colours_equal_the_definition_of_their_matrix_and_range(pixels: str, matrix: int, full_range: bool) -> None:
    data = clips.coloured_video(pixels=pixels, matrix=matrix, coefficients=_MATRICES[matrix], full_range=full_range)
    [frame] = decoded(data, inspect_media(data, LIMITS), [0])
    found = frame[16, 8::16].astype(int)
    assert np.abs(found - clips.COLOURS).max() <= 4


@pytest.mark.parametrize(("matrix", "name"), [(8, "YCgCo"), (10, "BT.2020 constant luminance"), (14, "ICtCp")])
def test_colours_without_a_conversion_are_refused_by_name(matrix: int, name: str) -> None:
    data = clips.coloured_video(pixels="yuv420p", matrix=matrix, coefficients=(0.3, 0.1), full_range=False)
    with pytest.raises(InvalidMedia, match=f"the mp4 video's colours are {name}, which is not supported"):
        decoded(data, inspect_media(data, LIMITS), [0])
