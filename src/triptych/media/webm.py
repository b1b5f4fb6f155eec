"""Headers of WebM and Matroska videos: frames are counted block by block (RFC 9559).

``media.clips`` says what readers may raise. A file is walked as a flat sequence of elements: containers are entered,
all others skipped, so that neither depth nor a container's declared length has to be trusted.
"""

import struct
from dataclasses import dataclass, field
from math import isfinite

from triptych.domain.media import Modality
from triptych.errors import InvalidMedia
from triptych.media.clips import Clip, VideoCodec, count_parts, refuse_more_tracks

_SEGMENT, _INFO, _TRACKS, _CLUSTER, _BLOCK_GROUP = 0x18538067, 0x1549A966, 0x1654AE6B, 0x1F43B675, 0xA0
_TRACK, _VIDEO = 0xAE, 0xE0
_ENTERED = frozenset({_SEGMENT, _INFO, _TRACKS, _CLUSTER, _BLOCK_GROUP, _TRACK, _VIDEO})
_MAY_BE_ENDLESS = frozenset({_SEGMENT, _CLUSTER})
_TIMESTAMP_SCALE, _DURATION, _CLUSTER_TIMESTAMP = 0x2AD7B1, 0x4489, 0xE7
_TRACK_NUMBER, _TRACK_TYPE, _CODEC, _FRAME_NS, _WIDTH, _HEIGHT = 0xD7, 0x83, 0x86, 0x23E383, 0xB0, 0xBA
_SIMPLE_BLOCK, _BLOCK = 0xA3, 0xA1

_CODECS = {
    b"V_VP8": VideoCodec.VP8,
    b"V_VP9": VideoCodec.VP9,
    b"V_AV1": VideoCodec.AV1,
    b"V_MPEG4/ISO/AVC": VideoCodec.H264,
    b"V_MPEGH/ISO/HEVC": VideoCodec.HEVC,
}
_VIDEO_TRACK = 1
_LACED = 0x06
_VP8_SHOWN = 0x10


@dataclass(slots=True)
class _Walk:
    tracks: list[dict[int, bytes]] = field(default_factory=list)
    """Elements of each track, by id."""
    scale_ns: int = 1_000_000
    duration: float = 0.0
    cluster: int = 0
    frames: int = 0
    first: int = 0
    last: int = 0
    """Last time in units of ``scale_ns``, as are the two fields above."""

    @property
    def video(self) -> dict[int, bytes]:
        for track in self.tracks:
            if _unsigned(track.get(_TRACK_TYPE, b"")) == _VIDEO_TRACK:
                return track
        raise InvalidMedia("the webm file has no video")


def read_webm(data: bytes) -> Clip:
    """Read the first video track."""
    walk = _Walk()
    position = 0
    for _ in count_parts("webm video"):
        if position == len(data):
            break
        position = _step(data, position, walk)
    video = walk.video
    codec = video.get(_CODEC, b"").rstrip(b"\0")
    if codec not in _CODECS:
        raise InvalidMedia(
            f"the webm video's codec is not supported; supported are {', '.join(codec.value for codec in VideoCodec)}"
        )
    return Clip(
        Modality.VIDEO,
        "webm",
        width=_unsigned(video.get(_WIDTH, b"")),
        height=_unsigned(video.get(_HEIGHT, b"")),
        frames=walk.frames,
        duration_s=_duration_s(walk),
    )


def _step(data: bytes, position: int, walk: _Walk) -> int:
    """Process one element; return the position of the next."""
    element, position = _number(data, position, keep_marker=True)
    nbytes, content = _number(data, position, keep_marker=False)
    endless = nbytes == (1 << 7 * (content - position)) - 1
    if element in _ENTERED:
        if endless and element not in _MAY_BE_ENDLESS:
            raise InvalidMedia("the webm video has a part without an end")
        if element == _TRACK:
            refuse_more_tracks("webm video", len(walk.tracks))
            walk.tracks.append({})
        return content
    end = content + nbytes
    if endless or end > len(data):
        raise InvalidMedia("the webm video is cut off")
    if element in (_SIMPLE_BLOCK, _BLOCK):
        _take_block(data, content, end, walk)
    elif element == _CLUSTER_TIMESTAMP:
        walk.cluster = _unsigned(data[content:end])
    elif element == _TIMESTAMP_SCALE:
        walk.scale_ns = _unsigned(data[content:end])
    elif element == _DURATION and nbytes in (4, 8):
        (walk.duration,) = struct.unpack_from(">f" if nbytes == 4 else ">d", data, content)
    elif element in (_TRACK_NUMBER, _TRACK_TYPE, _CODEC, _FRAME_NS, _WIDTH, _HEIGHT) and walk.tracks:
        walk.tracks[-1].setdefault(element, data[content : min(end, content + 64)])
    return end


def _take_block(data: bytes, content: int, end: int, walk: _Walk) -> None:
    """Count a frame if this block belongs to the video and shows one."""
    video = walk.video
    track, position = _number(data, content, keep_marker=False)
    if track != _unsigned(video.get(_TRACK_NUMBER, b"")):
        return
    timestamp, flags = struct.unpack_from(">hB", data, position)
    if flags & _LACED:
        raise InvalidMedia("the webm video has several frames in a block, which is not supported")
    if position + 3 < end and video.get(_CODEC) == b"V_VP8" and not data[position + 3] & _VP8_SHOWN:
        return  # a reference frame that is not shown (RFC 6386, section 9.1)
    at = walk.cluster + timestamp
    walk.first = min(walk.first, at) if walk.frames else at
    walk.last = max(walk.last, at) if walk.frames else at
    walk.frames += 1


def _duration_s(walk: _Walk) -> float:
    """Duration of all frames, from the time between them or from the file's own value."""
    unit_s = walk.scale_ns / 1e9
    if walk.frames < 2 or walk.last == walk.first:
        said_s = walk.duration * unit_s
        return said_s if isfinite(said_s) and said_s > 0 else 0.0
    shown_s = (walk.last - walk.first) * unit_s * walk.frames / (walk.frames - 1)
    frame_s = _unsigned(walk.video.get(_FRAME_NS, b"")) / 1e9
    # Timestamps are rounded to milliseconds; the track's own value is exact if the two agree.
    return frame_s * walk.frames if abs(frame_s * walk.frames - shown_s) < frame_s else shown_s


def _number(data: bytes, position: int, *, keep_marker: bool) -> tuple[int, int]:
    """A variable-size integer (RFC 8794, section 4) and the position after it."""
    first = data[position]
    nbytes = 9 - first.bit_length()
    if nbytes > (4 if keep_marker else 8):
        raise InvalidMedia("the webm video has no element where one has to be")
    if position + nbytes > len(data):
        raise InvalidMedia("the webm video is cut off")
    value = int.from_bytes(data[position : position + nbytes], "big")
    return (value if keep_marker else value & (1 << 7 * nbytes) - 1), position + nbytes


def _unsigned(data: bytes) -> int:
    return int.from_bytes(data[:8], "big")
