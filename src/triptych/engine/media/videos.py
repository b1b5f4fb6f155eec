"""Decodes untrusted videos to the frames that a model uses."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO

import av
import numpy as np
import numpy.typing as npt
from av.container import InputContainer

from triptych.domain.media import MediaInfo, Modality
from triptych.errors import InvalidMedia
from triptych.media.clips import VideoCodec

Frame = npt.NDArray[np.uint8]
"""[height, width, 3]."""

_DEMUXERS = {"mp4": "mov", "webm": "matroska"}
_CODECS = frozenset(codec.value for codec in VideoCodec)
_UNSUPPORTED_MATRICES = {
    8: "YCgCo",
    10: "BT.2020 constant luminance",
    11: "SMPTE 2085",
    12: "chromaticity-derived",
    13: "chromaticity-derived constant luminance",
    14: "ICtCp",
}
"""By their number in ISO/IEC 23091-2. The others are converted by their coefficients; unspecified means BT.601."""
_DECODERS = "h264,hevc,vp8,vp9,av1,libdav1d"


def decode_video(media: bytes, info: MediaInfo, indices: Sequence[int]) -> Iterator[Frame]:
    """The frames with these indices in presentation order, [info.height, info.width, 3], upright, RGB.

    ``indices`` ascend and may repeat. Frames are yielded as they are decoded, so memory is that of one frame if callers
    keep none. ``info`` is the header against which all limits were checked: a video with frames of another size, or, at
    its end, of another number, is refused. So no result may be used before the iterator has ended. Raises InvalidMedia;
    its text never quotes the decoder.
    """
    if info.modality is not Modality.VIDEO or info.format not in _DEMUXERS:
        raise InvalidMedia(f"{info.modality.value} of format {info.format!r} is not supported")
    if not indices or list(indices) != sorted(indices) or not 0 <= indices[0] <= indices[-1] < info.frames:
        raise ValueError(f"frame indices must ascend and be below {info.frames}")
    times = Counter(indices)
    demuxer = _DEMUXERS[info.format]
    # Count all frames of the track, also those that an edit list hides, as the header's reader does.
    options = {"ignore_editlist": "1"} if demuxer == "mov" else {}
    found = 0
    with opened(media, demuxer, _DECODERS, f"{info.format} video", **options) as container:
        for frame in _decoded(container, info):
            for _ in range(times[found]):
                yield _upright(frame, info)
            found += 1
    if found != info.frames:
        raise InvalidMedia(f"the {info.format} video has {found} frames, its header says {info.frames}")


def _decoded(container: InputContainer, info: MediaInfo) -> Iterator[av.VideoFrame]:
    stored = (info.height, info.width) if info.rotation_deg in (90, 270) else (info.width, info.height)
    stream = container.streams.video[0]
    if stream.codec_context.codec.canonical_name not in _CODECS:
        raise InvalidMedia(f"the {info.format} video's codec is not supported")
    stream.codec_context.thread_count = 1  # items are decoded in parallel
    for number, frame in enumerate(container.decode(stream)):
        if (frame.width, frame.height) != stored:
            raise InvalidMedia(
                f"a frame of the video is {frame.width}x{frame.height}, its header says {stored[0]}x{stored[1]}"
            )
        if (matrix := _UNSUPPORTED_MATRICES.get(frame.colorspace)) is not None:
            raise InvalidMedia(f"the {info.format} video's colours are {matrix}, which is not supported")
        if number >= info.frames:
            raise InvalidMedia(f"the {info.format} video has more than the {info.frames} frames of its header")
        yield frame


def _upright(frame: av.VideoFrame, info: MediaInfo) -> Frame:
    return np.rot90(frame.to_ndarray(format="rgb24"), -info.rotation_deg // 90)


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
