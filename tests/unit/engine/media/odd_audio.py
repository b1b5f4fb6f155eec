"""Odd audio: what recorders, speech services, taggers and streams write."""

import struct
from collections.abc import Iterable
from functools import cache, partial
from io import BytesIO

import av
import numpy as np

from tests.unit.engine.media.odd_images import Make
from tests.unit.engine.media.odd_videos import starting_with_description
from triptych.testing import clips

RATE_HZ = 16_000
SAMPLES = 4001


def wav(
    *chunks: tuple[bytes, bytes],
    bits: int = 16,
    tag: int = 1,
    channels: int = 1,
    extra: bytes | None = None,
    nbytes: int | None = None,
    samples: bytes | None = None,
    after: bytes = b"",
    form: bytes = b"RIFF",
    block: int | None = None,
) -> bytes:
    """A WAV whose samples are declared to have ``nbytes``; ``extra`` extends its format."""
    if samples is None:
        samples = _coded(bits, tag, channels)
    block = channels * bits // 8 if block is None else block
    format_ = struct.pack(
        "<HHIIHH", tag if extra is None or len(extra) != 22 else 0xFFFE, channels, RATE_HZ, RATE_HZ * block, block, bits
    )
    if extra is not None:
        format_ += struct.pack("<H", len(extra)) + extra
    parts = b"".join(name + struct.pack("<I", len(data)) + data + bytes(len(data) % 2) for name, data in chunks)
    parts += b"fmt " + struct.pack("<I", len(format_)) + format_
    parts += b"data" + struct.pack("<I", len(samples) if nbytes is None else nbytes) + samples + after
    size = 0xFFFFFFFF if form == b"RF64" else min(0xFFFFFFFF, 4 + len(parts))
    return form + struct.pack("<I", size) + b"WAVE" + parts


def _coded(bits: int, tag: int, channels: int) -> bytes:
    values = np.tile(0.5 * np.sin(np.arange(SAMPLES) / 9), (channels, 1)).T
    if tag == 3:
        return values.astype(f"<f{bits // 8}").tobytes()
    if bits == 8:
        return (128 + 100 * values).astype(np.uint8).tobytes()
    whole = (values * (1 << bits - 1)).astype("<i4")
    return b"".join(struct.pack("<i", value)[: bits // 8] for value in whole.ravel())


def extensible(bits: int, tag: int = 1, mask: int = 0) -> bytes:
    return struct.pack("<HIH", bits, mask, tag) + b"\0\0\0\0\x10\0\x80\0\0\xaa\0\x38\x9b\x71"


def _wav_files() -> Iterable[tuple[str, Make]]:
    for tag, bits in ((1, 8), (1, 16), (1, 24), (1, 32), (3, 32), (3, 64), (6, 8), (7, 8)):
        yield f"wav tag {tag} of {bits} bits", partial(wav, tag=tag, bits=bits)
    for channels in (2, 6):
        yield f"wav of {channels} channels", partial(wav, channels=channels)
        yield (
            f"wav of {channels} channels, extensible",
            partial(wav, channels=channels, extra=extensible(16, mask=0x3F)),
        )
    yield "wav, extensible", partial(wav, extra=extensible(16))
    yield "wav, extensible, of 20 bits in 24", partial(wav, bits=24, extra=extensible(20))
    yield "wav, extensible, of 24 bits in 32", partial(wav, bits=32, extra=extensible(24))
    yield "wav, extensible, of floats", partial(wav, bits=32, tag=3, extra=extensible(32, 3))
    yield "wav with a format of 18 bytes", partial(wav, extra=b"")
    for declared in (0, 0xFFFFFFFF, 0x7FFFFFFF, 0x7FFFF000, 0x80000000, 0xFFFFFFDB, 0xFFFFF000, 0x7FFFFFDB):
        yield f"wav of a declared length of {declared:#x}", partial(wav, nbytes=declared)
        yield (
            f"wav of a declared length of {declared:#x} and an odd one",
            partial(wav, nbytes=declared, samples=_coded(16, 1, 1) + b"\1"),
        )
    yield "wav of one byte less than declared", partial(wav, nbytes=2 * SAMPLES + 1)
    yield "wav of a sample less than declared, in stereo", partial(wav, channels=2, nbytes=4 * SAMPLES + 3)
    yield "wav of an odd length", partial(wav, bits=8, after=b"\0")
    yield "wav of an odd length without its padding", partial(wav, bits=8)
    yield "wav of half a sample", partial(wav, samples=_coded(16, 1, 1) + b"\1", after=b"\0")
    yield "wav of less than there is", partial(wav, nbytes=2000)
    yield "wav of 24 bits and an odd length", partial(wav, bits=24, nbytes=3 * SAMPLES)
    listed = (b"LIST", b"INFOISFT\x05\0\0\0Lavf\0\0")
    for kind, content in (listed, (b"bext", bytes(602)), (b"JUNK", bytes(28)), (b"fact", struct.pack("<I", SAMPLES)),
                          (b"cue ", bytes(4)), (b"PEAK", bytes(16)), (b"iXML", b"<x/>"), (b"id3 ", b"ID3\4\0\0\0\0\0\0"),
                          (b"LIST", b"odd")):  # fmt: skip
        name = kind.decode().strip() + (" of an odd length" if len(content) % 2 else "")
        yield f"wav with {name}", partial(wav, (kind, content))
        after = kind + struct.pack("<I", len(content)) + content
        yield f"wav with {name} behind its samples", partial(wav, after=after)
    yield (
        "wav with LIST behind samples of no declared length",
        partial(wav, nbytes=0xFFFFFFFF, after=b"LIST\4\0\0\0INFO"),
    )
    yield "wav with bytes behind its end", partial(wav, after=b"and more" * 9)
    ds64 = (b"ds64", struct.pack("<QQQI", 4 + 36 + 44 + 2 * SAMPLES, 2 * SAMPLES, SAMPLES, 0))
    yield "wav of 64 bits", partial(wav, ds64, form=b"RF64", nbytes=0xFFFFFFFF)
    yield "wav of 64 bits, by its own length", partial(wav, ds64, form=b"RF64")
    yield (
        "wav of 64 bits of less than there is",
        partial(wav, (b"ds64", struct.pack("<QQQI", 0, 2000, 1000, 0)), form=b"RF64", nbytes=0xFFFFFFFF),
    )
    yield "wav whose size is zero", lambda: wav()[:4] + bytes(4) + wav()[8:]
    yield "wav by a recorder that stopped", lambda: wav(nbytes=0)[:4] + bytes(4) + wav(nbytes=0)[8:]


def mp3(
    *, bitrate: int = 64_000, channels: int = 1, rate_hz: int = RATE_HZ, xing: bool = True, **encoder: str
) -> bytes:
    options = {"b": str(bitrate), "_write_xing": str(int(xing)), "_id3v2_version": "0", **encoder}
    return coded_sound("mp3", "libmp3lame", 0.25, rate_hz, channels, **options)


sound = cache(clips.audio)
ID3 = b"ID3\4\0\0\0\0\2\0" + bytes(256)


def _vbri() -> bytes:
    """An encoder's tag of another kind than LAME's, in a frame of silence in front."""
    frames = mp3(xing=False)
    first = frames[: frames.index(frames[:2], 4)]
    tag = b"VBRI" + struct.pack(">HHHIIHHHH", 1, 0, 75, len(frames), 10, 1, 1, 2, 10)
    return first[:36].ljust(36, b"\0") + tag + bytes(len(first) - 36 - len(tag)) + frames


def _mp3_files() -> Iterable[tuple[str, Make]]:
    for rate_hz in (8000, 11_025, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000):
        yield f"mp3 of {rate_hz} Hz", partial(mp3, rate_hz=rate_hz, bitrate=32_000)
    yield "mp3 in stereo", partial(mp3, channels=2, bitrate=128_000)
    yield "mp3 in joint stereo", partial(mp3, channels=2, joint_stereo="1")
    yield "mp3 without the encoder's tag", partial(mp3, xing=False)
    yield "mp3 of variable bit rate", partial(mp3, q="5")
    yield "mp3 of average bit rate", partial(mp3, abr="1")
    yield "mp3 with Fraunhofer's tag", _vbri
    yield "mp3 with the names of two tags", lambda: mp3()[:6] + b"Xing" + mp3()[10:]
    yield "mp3 with ID3", lambda: ID3 + mp3()
    yield "mp3 with ID3 twice", lambda: ID3 * 2 + mp3()
    yield "mp3 with ID3 and its footer", lambda: ID3[:5] + b"\x10" + ID3[6:] + b"3DI" + ID3[3:10] + mp3()
    yield "mp3 with ID3 and zeros", lambda: ID3 + bytes(700) + mp3()
    yield "mp3 with ID3v1", lambda: mp3() + b"TAG" + bytes(125)
    yield "mp3 with APE tags", lambda: mp3() + b"APETAGEX" + struct.pack("<IIII", 2000, 32, 0, 0) + bytes(8)
    yield "mp3 with Lyrics3", lambda: mp3() + b"LYRICSBEGIN" + bytes(50) + b"000050LYRICS200"
    yield "mp3 that starts within a frame", lambda: mp3()[30:]
    yield "mp3 cut off within a frame", lambda: mp3()[:-30]
    yield "mp3 with bytes within", lambda: mp3(xing=False)[: 288 * 3] + b"junk" * 5 + mp3(xing=False)[288 * 3 :]
    yield "mp3 without its first frames", lambda: mp3()[288 * 3 :]
    yield "mp3 of two files", lambda: mp3() + mp3()


def _without_flac_length(data: bytes) -> bytes:
    return data[:21] + bytes((data[21] & 0xF0,)) + bytes(4) + data[26:]


def _with_flac_block(kind: int, content: bytes) -> bytes:
    data = sound(0.25, form="flac")
    return data[:42] + bytes((kind,)) + len(content).to_bytes(3, "big") + content + data[42:]


def _flac_files() -> Iterable[tuple[str, Make]]:
    for rate_hz in (8000, 44_100, 96_000):
        yield f"flac of {rate_hz} Hz", partial(sound, 0.25, rate_hz, form="flac")
    yield "flac in stereo", partial(sound, 0.25, form="flac", channels=2)
    yield "flac of no declared length", lambda: _without_flac_length(sound(0.25, form="flac"))
    yield "flac with ID3", lambda: ID3 + sound(0.25, form="flac")
    yield "flac with ID3v1", lambda: sound(0.25, form="flac") + b"TAG" + bytes(125)
    for kind, name in (
        (1, "padding"),
        (2, "an application"),
        (3, "a seek table"),
        (5, "a cue sheet"),
        (6, "a picture"),
        (9, "an unknown block"),
    ):
        yield f"flac with {name}", partial(_with_flac_block, kind, bytes(36))
    yield "flac without a checksum", lambda: sound(0.25, form="flac")[:26] + bytes(16) + sound(0.25, form="flac")[42:]


@cache
def coded_sound(
    form: str, codec: str, seconds: float = 0.5, rate_hz: int = 48_000, channels: int = 1, **options: str
) -> bytes:
    out = BytesIO()
    given = {name.removeprefix("_"): value for name, value in options.items() if name.startswith("_")}
    encoder = {name: value for name, value in options.items() if not name.startswith("_")}
    layout = "mono" if channels == 1 else "stereo"
    with av.open(out, "w", format=form, options=given) as container:
        stream = container.add_stream(codec, rate=rate_hz, layout=layout, options={"strict": "-2", **encoder})
        if not isinstance(stream, av.AudioStream):
            raise TypeError(f"{codec} is no codec of sound")
        values = np.tile(0.5 * np.sin(np.arange(round(rate_hz * seconds)) / 9), (channels, 1)).astype(np.float32)
        frame = av.AudioFrame.from_ndarray(values, format="fltp", layout=layout)
        frame.sample_rate, frame.pts = rate_hz, 0
        fifo = av.AudioFifo()
        for part in av.AudioResampler(format=stream.format, layout=layout, rate=rate_hz).resample(frame):
            fifo.write(part)
        while (piece := fifo.read(stream.codec_context.frame_size or 1024, partial=True)) is not None:
            container.mux(stream.encode(piece))
        container.mux(stream.encode(None))
    return out.getvalue()


def _coded_files() -> Iterable[tuple[str, Make]]:
    yield "opus", partial(coded_sound, "ogg", "libopus")
    yield "opus in stereo", partial(coded_sound, "ogg", "libopus", channels=2)
    for duration in ("2.5", "20", "60"):
        yield f"opus in frames of {duration} ms", partial(coded_sound, "ogg", "libopus", frame_duration=duration)
    yield "opus for a stream", partial(coded_sound, "ogg", "libopus", _page_duration="20000")
    yield "opus of 16 kHz", partial(coded_sound, "ogg", "libopus", rate_hz=16_000)
    yield "vorbis", partial(vorbis, 48_000)
    yield "vorbis of 44.1 kHz", partial(vorbis, 44_100)
    yield "flac in ogg", partial(coded_sound, "ogg", "flac")
    yield "opus that ends early", lambda: _ended_early(coded_sound("ogg", "libopus"))
    yield (
        "opus without its first pages",
        lambda: _from_granule(coded_sound("ogg", "libopus", _page_duration="20000"), 480_000),
    )
    yield "opus with bytes behind its end", lambda: coded_sound("ogg", "libopus") + bytes(9)
    yield "opus of two links", lambda: coded_sound("ogg", "libopus") * 2
    for form in ("ipod", "mp4", "mov"):
        yield f"aac in {form}", partial(coded_sound, form, "aac", rate_hz=44_100)
        yield f"alac in {form}", partial(coded_sound, form, "alac", rate_hz=44_100)
    yield "aac in stereo", partial(coded_sound, "ipod", "aac", channels=2)
    yield "aac without an edit list", partial(coded_sound, "ipod", "aac", _use_editlist="0")
    yield (
        "aac of fragments",
        partial(coded_sound, "mp4", "aac", _movflags="frag_keyframe+empty_moov", _frag_duration="100000"),
    )
    yield "aac that starts with its description", lambda: starting_with_description(coded_sound("ipod", "aac"))
    yield "opus in mp4", partial(coded_sound, "mp4", "libopus")
    yield "flac in mp4", partial(coded_sound, "mp4", "flac")
    yield "mp3 in mp4", partial(coded_sound, "mp4", "libmp3lame", rate_hz=44_100)


def _pages(data: bytes) -> list[bytes]:
    pages, position = [], 0
    while position < len(data):
        segments = data[position + 26]
        end = position + 27 + segments + sum(data[position + 27 : position + 27 + segments])
        pages.append(data[position:end])
        position = end
    return pages


def _with_granule(page: bytes, granule: int) -> bytes:
    page = page[:6] + struct.pack("<q", granule) + page[14:22] + bytes(4) + page[26:]
    table = []
    for number in range(256):
        value = number << 24
        for _ in range(8):
            value = (value << 1 ^ (0x04C11DB7 if value >> 31 else 0)) & 0xFFFFFFFF
        table.append(value)
    check = 0
    for byte in page:
        check = (check << 8 ^ table[(check >> 24 ^ byte) & 0xFF]) & 0xFFFFFFFF
    return page[:22] + struct.pack("<I", check) + page[26:]


def vorbis(rate_hz: int) -> bytes:
    """With the length that FFmpeg's writer gets wrong."""
    *pages, last = _pages(coded_sound("ogg", "vorbis", rate_hz=rate_hz, channels=2))
    return b"".join(pages) + _with_granule(last, rate_hz // 2)


def _ended_early(data: bytes) -> bytes:
    """The last page says that its packets are shown in part only."""
    *pages, last = _pages(data)
    (granule,) = struct.unpack_from("<q", last, 6)
    return b"".join(pages) + _with_granule(last, granule - 700)


def _from_granule(data: bytes, start: int) -> bytes:
    """A recording of a stream that ran for a while."""
    header, tags, *pages = _pages(data)
    return header + tags + b"".join(_with_granule(page, struct.unpack_from("<q", page, 6)[0] + start) for page in pages)


def files() -> Iterable[tuple[str, Make]]:
    for files_of in (_wav_files, _mp3_files, _flac_files, _coded_files):
        yield from files_of()
