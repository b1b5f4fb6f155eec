"""Headers of WAV, FLAC, MP3 and Ogg (Opus, Vorbis) files: duration to the sample, without decoding.

``media.clips`` says what readers may raise.
"""

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from triptych.errors import InvalidMedia
from triptych.media.clips import Clip, audio, count_parts

# WAVE format tags, and the accepted bits per sample of each: PCM, float, A-law, mu-law.
_WAV_BITS = {1: (8, 16, 24, 32), 3: (32, 64), 6: (8,), 7: (8,)}
_WAV_EXTENSIBLE = 0xFFFE
_WAV_UNKNOWN_NBYTES = 1 << 30
"""Lengths from here on, and 0, are placeholders of writers that stream: 0x7FFFFFFF, 0x7FFFF000, 0x80000000, 0xFFFFFFFF
and others near them.
"""
_WAV_64_BITS_NBYTES = 0xFFFFFFFF

_FLAC_STREAMINFO_NBYTES = 34

_OPUS_RATE_HZ = 48_000

# MPEG audio layer III: kbit/s by bitrate index and samples per second by rate index, of MPEG 1 and of MPEG 2 and 2.5.
_MP3_KBPS = {
    True: (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    False: (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}
_MP3_RATES_HZ = {3: (44_100, 48_000, 32_000), 2: (22_050, 24_000, 16_000), 0: (11_025, 12_000, 8_000)}
_MP3_DECODER_DELAY = 529
_MP3_BEGINS = re.compile(rb"\xff[\xe2\xe3\xf2\xf3\xfa\xfb]")


@dataclass(frozen=True, slots=True)
class _Wav:
    format: bytes
    """The content of a format chunk, in its plain form."""
    block_nbytes: int
    """Bytes of a sample of all channels."""
    sample_rate_hz: int
    start: int
    samples: int
    """From byte ``start`` on."""


def is_wav(data: bytes) -> bool:
    """Whether a file starts as WAV does, or as its variant for lengths of 64 bits (EBU 3306)."""
    return data[:4] in (b"RIFF", b"RF64", b"BW64") and data[8:12] == b"WAVE"


def read_wav(data: bytes) -> Clip:
    """Samples whose declared length is a placeholder extend to the end of the file."""
    wav = _wav(data)
    return audio("wav", wav.samples, wav.sample_rate_hz)


def plain_wav(data: bytes) -> bytes:
    """The samples that ``read_wav`` counts and their format, in the form that every decoder reads alike.

    Decoders differ on placeholders, on lengths of 64 bits and on samples with unused bits. Raises InvalidMedia.
    """
    wav = _wav(data)
    nbytes = wav.samples * wav.block_nbytes
    chunks = (
        b"WAVEfmt " + struct.pack("<I", len(wav.format)) + wav.format,
        b"data" + struct.pack("<I", nbytes) + data[wav.start : wav.start + nbytes],
    )
    return b"".join((b"RIFF", struct.pack("<I", sum(map(len, chunks))), *chunks))


def _wav(data: bytes) -> _Wav:
    """RIFF chunks up to the samples."""
    format_, block_nbytes, sample_rate_hz, wide_nbytes = b"", 0, 0, 0
    position = 12
    for _ in count_parts("wav audio"):
        kind, nbytes = struct.unpack_from("<4sI", data, position)
        content = position + 8
        if kind == b"fmt ":
            tag, channels, sample_rate_hz, _, block_nbytes, bits = struct.unpack_from("<HHIIHH", data, content)
            if tag == _WAV_EXTENSIBLE:
                (tag,) = struct.unpack_from("<H", data, content + 24)
            if bits not in _WAV_BITS.get(tag, ()) or not 1 <= channels <= 8 or block_nbytes != channels * bits // 8:
                raise InvalidMedia(f"the wav audio has an encoding that is not supported: tag {tag} of {bits} bits")
            format_ = struct.pack(
                "<HHIIHH", tag, channels, sample_rate_hz, sample_rate_hz * block_nbytes & 0xFFFFFFFF, block_nbytes, bits
            )
        elif kind == b"ds64":
            (wide_nbytes,) = struct.unpack_from("<Q", data, content + 8)
        elif kind == b"data":
            if not block_nbytes:
                raise InvalidMedia("the wav audio does not start with its format")
            if nbytes == _WAV_64_BITS_NBYTES:
                nbytes = wide_nbytes
            left = len(data) - content
            if nbytes == 0 or nbytes >= _WAV_UNKNOWN_NBYTES:
                nbytes = left
            if nbytes >= left + block_nbytes:  # else there is less than a sample too few: a wrong count
                raise InvalidMedia(f"the wav audio is cut off: it has {left} of {nbytes} bytes of samples")
            samples = min(nbytes, left) // block_nbytes
            return _Wav(format_, block_nbytes, sample_rate_hz, content, samples)
        position = content + nbytes + nbytes % 2
    raise AssertionError


def end_of_tags(data: bytes) -> int:
    """Where a file's ID3 tags end: 0 without any."""
    position = 0
    for _ in count_parts("mp3 audio"):
        if data[position : position + 3] != b"ID3" or position + 10 > len(data):
            break
        flags, *size = struct.unpack_from(">5B", data, position + 5)
        nbytes = sum(byte << 7 * place for place, byte in enumerate(reversed(size)))
        position += 10 + nbytes + (10 if flags & 0x10 else 0)
    return position


def is_flac(data: bytes) -> bool:
    """Whether a file starts as FLAC does; some writers put ID3 tags in front."""
    return data.startswith(b"fLaC", end_of_tags(data))


def read_flac(data: bytes) -> Clip:
    """The STREAMINFO block, which comes first (RFC 9639, section 8.2)."""
    start = end_of_tags(data)
    kind, nbytes = data[start + 4] & 0x7F, int.from_bytes(data[start + 5 : start + 8], "big")
    if kind != 0 or nbytes != _FLAC_STREAMINFO_NBYTES:
        raise InvalidMedia("the flac audio does not start with its stream information")
    (packed,) = struct.unpack_from(">Q", data, start + 18)  # 20 bits rate, 3 channels, 5 bits per sample, 36 samples
    return audio("flac", packed & (1 << 36) - 1, packed >> 44)


def read_ogg(data: bytes) -> Clip:
    """The pages of one logical stream (RFC 3533, section 6): the first has the codec, the last the length."""
    serial: int | None = None
    sample_rate_hz = skipped = end = position = 0
    for _ in count_parts("ogg audio"):
        position = data.find(b"OggS", position)  # decoders skip what is between pages
        if position < 0:
            break
        flags, granule, stream, _, _, segments = struct.unpack_from("<5xBqIIIB", data, position)
        content = position + 27 + segments
        if flags & 2:
            if serial is not None:
                raise InvalidMedia("the ogg file has more than one stream; only one of audio is taken")
            serial = stream
            sample_rate_hz, skipped = _ogg_codec(data, content)
        elif stream != serial:
            raise InvalidMedia("the ogg audio has a page of no stream")
        if granule >= 0:
            end = granule
        position = content + sum(data[position + 27 : content])
        if position > len(data):
            raise InvalidMedia("the ogg audio is cut off")
    return audio("ogg", end - skipped, sample_rate_hz)


def _ogg_codec(data: bytes, content: int) -> tuple[int, int]:
    """Samples per second, and the number of leading samples to skip."""
    if data.startswith(b"OpusHead", content):
        return _OPUS_RATE_HZ, int(struct.unpack_from("<H", data, content + 10)[0])
    if data.startswith(b"\x01vorbis", content):
        return int(struct.unpack_from("<I", data, content + 12)[0]), 0
    raise InvalidMedia("the ogg file holds neither Opus nor Vorbis audio")


def is_mp3(data: bytes) -> bool:
    """Whether a file starts as MPEG audio layer III does."""
    return data[:3] == b"ID3" or (len(data) > 3 and data[0] == 0xFF and data[1] & 0xE6 == 0xE2)


def read_mp3(data: bytes) -> Clip:
    """Walks all frame headers, since only they give the length; subtracts the padding that the encoder recorded.

    What is between frames is skipped, as decoders do: tags, zeros, the rest of a frame.
    """
    position = end_of_tags(data)
    rate_hz = samples = padding = 0
    parts = count_parts("mp3 audio")
    for _ in parts:
        frame = _mp3_frame(data, position)
        if frame is None:
            following = _mp3_frame_after(data, position, rate_hz, parts)
            if following is None:
                break
            position, frame = following
        nbytes, frame_samples, frame_rate_hz = frame
        if position + nbytes > len(data):
            break
        if not rate_hz:
            rate_hz = frame_rate_hz
            if (padded := _mp3_padding(data[position : position + nbytes])) is not None:
                padding = padded
                samples -= frame_samples  # the Xing/Info frame holds no audio
        if frame_rate_hz != rate_hz:
            raise InvalidMedia(f"the mp3 audio changes from {rate_hz} to {frame_rate_hz} samples per second")
        samples += frame_samples
        position += nbytes
    if not rate_hz:
        raise InvalidMedia("the mp3 audio has no frame where one has to be")
    return audio("mp3", samples - padding, rate_hz)


def _mp3_frame(data: bytes, position: int) -> tuple[int, int, int] | None:
    """Bytes, samples and samples per second of the frame at ``position``; None if there is no frame."""
    header = int.from_bytes(data[position : position + 4], "big") if position + 4 <= len(data) else 0
    version, layer = header >> 19 & 3, header >> 17 & 3
    bitrate, rate = header >> 12 & 15, header >> 10 & 3
    if header >> 21 != 0x7FF or version == 1 or layer != 1 or bitrate in (0, 15) or rate == 3:
        return None
    rate_hz = _MP3_RATES_HZ[version][rate]
    samples = 1152 if version == 3 else 576
    nbytes = samples // 8 * 1000 * _MP3_KBPS[version == 3][bitrate - 1] // rate_hz + (header >> 9 & 1)
    return nbytes, samples, rate_hz


def _mp3_frame_after(
    data: bytes, position: int, rate_hz: int, parts: Iterator[int]
) -> tuple[int, tuple[int, int, int]] | None:
    """The next frame of this rate (any rate if 0) that another one follows, or the end; None if there is none."""
    for _, match in zip(parts, _MP3_BEGINS.finditer(data, position), strict=False):
        start = match.start()
        frame = _mp3_frame(data, start)
        if frame is not None and (not rate_hz or frame[2] == rate_hz):
            end = start + frame[0]
            if end == len(data) or _mp3_frame(data, end) is not None:
                return start, frame
    return None


def _mp3_padding(frame: bytes) -> int | None:
    """Padding samples by the encoder's tag in the first frame; None without a tag.

    The tag follows the side information, whose length depends on version and channels, so it is searched for.
    """
    places = [place for name in (b"Xing", b"Info") if 0 < (place := frame.find(name, 4, 4 + 36)) <= 36]
    if not places:
        return 0 if frame.startswith(b"VBRI", 36) else None
    place = max(places)  # the other one is part of the side information
    flags = int.from_bytes(frame[place + 4 : place + 8], "big")
    version = place + 8 + 4 * (flags & 1) + 4 * (flags >> 1 & 1) + 100 * (flags >> 2 & 1) + 4 * (flags >> 3 & 1)
    if frame[version : version + 4] not in (b"LAME", b"Lavf", b"Lavc"):
        return 0
    packed = int.from_bytes(frame[version + 21 : version + 24], "big")
    delay, padding = packed >> 12, packed & 0xFFF
    # Decoders drop their own delay at the start, and that much less of the padding at the end.
    return delay + _MP3_DECODER_DELAY + max(0, padding - _MP3_DECODER_DELAY)
