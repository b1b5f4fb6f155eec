"""Decodes untrusted audio to one channel at the model's sample rate."""

from collections.abc import Iterator
from typing import Any

import av
import numpy as np
import numpy.typing as npt
from av.container import InputContainer

from triptych.domain.media import MediaInfo, Modality
from triptych.engine.media.videos import MAX_LOST_SHARE, decoded, first_stream, opened
from triptych.errors import InvalidMedia
from triptych.media.audio_headers import plain_wav

Samples = npt.NDArray[np.float32]
"""[samples], from -1 to 1."""

_PCM = "pcm_u8,pcm_s16le,pcm_s24le,pcm_s32le,pcm_f32le,pcm_f64le,pcm_alaw,pcm_mulaw"
_READERS = {
    "wav": ("wav", _PCM),
    "flac": ("flac", "flac"),
    "mp3": ("mp3", "mp3float,mp3"),
    "ogg": ("ogg", "opus,libopus,vorbis,libvorbis"),
    "m4a": ("mov", "aac,alac,flac,opus,libopus"),
}
"""Demuxer and allowed decoders by format."""

_SLACK_S = 0.2
"""Largest difference between a lossy codec's output and the header's duration, from packets and decoder delay."""
_EXACT = frozenset({"wav", "flac"})
_LARGEST_SAMPLE = float(1 << 31)
"""Samples are from -1 to 1. Floats beyond that occur: louder peaks, and integers of up to 32 bits that were not scaled."""


def decode_audio(media: bytes, info: MediaInfo, sample_rate_hz: int) -> Samples:
    """[info.samples_at(sample_rate_hz)]: the mean of all channels.

    ``info`` is the header against which all limits were checked: audio that turns out longer or shorter is refused.
    What a lossy codec adds or drops at the ends is cut off or filled with silence, so that the length is always the
    counted one. A packet that does not decode is silent, for a quarter of the clip at most. Raises InvalidMedia, also for
    samples that are not finite or beyond 2^31; its text never quotes the decoder.
    """
    if info.modality is not Modality.AUDIO or info.format not in _READERS:
        raise InvalidMedia(f"{info.modality.value} of format {info.format!r} is not supported")
    expected = info.samples_at(sample_rate_hz)
    slack = 1 if info.format in _EXACT else round(_SLACK_S * sample_rate_hz)
    demuxer, decoders = _READERS[info.format]
    media = plain_wav(media) if info.format == "wav" else media
    samples = np.zeros(expected, dtype=np.float32)
    count = 0
    with opened(media, demuxer, decoders, f"{info.format} audio") as container:
        for block in _resampled(container, info, sample_rate_hz):
            room = max(0, expected - count)
            samples[count : count + len(block)] = block[:room]
            count += len(block)
            if count > expected + slack:
                raise InvalidMedia(f"the {info.format} audio is longer than the {info.duration_s:.3f} s of its header")
    if count < expected - slack:
        raise InvalidMedia(
            f"the {info.format} audio has {count / sample_rate_hz:.3f} s, its header says {info.duration_s:.3f} s"
        )
    return samples


def _resampled(container: InputContainer, info: MediaInfo, sample_rate_hz: int) -> Iterator[Samples]:
    stream = first_stream(container.streams.audio, _READERS[info.format][1], f"{info.format} audio")
    resampler = av.AudioResampler(format="flt", layout="mono", rate=sample_rate_hz)
    lost_s = 0.0
    for packet in container.demux(stream):
        frames = decoded(packet)
        if frames is None:
            packet_s = float(packet.duration * packet.time_base) if packet.duration and packet.time_base else 0.0
            lost_s += packet_s
            if lost_s > info.duration_s * MAX_LOST_SHARE:
                raise InvalidMedia(f"more than a quarter of the {info.format} audio cannot be decoded")
            rate_hz = stream.rate or info.sample_rate_hz
            silence = np.zeros((1, round(packet_s * rate_hz)), dtype=np.float32)
            frames = [_frame(silence, rate_hz)] if silence.size else []
        for frame in frames:
            for part in resampler.resample(_mono(frame, info)):
                yield part.to_ndarray()[0]
    for part in resampler.resample(None):
        yield part.to_ndarray()[0]


def _mono(frame: av.AudioFrame, info: MediaInfo) -> av.AudioFrame:
    """The mean of all channels; ffmpeg's mixer would weight surround channels."""
    samples = frame.to_ndarray()
    if not frame.format.is_planar:
        samples = samples.reshape(-1, frame.layout.nb_channels).T
    samples = _to_float(samples)
    if not (np.abs(samples) <= _LARGEST_SAMPLE).all():  # also false for NaN
        raise InvalidMedia(f"the {info.format} audio has samples that are not finite, or far beyond -1 to 1")
    return _frame(samples.mean(axis=0, keepdims=True).astype(np.float32), frame.sample_rate)


def _frame(mono: npt.NDArray[np.float32], sample_rate_hz: int) -> av.AudioFrame:
    """``mono`` is [1, samples]. Without a timestamp: frames are concatenated."""
    frame = av.AudioFrame.from_ndarray(mono, format="flt", layout="mono")
    frame.sample_rate = sample_rate_hz
    return frame


def _to_float(samples: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Integers scaled to -1 to 1."""
    if samples.dtype == np.uint8:
        return (samples.astype(np.float64) - 128) / 128
    if np.issubdtype(samples.dtype, np.integer):
        return samples.astype(np.float64) / (1 << 8 * samples.dtype.itemsize - 1)
    with np.errstate(invalid="ignore"):  # of a signalling NaN; ``_mono`` refuses all
        return samples.astype(np.float64)
