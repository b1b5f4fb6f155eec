"""Headers of WAV, FLAC, MP3 and Ogg (Opus, Vorbis) files: duration to the sample, without decoding.

``media.clips`` says what readers may raise.
"""

import struct

from triptych.errors import InvalidMedia
from triptych.media.clips import Clip, audio, count_parts

# WAVE format tags, and the accepted bits per sample of each: PCM, float, A-law, mu-law.
_WAV_BITS = {1: (8, 16, 24, 32), 3: (32, 64), 6: (8,), 7: (8,)}
_WAV_EXTENSIBLE = 0xFFFE
_WAV_UNKNOWN_NBYTES = (0, 0xFFFFFFFF)

_FLAC_STREAMINFO_NBYTES = 34

_OPUS_RATE_HZ = 48_000

# MPEG audio layer III: kbit/s by bitrate index and samples per second by rate index, of MPEG 1 and of MPEG 2 and 2.5.
_MP3_KBPS = {
    True: (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    False: (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}
_MP3_RATES_HZ = {3: (44_100, 48_000, 32_000), 2: (22_050, 24_000, 16_000), 0: (11_025, 12_000, 8_000)}
_MP3_DECODER_DELAY = 529


def read_wav(data: bytes) -> Clip:
    """RIFF chunks up to the samples. Samples of undeclared length extend to the end of the file."""
    block_nbytes = sample_rate_hz = 0
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
        elif kind == b"data":
            if not block_nbytes:
                raise InvalidMedia("the wav audio does not start with its format")
            left = len(data) - content
            if nbytes in _WAV_UNKNOWN_NBYTES:
                nbytes = left
            if nbytes > left:
                raise InvalidMedia("the wav audio is cut off")
            return audio("wav", nbytes // block_nbytes, sample_rate_hz)
        position = content + nbytes + nbytes % 2
    raise AssertionError


def read_flac(data: bytes) -> Clip:
    """The STREAMINFO block, which comes first (RFC 9639, section 8.2)."""
    kind, nbytes = data[4] & 0x7F, int.from_bytes(data[5:8], "big")
    if kind != 0 or nbytes != _FLAC_STREAMINFO_NBYTES:
        raise InvalidMedia("the flac audio does not start with its stream information")
    (packed,) = struct.unpack_from(">Q", data, 18)  # 20 bits rate, 3 channels, 5 bits per sample, 36 samples
    return audio("flac", packed & (1 << 36) - 1, packed >> 44)


def read_ogg(data: bytes) -> Clip:
    """The pages of one logical stream (RFC 3533, section 6): the first has the codec, the last the length."""
    serial: int | None = None
    sample_rate_hz = skipped = end = position = 0
    for _ in count_parts("ogg audio"):
        if position == len(data):
            break
        magic, flags, granule, of, _, _, segments = struct.unpack_from("<4sxBqIIIB", data, position)
        content = position + 27 + segments
        if magic != b"OggS":
            raise InvalidMedia("the ogg audio has no page where one has to be")
        if flags & 2:
            if serial is not None:
                raise InvalidMedia("the ogg file has more than one stream; only one of audio is taken")
            serial = of
            sample_rate_hz, skipped = _ogg_codec(data, content)
        elif of != serial:
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
    """Walks all frame headers, since only they give the length; subtracts the padding that the encoder recorded."""
    position = 0
    for _ in count_parts("mp3 audio"):
        if data[position : position + 3] != b"ID3":
            break
        flags, *size = struct.unpack_from(">5B", data, position + 5)
        nbytes = sum(byte << 7 * place for place, byte in enumerate(reversed(size)))
        position += 10 + nbytes + (10 if flags & 0x10 else 0)
    rate_hz = samples = padding = 0
    for _ in count_parts("mp3 audio"):
        frame = _mp3_frame(data, position)
        if frame is None:
            break
        nbytes, frame_samples, frame_rate_hz = frame
        if position + nbytes > len(data):
            break
        if not rate_hz:
            rate_hz = frame_rate_hz
            if (found := _mp3_padding(data[position : position + nbytes])) is not None:
                padding = found
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


def _mp3_padding(frame: bytes) -> int | None:
    """Padding samples by the encoder's tag in the first frame; None without a tag.

    The tag follows the side information, whose length depends on version and channels, so it is searched for.
    """
    places = [place for name in (b"Xing", b"Info") if 0 < (place := frame.find(name, 4, 4 + 36)) <= 36]
    if not places:
        return 0 if frame.startswith(b"VBRI", 36) else None
    (place,) = places
    flags = int.from_bytes(frame[place + 4 : place + 8], "big")
    version = place + 8 + 4 * (flags & 1) + 4 * (flags >> 1 & 1) + 100 * (flags >> 2 & 1) + 4 * (flags >> 3 & 1)
    if frame[version : version + 4] not in (b"LAME", b"Lavf", b"Lavc"):
        return 0
    packed = int.from_bytes(frame[version + 21 : version + 24], "big")
    delay, padding = packed >> 12, packed & 0xFFF
    # Decoders drop their own delay at the start, and that much less of the padding at the end.
    return delay + _MP3_DECODER_DELAY + max(0, padding - _MP3_DECODER_DELAY)
