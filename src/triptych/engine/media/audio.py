"""Decodes untrusted audio to one channel at the model's sample rate."""

from collections.abc import Iterator
from typing import Any

import av
import numpy as np
import numpy.typing as npt
from av.container import InputContainer

from triptych.domain.media import MediaInfo, Modality
from triptych.engine.media.videos import opened
from triptych.errors import InvalidMedia

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
"""By format: the demuxer, and the allowed decoders."""

_SLACK_S = 0.2
"""Largest difference between a lossy codec's output and the header's duration, from packets and decoder delay."""
_EXACT = frozenset({"wav", "flac"})


def decode_audio(media: bytes, info: MediaInfo, sample_rate_hz: int) -> Samples:
    """[info.samples_at(sample_rate_hz)]: the mean of all channels.

    ``info`` is the header against which all limits were checked: audio that turns out longer or shorter is refused.
    What a lossy codec adds or drops at the ends is cut off or filled with silence, so that the length is always the
    counted one. Raises InvalidMedia; its text never quotes the decoder.
    """
    if info.modality is not Modality.AUDIO or info.format not in _READERS:
        raise InvalidMedia(f"{info.modality.value} of format {info.format!r} is not supported")
    expected = info.samples_at(sample_rate_hz)
    slack = 1 if info.format in _EXACT else round(_SLACK_S * sample_rate_hz)
    demuxer, decoders = _READERS[info.format]
    samples = np.zeros(expected, dtype=np.float32)
    found = 0
    with opened(media, demuxer, decoders, f"{info.format} audio") as container:
        for block in _resampled(container, sample_rate_hz):
            room = max(0, expected - found)
            samples[found : found + len(block)] = block[:room]
            found += len(block)
            if found > expected + slack:
                raise InvalidMedia(f"the {info.format} audio is longer than the {info.duration_s:.3f} s of its header")
    if found < expected - slack:
        raise InvalidMedia(
            f"the {info.format} audio has {found / sample_rate_hz:.3f} s, its header says {info.duration_s:.3f} s"
        )
    return samples


def _resampled(container: InputContainer, sample_rate_hz: int) -> Iterator[Samples]:
    stream = container.streams.audio[0]
    stream.codec_context.thread_count = 1
    resampler = av.AudioResampler(format="flt", layout="mono", rate=sample_rate_hz)
    for frame in container.decode(stream):
        frame.pts = None  # ignore timestamps: blocks are concatenated
        for part in resampler.resample(_mono(frame)):
            yield part.to_ndarray()[0]
    for part in resampler.resample(None):
        yield part.to_ndarray()[0]


def _mono(frame: av.AudioFrame) -> av.AudioFrame:
    """The mean of all channels; ffmpeg's mixer would weight surround channels."""
    samples = frame.to_ndarray()
    if not frame.format.is_planar:
        samples = samples.reshape(-1, frame.layout.nb_channels).T
    mixed = av.AudioFrame.from_ndarray(
        _to_float(samples).mean(axis=0, keepdims=True).astype(np.float32), format="flt", layout="mono"
    )
    mixed.sample_rate = frame.sample_rate
    return mixed


def _to_float(samples: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Integers scaled to -1 to 1."""
    if samples.dtype == np.uint8:
        return (samples.astype(np.float64) - 128) / 128
    if np.issubdtype(samples.dtype, np.integer):
        return samples.astype(np.float64) / (1 << 8 * samples.dtype.itemsize - 1)
    return samples.astype(np.float64)
