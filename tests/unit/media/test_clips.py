"""Durations and frame or sample counts of videos and audio, read from their containers; InvalidMedia for everything
else.
"""

import struct
from contextlib import suppress
from dataclasses import replace
from functools import cache
from time import perf_counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.domain.media import Modality
from triptych.errors import InvalidMedia
from triptych.media.sniff import MediaLimits, inspect_media
from triptych.testing import clips

LIMITS = MediaLimits()
VIDEOS = ("mp4", "mov", "webm")
SOUNDS = ("wav", "flac", "mp3", "ogg", "m4a")

video = cache(clips.video)
audio = cache(clips.audio)
fragments = (("movflags", "frag_keyframe+empty_moov"),)


@cache
def fragmented() -> bytes:
    return clips.video(frames=20, options=dict(fragments), encoder={"g": "5"})


@pytest.mark.parametrize("form", VIDEOS)
@pytest.mark.parametrize(("frames", "frames_per_s"), [(1, 8), (2, 25), (12, 8), (50, 30)])
def test_a_video_is_described(form: str, frames: int, frames_per_s: int) -> None:
    info = inspect_media(video(64, 48, frames, frames_per_s, form=form), LIMITS)
    assert (info.modality, info.format) == (Modality.VIDEO, "webm" if form == "webm" else "mp4")
    assert (info.width, info.height, info.frames) == (64, 48, frames)
    assert info.duration_s == pytest.approx(frames / frames_per_s, abs=0.001)
    assert (info.samples, info.sample_rate_hz, info.rotation_deg) == (0, 0, 0)


def test_the_fragments_of_a_video_are_added_up() -> None:
    data = fragmented()
    assert data.count(b"moof") >= 4
    info = inspect_media(data, LIMITS)
    assert (info.frames, info.duration_s) == (20, 2.5)


def test_hidden_frames_are_not_counted() -> None:
    data = clips.video(
        frames=60, form="webm", codec="libvpx", encoder={"auto-alt-ref": "1", "lag-in-frames": "16", "b": "200k"}
    )
    assert inspect_media(data, LIMITS).frames == 60


MATRICES = {0: (1, 0, 0, 1), 90: (0, 1, -1, 0), 180: (-1, 0, 0, -1), 270: (0, -1, 1, 0)}


def turned(data: bytes, degrees: int) -> bytes:
    """The same file with another matrix in its track header (ISO/IEC 14496-12, 8.3.2)."""
    place = data.index(b"tkhd") + 4 + 40
    a, b, c, d = (value << 16 for value in MATRICES[degrees])
    return data[:place] + struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30) + data[place + 36 :]


@pytest.mark.parametrize("degrees", MATRICES)
def test_a_videos_rotation_is_applied(degrees: int) -> None:
    info = inspect_media(turned(video(), degrees), LIMITS)
    assert info.rotation_deg == degrees
    assert (info.width, info.height) == ((64, 48) if degrees in (0, 180) else (48, 64))


@pytest.mark.parametrize("form", SOUNDS)
@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize(("seconds", "rate_hz"), [(0.05, 16_000), (1.0, 48_000), (3.37, 44_100)])
def test_audio_is_described(form: str, channels: int, seconds: float, rate_hz: int) -> None:
    rate_hz = 48_000 if form == "ogg" else rate_hz
    info = inspect_media(audio(seconds, rate_hz, form=form, channels=channels), LIMITS)
    assert (info.modality, info.format) == (Modality.AUDIO, form)
    assert (info.sample_rate_hz, info.width, info.height, info.frames) == (rate_hz, 0, 0, 1)
    slack = {"wav": 0, "flac": 0, "ogg": 400}.get(form, 60)  # Opus files include the delay of their encoder
    assert abs(info.samples - seconds * rate_hz) <= slack
    assert info.duration_s == info.samples / rate_hz


def test_samples_at_another_rate() -> None:
    info = inspect_media(audio(1.0, 44_100), LIMITS)
    assert info.samples_at(16_000) == 16_000
    assert replace(info, samples=44_101).samples_at(16_000) == 16_001
    assert info.samples_at(44_100) == 44_100


def test_a_wav_of_unknown_length_ends_with_the_file() -> None:
    data = audio()
    place = data.index(b"data") + 4
    for said in (0, 0xFFFFFFFF, 0x7FFFFFFF, 0x7FFFF000, 0x80000000, 0xFFFFFFDB, 32_001):
        streamed = data[:place] + struct.pack("<I", said) + data[place + 4 :]
        assert inspect_media(streamed, LIMITS).samples == 16_000


@pytest.mark.parametrize("rate_hz", [1, 999, 768_001, 1 << 31])
def test_sample_rates_that_no_audio_has_are_refused(rate_hz: int) -> None:
    data = audio()
    place = data.index(b"fmt ") + 12
    data = data[:place] + struct.pack("<I", rate_hz) + data[place + 4 :]
    with pytest.raises(InvalidMedia, match=f"{rate_hz} samples per second; 1000 to 768000 are supported"):
        inspect_media(data, LIMITS)


def test_an_mp3_may_start_and_end_with_tags() -> None:
    data = audio(form="mp3")
    bare = data[data.index(b"\xff\xf3") :]
    tagged = b"ID3\x04\x00\x00\x00\x00\x02\x00" + bytes(256) + bare + b"TAG" + bytes(125)
    assert inspect_media(tagged, LIMITS).samples == inspect_media(bare, LIMITS).samples == 16_000


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (video(form="mp4").replace(b"avc1", b"mp4v"), "the mp4 video's codec is not supported; supported are h264"),
        (video(form="webm").replace(b"V_VP9", b"V_XYZ"), "the webm video's codec is not supported"),
        (video().replace(b"vide", b"text"), "neither video nor audio"),
        (video()[:-500], "the mp4 file is cut off"),
        (video(form="webm")[:-20], "the webm video is cut off"),
        (audio()[:-20], "the wav audio is cut off: it has 31980 of 32000 bytes of samples"),
        (audio(form="ogg", sample_rate_hz=48_000)[:-20], "the ogg audio is cut off"),
        (audio(form="ogg", sample_rate_hz=48_000) * 2, "the ogg file has more than one stream"),
        (audio(form="m4a").replace(b"mp4a", b"enca"), "the m4a audio's codec is not supported"),
        (audio().replace(b"fmt \x10\x00\x00\x00\x01", b"fmt \x10\x00\x00\x00\x11"), "tag 17"),
        (b"\x00\x00\x00\x18ftypisom" + bytes(12) + b"\x00\x00\x00\x08meta", "neither video nor audio"),
        (b"\x1a\x45\xdf\xa3\x80", "the webm file has no video"),
        (audio()[:36] + b"data\x00\x00\x00\x00", "the wav audio is empty"),
    ],
)
def test_incomplete_and_foreign_files_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(InvalidMedia, match=message):
        inspect_media(data, LIMITS)


@pytest.mark.parametrize(
    ("data", "limit", "message"),
    [
        (video(frames=12), {"max_video_frames": 11}, "the mp4 video has 12 frames, the limit is 11"),
        (video(frames=12), {"max_video_s": 1}, "the mp4 video takes 1.5 s, the limit is 1 s"),
        (video(64, 48), {"max_image_pixels": 64 * 48 - 1}, "the limit is 3071"),
        (video(64, 48, 12), {"max_video_pixels": 12 * 64 * 48 - 1}, "has 36864 pixels in all its frames"),
        (video(64, 48), {"max_image_side_px": 63}, "the longest side allowed is 63"),
        (audio(1.5), {"max_audio_s": 1}, "the wav audio takes 1.5 s, the limit is 1 s"),
        (video(), {"max_video_bytes": 100}, "the mp4 video has [0-9]+ bytes, the limit is 100"),
        (audio(1.5), {"max_audio_bytes": 100}, "the wav audio has 48[0-9]+ bytes, the limit is 100"),
        (bytes(1001), {"max_image_bytes": 999, "max_video_bytes": 1000, "max_audio_bytes": 998}, "the limit is 1000"),
    ],
)
def test_limits_hold(data: bytes, limit: dict[str, int], message: str) -> None:
    with pytest.raises(InvalidMedia, match=message):
        inspect_media(data, MediaLimits(**limit))


def with_frames(data: bytes, count: int) -> bytes:
    """An MP4 that declares a number of frames, each one second long."""
    stsz, stts = data.index(b"stsz") + 4, data.index(b"stts") + 4
    data = data[: stsz + 8] + struct.pack(">I", count) + data[stsz + 12 :]
    return data[: stts + 8] + struct.pack(">I", count) + data[stts + 12 :]


def test_a_header_with_false_table_sizes_costs_nothing() -> None:
    huge = with_frames(video(), 0xFFFFFFFF)
    began_s = perf_counter()
    with pytest.raises(InvalidMedia, match="4294967295 frames"):
        inspect_media(huge, LIMITS)
    stts = video().index(b"stts") + 8
    with pytest.raises(InvalidMedia, match="overlap"):
        inspect_media(video()[:stts] + b"\xff\xff\xff\xff" + video()[stts + 4 :], LIMITS)
    assert perf_counter() - began_s < 10, "four billion rows take minutes"


def test_the_number_of_parts_of_a_file_is_bounded() -> None:
    for data in (
        video()[:40] + b"\x00\x00\x00\x08free" * 300_000,
        video(form="webm") + b"\xec\x80" * 300_000,
        audio()[:36] + b"junk\x00\x00\x00\x00" * 300_000,
        b"OggS\x00\x02" + bytes(20) + b"\x01\x13OpusHead" + bytes(11) + (b"OggS" + bytes(23)) * 300_000,
    ):
        with pytest.raises(InvalidMedia, match="has more than 262144 parts"):
            inspect_media(data, replace(LIMITS, max_video_bytes=1 << 30, max_audio_bytes=1 << 30))


WHOLE = [video(form=form) for form in VIDEOS] + [fragmented()]
WHOLE += [audio(0.1, 48_000, form=form) for form in SOUNDS]


@given(
    data=st.sampled_from(WHOLE), changes=st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), max_size=6)
)
def test_damaged_files_raise_only_invalid_media(data: bytes, changes: list[tuple[int, int]]) -> None:
    damaged = bytearray(data)
    for place, value in changes:
        damaged[place % min(len(damaged), 1500)] = value
    with suppress(InvalidMedia):
        inspect_media(bytes(damaged), LIMITS)


@given(data=st.sampled_from(WHOLE), share=st.floats(0, 1))
def test_truncated_files_raise_only_invalid_media(data: bytes, share: float) -> None:
    with suppress(InvalidMedia):
        inspect_media(data[: int(len(data) * share)], LIMITS)


MAGIC = (
    b"\x00\x00\x00\x18ftypisom",
    b"\x1a\x45\xdf\xa3",
    b"OggS\x00",
    b"fLaC",
    b"ID3",
    b"\xff\xfb",
    b"RIFF\x00\x00\x00\x00WAVE",
)


@given(magic=st.sampled_from(MAGIC), rest=st.binary(max_size=200))
def test_random_bytes_raise_only_invalid_media(magic: bytes, rest: bytes) -> None:
    with suppress(InvalidMedia):
        inspect_media(magic + rest, LIMITS)
