"""Decodes untrusted videos to the frames that a model uses."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from itertools import chain
from typing import Any, TypeVar

import av
import numpy as np
import numpy.typing as npt
from av.container import InputContainer

from triptych.domain.media import MediaInfo, Modality
from triptych.errors import InvalidMedia

AnyStream = TypeVar("AnyStream", av.VideoStream, av.AudioStream)

Frame = npt.NDArray[np.uint8]
"""[height, width, 3]."""

_DEMUXERS = {"mp4": "mov", "webm": "matroska"}
_UNSUPPORTED_MATRICES = {
    8: "YCgCo",
    10: "BT.2020 constant luminance",
    11: "SMPTE 2085",
    12: "chromaticity-derived",
    13: "chromaticity-derived constant luminance",
    14: "ICtCp",
}
"""Matrices that are not supported, by their number in ISO/IEC 23091-2. The others are converted by their coefficients;
unspecified means BT.601.
"""
MAX_LOST_SHARE = 0.25
"""Most of a video or of audio that may fail to decode. A clip that was cut out of a video lacks the frames before its
first key frame.
"""
_DECODERS = "h264,hevc,vp8,vp9,av1,libdav1d"


def decode_video(media: bytes, info: MediaInfo, indices: Sequence[int]) -> Iterator[Frame]:
    """The frames with these indices in presentation order, [info.height, info.width, 3], upright, RGB.

    ``indices`` ascend and may repeat. Frames are yielded as they are decoded, so memory is that of two frames if callers
    keep none. ``info`` is the header against which all limits were checked: a video with frames of another size, or with
    more of them, is refused. A frame that does not decode is replaced by the nearest one that does, the earlier of two;
    a video that lacks more than a quarter of its frames is refused, at its end. So no result may be used before the
    iterator has ended. Raises InvalidMedia; its text never quotes the decoder.
    """
    if info.modality is not Modality.VIDEO or info.format not in _DEMUXERS:
        raise InvalidMedia(f"{info.modality.value} of format {info.format!r} is not supported")
    if not indices or list(indices) != sorted(indices) or not 0 <= indices[0] <= indices[-1] < info.frames:
        raise ValueError(f"frame indices must ascend and be below {info.frames}")
    times = Counter(indices)
    demuxer = _DEMUXERS[info.format]
    # Count all frames of the track, also those that an edit list hides, as the header's reader does.
    options = {"ignore_editlist": "1"} if demuxer == "mov" else {}
    frames = begin = 0
    held: tuple[int, av.VideoFrame] | None = None
    with opened(media, demuxer, _DECODERS, f"{info.format} video", **options) as container:
        for index, frame in _placed(container, info, len(media)):
            if held is not None:
                end = (held[0] + index) // 2 + 1
                yield from _repeated(held[1], info, sum(times[number] for number in range(begin, end)))
                begin = end
            held = index, frame
            frames += 1
        if held is not None:
            yield from _repeated(held[1], info, sum(times[number] for number in range(begin, info.frames)))
    if info.frames - frames > info.frames * MAX_LOST_SHARE:
        raise InvalidMedia(f"{frames} frames of the {info.format} video can be decoded, its header says {info.frames}")


def _placed(container: InputContainer, info: MediaInfo, nbytes: int) -> Iterator[tuple[int, av.VideoFrame]]:
    """The frames that decode, with their indices."""
    stream = first_stream(container.streams.video, _DECODERS, f"{info.format} video")
    packets, packed_nbytes = [], 0
    for packet in container.demux(stream):
        packets.append(packet)
        packed_nbytes += packet.size
        if packed_nbytes > 2 * nbytes:
            raise InvalidMedia(f"frames of the {info.format} video overlap")
    times = sorted(packet.pts for packet in packets if packet.pts is not None)
    places: dict[int | None, int] = {time: index for index, time in enumerate(times)}
    if len(places) != info.frames:  # a time is missing or occurs twice: frames are placed in order
        places = {}
    index = -1
    for number, frame in enumerate(_decoded(packets, info)):
        if number >= info.frames:
            raise InvalidMedia(f"the {info.format} video has more than the {info.frames} frames of its header")
        index = min(max(index + 1, places.get(frame.pts, 0)), info.frames - 1)
        yield index, frame


def _decoded(packets: "Iterable[av.Packet[Any]]", info: MediaInfo) -> Iterator[av.VideoFrame]:
    stored = (info.height, info.width) if info.rotation_deg in (90, 270) else (info.width, info.height)
    for frame in chain.from_iterable(decoded(packet) or () for packet in packets):
        if (frame.width, frame.height) != stored:
            raise InvalidMedia(
                f"a frame of the video is {frame.width}x{frame.height}, its header says {stored[0]}x{stored[1]}"
            )
        if (matrix := _UNSUPPORTED_MATRICES.get(frame.colorspace)) is not None:
            raise InvalidMedia(f"the {info.format} video's colours are {matrix}, which is not supported")
        yield frame


def _repeated(frame: av.VideoFrame, info: MediaInfo, times: int) -> Iterator[Frame]:
    for _ in range(times):
        yield _upright(frame, info)


def _upright(frame: av.VideoFrame, info: MediaInfo) -> Frame:
    return np.rot90(frame.to_ndarray(format="rgb24"), -info.rotation_deg // 90)


def first_stream(streams: Sequence[AnyStream], decoders: str, what: str) -> AnyStream:
    """The stream that is decoded. Raises InvalidMedia unless by one of the allowed decoders.

    FFmpeg applies its white list while it opens a container, not to decoders that PyAV opens later.
    """
    if not streams:
        raise InvalidMedia(f"the {what} cannot be decoded")
    if streams[0].codec_context.codec.name not in decoders.split(","):
        raise InvalidMedia(f"the {what}'s codec is not supported")
    streams[0].codec_context.thread_count = 1  # items are decoded in parallel
    return streams[0]


def decoded(packet: "av.Packet[Any]") -> Sequence[Any] | None:
    """The frames that are ready after this packet; None if the packet does not decode."""
    try:
        return packet.decode()
    except MemoryError:
        raise
    except av.FFmpegError:  # of many kinds: damaged, or of a kind that is not implemented
        return None


@contextmanager
def opened(media: bytes, demuxer: str, decoders: str, what: str, **options: str) -> Iterator[InputContainer]:
    """Open a container in the format found by its header, with these decoders only and no access beyond the bytes.

    Errors of decoding in the body become InvalidMedia.
    """
    options |= {"codec_whitelist": decoders, "format_whitelist": demuxer, "protocol_whitelist": "none"}
    try:
        with av.open(BytesIO(media), mode="r", format=demuxer, options=options) as container:
            yield container
    except (av.FFmpegError, IndexError, ValueError, OverflowError, EOFError) as error:
        raise InvalidMedia(f"the {what} cannot be decoded") from error
