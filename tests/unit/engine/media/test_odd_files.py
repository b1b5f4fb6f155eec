"""Header readers against decoders, on odd files of every accepted format: both take a file, with the same size, or it is
refused with a reason.
"""

import re
from io import BytesIO

import av
import numpy as np
import pytest
from PIL import Image, ImageOps

from tests.unit.engine.media import odd_videos
from tests.unit.engine.media.odd_files import FILES
from tests.unit.engine.media.odd_images import HEIGHT, WIDTH
from triptych.domain.media import MediaInfo, Modality
from triptych.engine.media.item import LocalItem
from triptych.engine.media.videos import Frame, decode_video
from triptych.errors import InvalidMedia
from triptych.media.sniff import MediaLimits, inspect_media

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's, on metadata

LIMITS = MediaLimits()
REFUSED = {
    "jpeg without its end": "jpeg image cannot be decoded",
    "webp whose size is too small": "webp image is cut off",
    "webp whose size is too large": "webp image is cut off",
    "webp with a padding byte missing": "webp image is cut off",
    "h264 with a broken packet, in mp4": "25 frames of the mp4 video can be decoded, its header says 36",
    "h264 with a broken packet, in matroska": "25 frames of the webm video can be decoded, its header says 36",
    "mp3 that starts within a frame": "format is not known",
    "mp3 in mp4": "m4a audio's codec is not supported",
    "flac of no declared length": "does not say how long it is",
    "flac with a cue sheet": "flac audio cannot be decoded",
    "flac in ogg": "holds neither Opus nor Vorbis",
    "opus without its first pages": "has 0.500 s, its header says 10.500 s",
    "opus of two links": "more than one stream",
}
UNREADABLE_FOR_PILLOW = ("a directory that is cut off", "EXIF that cannot be read and XMP")
"""Metadata of which Pillow reads no orientation. The header's reader does, and it decides."""
LOSSY_SLACK_S = 0.2


def decoded_size(data: bytes) -> tuple[int, ...]:
    """What Pillow and FFmpeg make of a file by themselves: width and height, with a video's frames; or samples."""
    if not data.startswith((b"\x89PNG", b"\xff\xd8", b"GIF8", b"BM")) and data[8:12] != b"WEBP":
        with av.open(BytesIO(data), "r", options={"ignore_editlist": "1"}) as container:
            if not container.streams.video:
                return (sum(frame.samples for frame in container.decode(audio=0)),)
            frames = list(container.decode(video=0))
            sizes = {(frame.width, frame.height) for frame in frames}
            assert len(sizes) == 1
            return *sizes.pop(), len(frames)
    with Image.open(BytesIO(data)) as image:
        image.load()
        return ImageOps.exif_transpose(image).size


def decode(data: bytes, info: MediaInfo) -> None:
    item = LocalItem(data, info)
    match info.modality:
        case Modality.IMAGE:
            assert item.pixels().shape == (info.height, info.width, 3)
        case Modality.VIDEO:
            assert {frame.shape for frame in item.frames(range(info.frames))} == {(info.height, info.width, 3)}
        case Modality.AUDIO:
            samples = item.samples(info.sample_rate_hz)
            assert samples.shape == (info.samples,)
            assert np.isfinite(samples).all()


def agree(info: MediaInfo, size: tuple[int, ...]) -> bool:
    if info.modality is Modality.IMAGE:
        return size == (info.width, info.height)
    if info.modality is Modality.VIDEO:
        stored = (info.height, info.width) if info.rotation_deg in (90, 270) else (info.width, info.height)
        return size == (*stored, info.frames)
    slack = 0 if info.format in ("wav", "flac") else LOSSY_SLACK_S * info.sample_rate_hz
    return abs(size[0] - info.samples) <= slack


def difference(name: str, data: bytes) -> str:
    """What is wrong about a file that has to be taken; nothing if it is taken as it should be."""
    try:
        info = inspect_media(data, LIMITS)
        decode(data, info)
    except InvalidMedia as error:
        return error.message
    if (
        any(words in name for words in UNREADABLE_FOR_PILLOW)
        or "cut at a key frame" in name
        or "without its first" in name
    ):
        return ""
    try:
        size = decoded_size(data)
    except Exception:  # noqa: BLE001 - what others refuse may be taken here
        return ""
    return "" if agree(info, size) else f"{info} is decoded to {size}"


GROUPS = sorted({name.split()[0].strip(",") for name in FILES})


@pytest.mark.parametrize("group", GROUPS)
def test_header_readers_and_decoders_take_the_same_files_with_the_same_size(group: str) -> None:
    names = [name for name in FILES if name.split()[0].strip(",") == group and name not in REFUSED]
    found = {name: difference(name, FILES[name]()) for name in names}
    assert {name: text for name, text in found.items() if text} == {}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_taken_is_refused_with_the_reason(name: str) -> None:
    data = FILES[name]()
    with pytest.raises(InvalidMedia, match=re.escape(REFUSED[name])):
        decode(data, inspect_media(data, LIMITS))


def turned(name: str) -> bool:
    info = inspect_media(FILES[name](), LIMITS)
    return (info.width, info.height) == (HEIGHT, WIDTH)


@pytest.mark.parametrize("before", ["png with", "jpeg with", "jpeg with JFIF and", "webp with", "webp, animated, with"])
def test_exif_that_cannot_be_read_is_ignored(before: str) -> None:
    for exif in ("one byte", "no byte", "no TIFF", "a cut off header", "a directory beyond its end", "a BigTIFF"):
        assert not turned(f"{before} EXIF of {exif}")
    for exif in ("a turn", "a turn, big-endian", "a turn after its prefix", "two turns in a field"):
        assert turned(f"{before} EXIF of {exif}")


def all_frames(data: bytes) -> list[Frame]:
    info = inspect_media(data, LIMITS)
    return list(decode_video(data, info, range(info.frames)))


@pytest.mark.parametrize("form", ["mp4", "matroska"])
def test_the_nearest_frame_replaces_one_that_does_not_decode(form: str) -> None:
    """The earlier one, if two are as near. The others stay at their places."""
    frames = all_frames(FILES[f"h264 of key frames with a broken packet, in {form}"]())
    whole = all_frames(odd_videos.video("mp4", "libx264", 36, bf="0", g="1"))
    whole[odd_videos.BROKEN] = whole[odd_videos.BROKEN - 1]
    assert np.array_equal(frames, whole)


@pytest.mark.parametrize("form", ["mp4", "matroska"])
def test_frames_before_the_first_key_frame_are_replaced_by_it(form: str) -> None:
    frames = all_frames(FILES[f"h264 without its first key frame, in {form}"]())
    whole = all_frames(odd_videos.later_key_frames())
    assert len(frames) == 36 - odd_videos.CUT
    key = 12 - odd_videos.CUT
    assert np.array_equal(frames[:key], [frames[key]] * key)
    assert np.array_equal(frames[key:], whole[12:])


@pytest.mark.parametrize("form", ["mp4", "matroska"])
@pytest.mark.parametrize("codec", ["hevc", "h264"])
def test_a_clip_that_was_cut_at_an_open_group_has_all_its_frames(codec: str, form: str) -> None:
    """Frames in front of the first key frame refer to what was cut away."""
    data = FILES[f"{codec} of open groups, cut at a key frame, in {form}"]()
    frames = all_frames(data)
    assert len(decoded_frames(data)) < len(frames)
    assert np.array_equal(frames[0], frames[1])
    assert not np.array_equal(frames[-2], frames[-1])


def decoded_frames(data: bytes) -> list[av.VideoFrame]:
    with av.open(BytesIO(data), "r") as container:
        return list(container.decode(video=0))
