"""Headers of MP4, MOV and M4A files (ISO/IEC 14496-12): the first video track, else the first audio track.

``media.clips`` says what readers may raise. Fragmented files are read too. All frames of a video track count, including
those that an edit list hides: decoders are configured likewise. Hidden audio does not count: it is the encoder's
padding.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from operator import mul

from triptych.domain.media import Modality
from triptych.errors import InvalidMedia
from triptych.media.clips import MAX_PARTS, Clip, VideoCodec, audio, count_parts, refuse_more_tracks

_HOLDS_BOXES = frozenset({b"moov", b"trak", b"mdia", b"minf", b"stbl", b"edts", b"mvex", b"moof", b"traf"})
_VIDEO_CODECS = {
    b"avc1": VideoCodec.H264,
    b"avc3": VideoCodec.H264,
    b"hvc1": VideoCodec.HEVC,
    b"hev1": VideoCodec.HEVC,
    b"vp08": VideoCodec.VP8,
    b"vp09": VideoCodec.VP9,
    b"av01": VideoCodec.AV1,
}
_AUDIO_CODECS = (b"mp4a", b"Opus", b"fLaC", b"alac")
_LEAST_NBYTES = 8
"""Least bytes of a box."""
_ROTATIONS = {(1, 0, 0, 1): 0, (0, 1, -1, 0): 90, (-1, 0, 0, -1): 180, (0, -1, 1, 0): 270}
"""Clockwise degrees by a track header's matrix; other matrices (mirrored, distorted) are not applied."""


@dataclass(slots=True)
class _Track:
    number: int = 0
    handler: bytes = b""
    codec: bytes = b""
    size: tuple[int, int] = (0, 0)
    matrix: tuple[int, int, int, int] = (1, 0, 0, 1)
    timescale: int = 0
    """Units per second of ``duration`` and of the edit list's start."""
    duration: int = 0
    samples: int = 0
    """Frames of a video, packets of audio."""
    skipped: int = 0
    heard: tuple[int, int] | None = None
    """The audible duration by the edit list: units, and units per second."""
    default_duration: int = 0


@dataclass(slots=True)
class _File:
    tracks: list[_Track]
    timescale: int = 0
    fragment: _Track | None = None
    fragment_duration: int = 0
    """Default duration of the current fragment's samples."""


def is_mp4(data: bytes) -> bool:
    """Whether a file starts as MP4 or MOV files do."""
    return data[4:8] in (b"ftyp", b"moov", b"wide", b"mdat", b"free", b"skip") and len(data) >= 16


def read_mp4(data: bytes) -> Clip:
    file = _File([])
    for kind, content, end in _boxes(data):
        if kind == b"trak":
            refuse_more_tracks("mp4 file", len(file.tracks))
            file.tracks.append(_Track())
        elif reader := _READERS.get(kind):
            reader(file, data, content, end)
    if video := next((track for track in file.tracks if track.handler == b"vide"), None):
        return _video(video)
    if sound := next((track for track in file.tracks if track.handler == b"soun"), None):
        return _audio(sound)
    raise InvalidMedia("the mp4 file has neither video nor audio, or is cut off")


def _video(track: _Track) -> Clip:
    if track.codec not in _VIDEO_CODECS:
        raise InvalidMedia(
            f"the mp4 video's codec is not supported; supported are {', '.join(codec.value for codec in VideoCodec)}"
        )
    return Clip(
        Modality.VIDEO,
        "mp4",
        width=track.size[0],
        height=track.size[1],
        rotation_deg=_ROTATIONS.get(track.matrix, 0),
        frames=track.samples,
        duration_s=track.duration / track.timescale if track.timescale else 0.0,
    )


def _audio(track: _Track) -> Clip:
    """A track's units are taken for its samples: the duration in seconds is right in either case."""
    if track.codec not in _AUDIO_CODECS:
        raise InvalidMedia("the m4a audio's codec is not supported; supported are AAC, ALAC, FLAC and Opus")
    samples = track.duration - track.skipped
    if track.heard is not None and track.heard[1]:
        samples = min(samples, round(track.heard[0] * track.timescale / track.heard[1]))
    return audio("m4a", samples, track.timescale)


def _boxes(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Boxes of a file: kind, start and end of the content; containers come before their children."""
    position = 0
    ends = [len(data)]
    for _ in count_parts("mp4 file"):
        while position == ends[-1]:
            ends.pop()
            if not ends:
                return
        if len(ends) == 1 and ends[0] - position < _LEAST_NBYTES:
            return  # padding behind the last box
        nbytes, kind = struct.unpack_from(">I4s", data, position)
        content = position + 8
        if nbytes == 1:
            (nbytes,) = struct.unpack_from(">Q", data, content)
            content += 8
        end = ends[-1] if nbytes == 0 else position + nbytes
        if not content <= end <= ends[-1]:
            raise InvalidMedia("the mp4 file is cut off, or its parts overlap")
        yield kind, content, end
        position = end
        if kind in _HOLDS_BOXES:
            ends.append(end)
            position = content


def _track(file: _File) -> _Track:
    if not file.tracks:
        raise InvalidMedia("the mp4 file describes a track outside of any")
    return file.tracks[-1]


def _movie_header(file: _File, data: bytes, content: int, _end: int) -> None:
    (file.timescale,) = struct.unpack_from(">I", data, content + (20 if data[content] == 1 else 12))


def _track_header(file: _File, data: bytes, content: int, _end: int) -> None:
    wide = data[content] == 1
    track = _track(file)
    (track.number,) = struct.unpack_from(">I", data, content + (20 if wide else 12))
    a, b, _, c, d = struct.unpack_from(">5i", data, content + (52 if wide else 40))
    track.matrix = (_sign(a), _sign(b), _sign(c), _sign(d))


def _sign(value: int) -> int:
    return (value > 0) - (value < 0)


def _media_header(file: _File, data: bytes, content: int, _end: int) -> None:
    (_track(file).timescale,) = struct.unpack_from(">I", data, content + (20 if data[content] == 1 else 12))


def _handler(file: _File, data: bytes, content: int, _end: int) -> None:
    track = _track(file)
    track.handler = track.handler or data[content + 8 : content + 12]  # MOV has a second one, for the data reference


def _description(file: _File, data: bytes, content: int, _end: int) -> None:
    track = _track(file)
    entries, _, track.codec = struct.unpack_from(">I I4s", data, content + 4)
    if entries != 1:
        raise InvalidMedia(f"a track of the mp4 file has {entries} codecs, only one is taken")
    if track.handler == b"vide":
        track.size = struct.unpack_from(">HH", data, content + 40)


def _durations(file: _File, data: bytes, content: int, end: int) -> None:
    numbers = _numbers(data, content + 8, end, 2 * _count(data, content + 4))
    _track(file).duration = sum(map(mul, numbers[::2], numbers[1::2]))


def _sample_count(file: _File, data: bytes, content: int, _end: int) -> None:
    _track(file).samples = _count(data, content + 8)


def _edits(file: _File, data: bytes, content: int, end: int) -> None:
    """Handles the usual form only: an optional empty edit, then one edit of the track."""
    wide = data[content] == 1
    form = ">QqI" if wide else ">IiI"
    track = _track(file)
    for place in range(content + 8, min(end, content + 8 + 20 * 2), struct.calcsize(form)):
        duration, start, _ = struct.unpack_from(form, data, place)
        if start >= 0:
            track.skipped = start
            track.heard = (duration, file.timescale) if duration else None
            return


def _fragment_defaults(file: _File, data: bytes, content: int, _end: int) -> None:
    number, _, duration = struct.unpack_from(">III", data, content + 4)
    for track in file.tracks:
        if track.number == number:
            track.default_duration = duration


def _fragment_header(file: _File, data: bytes, content: int, _end: int) -> None:
    flags, number = struct.unpack_from(">II", data, content)
    file.fragment = next((track for track in file.tracks if track.number == number), None)
    place = content + 8 + 8 * (flags & 1) + 4 * (flags >> 1 & 1)
    given = flags & 8
    default = file.fragment.default_duration if file.fragment else 0
    file.fragment_duration = _count(data, place) if given else default


def _fragment_run(file: _File, data: bytes, content: int, end: int) -> None:
    if file.fragment is None:
        raise InvalidMedia("the mp4 file has a fragment of no track")
    flags, count = struct.unpack_from(">II", data, content)
    place = content + 8 + 4 * (flags & 1) + 4 * (flags >> 2 & 1)
    fields = (flags >> 8 & 0xF).bit_count()
    if flags >> 8 & 1:
        file.fragment.duration += sum(_numbers(data, place, end, fields * count)[::fields])
    else:
        file.fragment.duration += count * file.fragment_duration
    file.fragment.samples += count


def _count(data: bytes, position: int) -> int:
    return int(struct.unpack_from(">I", data, position)[0])


def _numbers(data: bytes, position: int, end: int, count: int) -> tuple[int, ...]:
    """Read ``count`` 32-bit numbers of a table after checking its length."""
    if position + 4 * count > end:
        raise InvalidMedia("the mp4 file is cut off, or its parts overlap")
    if count > 4 * MAX_PARTS:
        raise InvalidMedia(f"the mp4 file has a table of more than {4 * MAX_PARTS} numbers")
    return struct.unpack_from(f">{count}I", data, position)


_READERS = {
    b"mvhd": _movie_header,
    b"tkhd": _track_header,
    b"mdhd": _media_header,
    b"hdlr": _handler,
    b"stsd": _description,
    b"stts": _durations,
    b"stsz": _sample_count,
    b"stz2": _sample_count,
    b"elst": _edits,
    b"trex": _fragment_defaults,
    b"tfhd": _fragment_header,
    b"trun": _fragment_run,
}
