"""Odd videos: codecs, containers, edits, paces, and clips that lack frames."""

import os
import struct
from collections.abc import Callable, Iterable
from fractions import Fraction
from functools import cache, partial
from io import BytesIO
from typing import Any

import av
import numpy as np

from tests.unit.engine.media.odd_images import Make
from triptych.testing import clips

FRAMES = 12
KEYS = "keyint=12:min-keyint=12:scenecut=0"
X265 = "log-level=none"


@cache
def video(form: str = "mp4", codec: str = "", frames: int = FRAMES, **options: str) -> bytes:
    """``options`` of the container start with an underscore."""
    given = {name.removeprefix("_"): value for name, value in options.items() if name.startswith("_")}
    encoder = {name.replace("__", "-"): value for name, value in options.items() if not name.startswith("_")}
    if codec == "libx265":
        encoder["x265-params"] = ":".join(filter(None, (X265, encoder.pop("x265", ""))))
    if codec == "libsvtav1":
        encoder |= {"preset": "11", "svtav1-params": "lp=1"}
    policy = os.sched_getscheduler(0)
    try:
        return clips.video(64, 48, frames, form=form, codec=codec, options=given, encoder=encoder)
    finally:
        # SVT-AV1 gives its caller a real-time policy where it may: the tests that follow would starve all other processes.
        os.sched_setscheduler(0, policy, os.sched_param(0))


def remuxed(
    data: bytes,
    form: str,
    keep: Callable[[int, "av.Packet[Any]"], bool] = lambda _number, _packet: True,
    **options: str,
) -> bytes:
    """The same packets in another container, without those that are not to ``keep``."""
    out = BytesIO()
    with av.open(BytesIO(data), "r") as source, av.open(out, "w", format=form, options=options) as target:
        stream = target.add_stream_from_template(source.streams[0])
        number = 0
        for packet in source.demux(source.streams[0]):
            if packet.dts is None:
                continue
            if keep(number, packet):
                packet.stream = stream
                target.mux(packet)
            number += 1
    return out.getvalue()


def cut_at_key_frame(codec: str, form: str = "mp4", **options: str) -> bytes:
    """The end of a video with open groups of pictures, from its second key frame on, without encoding it again."""
    with_groups = video("mp4", codec, 36, **options)
    keys = []
    with av.open(BytesIO(with_groups), "r") as container:
        for number, packet in enumerate(container.demux(container.streams.video[0])):
            if packet.is_keyframe:
                keys.append(number)
    return remuxed(with_groups, form, lambda number, _packet: number >= keys[1])


def paced_video(form: str, times_s: Iterable[float]) -> bytes:
    """A video of a variable frame rate."""
    out = BytesIO()
    with av.open(out, "w", format=form) as container:
        stream = container.add_stream("libx264" if form != "webm" else "libvpx-vp9", rate=25)
        stream.width, stream.height, stream.pix_fmt, stream.time_base = 48, 32, "yuv420p", Fraction(1, 1000)
        stream.codec_context.time_base = Fraction(1, 1000)
        for number, time_s in enumerate(times_s):
            frame = av.VideoFrame.from_ndarray(np.full((32, 48, 3), 20 * number, dtype=np.uint8), format="rgb24")
            frame.pts, frame.time_base = round(time_s * 1000), Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return out.getvalue()


def with_sound(form: str, *, sound_first: bool) -> bytes:
    """A video with a silent track of sound."""
    out = BytesIO()
    with av.open(out, "w", format=form) as container:
        if sound_first:
            sound = container.add_stream("libopus" if form == "webm" else "aac", rate=48_000, layout="mono")
        pictures = container.add_stream("libvpx-vp9" if form == "webm" else "libx264", rate=8)
        if not sound_first:
            sound = container.add_stream("libopus" if form == "webm" else "aac", rate=48_000, layout="mono")
        pictures.width, pictures.height, pictures.pix_fmt = 64, 48, "yuv420p"
        size = sound.codec_context.frame_size or 960
        for number in range(FRAMES):
            picture = np.full((48, 64, 3), 20 * number, dtype=np.uint8)
            container.mux(pictures.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        for number in range(20):
            silence = np.zeros((1, size), np.int16 if sound.format.name == "s16" else np.float32)
            frame = av.AudioFrame.from_ndarray(silence, format=sound.format.name, layout="mono")
            frame.sample_rate, frame.pts = 48_000, number * size
            container.mux(sound.encode(frame))
        for stream in (pictures, sound):
            container.mux(stream.encode(None))
    return out.getvalue()


def box(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I4s", 8 + len(content), kind) + content


def boxed(data: bytes, path: tuple[bytes, ...], change: Callable[[bytes], bytes]) -> bytes:
    """The file with the content of the first box at ``path`` changed; sizes of the boxes around it follow.

    For files whose samples come before their description, so that no offset changes.
    """
    if not path:
        return change(data)
    position, out, done = 0, b"", False
    while position < len(data):
        nbytes, kind = struct.unpack_from(">I4s", data, position)
        content = data[position + 8 : position + nbytes]
        if kind == path[0] and not done:
            content, done = boxed(content, path[1:], change), True
        out += box(kind, content)
        position += nbytes
    if not done:
        raise ValueError(f"the file has no box {path[0]!r}")
    return out


def turned_video(*matrix: int) -> bytes:
    a, b, c, d = (value << 16 for value in matrix)
    packed = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    return boxed(video(), (b"moov", b"trak", b"tkhd"), lambda old: old[:40] + packed + old[76:])


def _in_moov(part: bytes, path: tuple[bytes, ...] = (b"moov",), *, first: bool = False) -> bytes:
    return boxed(video(), path, lambda old: part + old if first else old + part)


def _edited(*edits: tuple[int, int]) -> bytes:
    table = struct.pack(">II", 0, len(edits)) + b"".join(
        struct.pack(">IiI", length, start, 1 << 16) for length, start in edits
    )
    return boxed(video(), (b"moov", b"trak", b"edts"), lambda _old: box(b"elst", table))


def files() -> Iterable[tuple[str, Make]]:
    for form, codec in (
        ("mp4", "libx264"), ("mp4", "libx265"), ("mp4", "libvpx-vp9"), ("mp4", "libsvtav1"), ("mov", "libx264"),
        ("mov", "libx265"), ("webm", "libvpx"), ("webm", "libvpx-vp9"), ("webm", "libsvtav1"), ("matroska", "libx264"),
        ("matroska", "libx265"), ("matroska", "libvpx"),
    ):  # fmt: skip
        yield f"{codec} in {form}", partial(video, form, codec)
    yield "h264 with B-frames", partial(video, bf="3")
    yield "h264 with a B-pyramid and open groups", partial(video, bf="4", b_pyramid="normal", x264opts="open-gop=1")
    yield "h264 of key frames only", partial(video, g="1")
    yield "h264 baseline", partial(video, profile="baseline")
    yield "h264, interlaced", partial(video, flags="+ildct+ilme", x264opts="tff=1")
    yield "h264 in slices", partial(video, slices="4")
    yield "h264 of one frame", partial(video, frames=1)
    yield "mp4 that starts with its description", lambda: starting_with_description(video())
    yield "mp4 of fragments", partial(video, g="5", _movflags="frag_keyframe+empty_moov")
    yield "mp4 of fragments, for DASH", partial(video, g="5", _movflags="dash+delay_moov")
    yield "mp4 of fragments, for CMAF", partial(video, g="5", _movflags="cmaf")
    yield "mp4 of fragments, one per frame", partial(video, _movflags="frag_every_frame+empty_moov+default_base_moof")
    yield "mp4 of fragments after a description", partial(video, g="5", _movflags="frag_keyframe")
    yield "mp4 without an edit list", partial(video, bf="3", _use_editlist="0")
    yield "mp4 with negative offsets", partial(video, bf="3", _movflags="negative_cts_offsets")
    yield "mp4 with an hour of its clock", partial(video, _movflags="rtphint")
    yield "mp4 with a prft", partial(video, g="5", _movflags="frag_keyframe+empty_moov", _write_prft="wallclock")
    yield (
        "vp9 with hidden frames",
        partial(video, "webm", "libvpx-vp9", 30, auto__alt__ref="1", lag__in__frames="16", b="200k"),
    )
    yield (
        "vp9 with hidden frames in mp4",
        partial(video, "mp4", "libvpx-vp9", 30, auto__alt__ref="1", lag__in__frames="16", b="200k"),
    )
    yield (
        "vp8 with hidden frames",
        partial(video, "webm", "libvpx", 60, auto__alt__ref="1", lag__in__frames="16", b="200k"),
    )
    yield (
        "vp8 with hidden frames, remuxed",
        lambda: remuxed(video("webm", "libvpx", 60, auto__alt__ref="1", lag__in__frames="16", b="200k"), "matroska"),
    )
    yield "webm, live", partial(video, "webm", _live="1")
    yield "webm in many clusters", partial(video, "webm", _cluster_time_limit="100")
    yield "webm, for DASH", partial(video, "webm", _dash="1")
    yield "webm with its index first", partial(video, "webm", _cues_to_front="1", _reserve_index_space="2000")
    yield "webm with checksums", partial(video, "matroska", "libvpx-vp9", _write_crc32="1")
    yield "webm with voids", lambda: video("webm").replace(b"\x1f\x43\xb6\x75", b"\xec\x84\0\0\0\0\x1f\x43\xb6\x75", 1)
    for times, name in (((0, 0.1, 0.2, 0.9, 1.0, 3.0), "variable"), ((1.0, 1.1, 1.2, 1.3), "late"), ((0.0,), "single")):
        for form in ("mp4", "webm", "matroska"):
            yield f"{form} of a {name} pace", partial(paced_video, form, times)
    for form in ("mp4", "mov", "webm", "matroska"):
        for first in (True, False):
            yield f"{form} with sound {'first' if first else 'second'}", partial(with_sound, form, sound_first=first)
    for name, matrix in {
        "a quarter turn": (0, 1, -1, 0), "half a turn": (-1, 0, 0, -1), "three quarters": (0, -1, 1, 0),
        "a mirror": (-1, 0, 0, 1), "a mirrored turn": (0, 1, 1, 0), "a scale": (2, 0, 0, 2),
        "a shear": (1, 1, 0, 1), "nothing": (0, 0, 0, 0),
    }.items():  # fmt: skip
        yield f"mp4 with the matrix of {name}", partial(turned_video, *matrix)
    yield "mp4 with an unknown box", lambda: _in_moov(box(b"abcd", b"anything"), first=True)
    yield "mp4 with a free box", lambda: _in_moov(box(b"free", bytes(9)), (b"moov", b"trak", b"mdia"))
    yield "mp4 with a uuid box", lambda: video() + box(b"uuid", bytes(40))
    yield "mp4 with bytes behind its end", lambda: video() + bytes(5)
    yield "mp4 with zeros behind its end", lambda: video() + bytes(64)
    yield "mp4 with nothing in its udta", lambda: _in_moov(box(b"udta", bytes(4)))
    yield "mp4 with a pasp and clap", lambda: boxed(
        video(), (b"moov", b"trak", b"mdia", b"minf", b"stbl", b"stsd"),
        lambda old: _entry_with(old, box(b"clap", struct.pack(">8I", 40, 1, 30, 1, 0, 1, 0, 1)))
    )  # fmt: skip
    yield "mp4 without a brand", lambda: video().replace(b"ftyp", b"free", 1)
    yield "mp4 whose last box has no size", _endless_box
    yield "mp4 with a box of 64 bits", _wide_box
    yield "mp4 that hides its first frames", lambda: _edited((500, 6144))
    yield "mp4 with an empty edit", lambda: _edited((500, -1), (1500, 0))
    yield "mp4 with two edits", lambda: _edited((500, 0), (500, 8192))
    yield "mp4 with no edit", _edited
    yield "mp4 with an edit of no length", lambda: _edited((0, 0))
    for form in ("mp4", "matroska"):
        yield (
            f"hevc of open groups, cut at a key frame, in {form}",
            partial(cut_at_key_frame, "libx265", form, g="12", x265="open-gop=1:scenecut=0:min-keyint=12"),
        )
        yield (
            f"h264 of open groups, cut at a key frame, in {form}",
            partial(cut_at_key_frame, "libx264", form, bf="2", x264opts=f"{KEYS}:open-gop=1"),
        )
        yield f"h264 without its first key frame, in {form}", partial(_cut, form)
        yield f"h264 that lacks a packet, in {form}", partial(_lacking_a_packet, form)
        yield f"h264 with a broken packet, in {form}", partial(broken_packet, form, g="12")
        yield f"h264 of key frames with a broken packet, in {form}", partial(broken_packet, form, g="1")


def _entry_with(description: bytes, part: bytes) -> bytes:
    nbytes = struct.unpack_from(">I", description, 8)[0] + len(part)
    return description[:8] + struct.pack(">I", nbytes) + description[12:] + part


def starting_with_description(data: bytes) -> bytes:
    """The same file with its description in front of its samples."""
    start, end = data.index(b"mdat") - 4, data.index(b"moov") - 4

    def moved(table: bytes) -> bytes:
        (count,) = struct.unpack_from(">I", table, 4)
        offsets = struct.unpack_from(f">{count}I", table, 8)
        return table[:8] + struct.pack(f">{count}I", *(offset + len(data) - end for offset in offsets))

    description = boxed(data[end:], (b"moov", b"trak", b"mdia", b"minf", b"stbl", b"stco"), moved)
    return data[:start] + description + data[start:end]


def _endless_box() -> bytes:
    data = starting_with_description(video())
    place = data.index(b"mdat") - 4
    return data[:place] + bytes(4) + data[place + 4 :]


def _wide_box() -> bytes:
    """The samples in a box whose size has 64 bits; there is space for it in front."""
    data = video()
    place = data.index(b"mdat") - 4
    (nbytes,) = struct.unpack_from(">I", data, place)
    return data[: place - 8] + struct.pack(">I4sQ", 1, b"mdat", nbytes + 8) + data[place + 8 :]


CUT, BROKEN = 8, 12
"""The number of packets that are cut away, and the number of the packet that does not decode."""


def later_key_frames() -> bytes:
    """A video whose second key frame is the 13th."""
    return video("mp4", "libx264", 36, bf="0", x264opts=f"{KEYS}:bframes=0")


def _cut(form: str) -> bytes:
    return remuxed(later_key_frames(), form, lambda number, _packet: number >= CUT)


def _lacking_a_packet(form: str) -> bytes:
    return remuxed(video("mp4", "libx264", 36, bf="0", g="12"), form, lambda number, _packet: number != CUT)


def broken_packet(form: str, **encoder: str) -> bytes:
    """A video of which the bytes of frame ``BROKEN`` are zeros."""
    data = bytearray(remuxed(video("mp4", "libx264", 36, bf="0", **encoder), form))
    with av.open(BytesIO(bytes(data)), "r") as container:
        packets = [bytes(packet) for packet in container.demux(container.streams.video[0]) if packet.size]
    place, nbytes = bytes(data).index(packets[BROKEN]), len(packets[BROKEN])
    data[place + 4 : place + nbytes] = bytes(nbytes - 4)
    return bytes(data)
