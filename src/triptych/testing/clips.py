"""Short videos and audio clips for tests, made with PyAV's encoders."""

import math
from fractions import Fraction
from io import BytesIO

import av
import numpy as np
import numpy.typing as npt

_VIDEO = {"mp4": "libx264", "mov": "libx264", "webm": "libvpx-vp9"}
_AUDIO = {"wav": "pcm_s16le", "flac": "flac", "mp3": "libmp3lame", "ogg": "libopus", "m4a": "aac"}
_MUXERS = {"webm": "webm", "m4a": "ipod"}
_STEADY = {"libx264": {"qp": "20"}}
"""A fixed quantizer: x264's rate control reads uninitialized memory, so equal frames would give different bytes."""


def video(
    width: int = 64,
    height: int = 48,
    frames: int = 12,
    frames_per_s: int = 8,
    *,
    form: str = "mp4",
    codec: str = "",
    seed: int = 0,
    options: dict[str, str] | None = None,
    encoder: dict[str, str] | None = None,
) -> bytes:
    """A video whose frames get brighter over a pattern that depends on ``seed``.

    ``options`` are the container's and ``encoder`` the codec's, in ffmpeg's names. Width and height must be even.
    """
    pattern = np.random.default_rng(seed).integers(0, 64, (height // 8 + 1, width // 8 + 1, 3), dtype=np.uint8)
    pattern = pattern.repeat(8, axis=0).repeat(8, axis=1)[:height, :width]
    out = BytesIO()
    with av.open(
        out, "w", format=_MUXERS.get(form, form), options={"fflags": "+bitexact"} | (options or {})
    ) as container:
        name = codec or _VIDEO[form]
        settings = {**_STEADY.get(name, {}), **(encoder or {})}
        stream = container.add_stream(name, rate=Fraction(frames_per_s), options=settings)
        if not isinstance(stream, av.VideoStream):
            raise TypeError(f"{form} holds no video")
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for number in range(frames):
            picture = pattern + np.uint8(160 * number // max(1, frames - 1))
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode(None))
    return out.getvalue()


COLOURS = np.array(
    [(200, 30, 60), (30, 180, 60), (20, 60, 220), (128, 128, 128), (250, 250, 250), (10, 10, 10), (220, 200, 20)],
    dtype=np.uint8,
)
"""[colours, 3] of ``coloured_video``, from left to right in columns of 16 pixels."""


def coloured_video(
    *,
    pixels: str,
    matrix: int,
    coefficients: tuple[float, float],
    full_range: bool,
) -> bytes:
    """An H.264 video of two frames with ``COLOURS``, converted to YCbCr here, by the definition.

    ``pixels`` is yuv420p, yuv444p or yuv420p10le; ``matrix`` the number that
    the file declares; ``coefficients`` the weights of red and blue in the luma (ITU-T H.273).
    """
    red, blue = coefficients
    peak, kind = (1023, np.uint16) if "10" in pixels else (255, np.uint8)
    rgb = np.repeat(COLOURS / 255, 16, axis=0)
    luma = rgb @ (red, 1 - red - blue, blue)
    chroma = [(rgb[:, 2] - luma) / (2 * (1 - blue)), (rgb[:, 0] - luma) / (2 * (1 - red))]
    step = (peak + 1) // 256
    low, luma_span, chroma_span = (0, peak, peak) if full_range else (16 * step, 219 * step, 224 * step)
    rows = [low + luma_span * luma, *(128 * step + chroma_span * part for part in chroma)]
    planes = [np.tile(np.clip(np.round(row), 0, peak).astype(kind), (32, 1)) for row in rows]
    if "444" not in pixels:
        planes[1:] = [plane[::2, ::2] for plane in planes[1:]]
    out = BytesIO()
    with av.open(out, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=Fraction(8), options={"qp": "1"})
        stream.height, stream.width = planes[0].shape
        stream.pix_fmt = pixels
        stream.codec_context.colorspace, stream.codec_context.color_range = matrix, 2 if full_range else 1
        for number in range(2):
            frame = av.VideoFrame(stream.width, stream.height, pixels)
            for plane, values in zip(frame.planes, planes, strict=True):
                line = np.zeros((plane.height, plane.line_size), dtype=np.uint8)
                raw = np.ascontiguousarray(values).view(np.uint8)
                line[:, : raw.shape[1]] = raw
                plane.update(line.tobytes())
            frame.colorspace, frame.color_range, frame.pts = matrix, 2 if full_range else 1, number
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return out.getvalue()


def audio(
    seconds: float = 1.0, sample_rate_hz: int = 16_000, *, form: str = "wav", channels: int = 1, hertz: float = 440.0
) -> bytes:
    """A tone; each further channel is an octave higher."""
    samples = tone(seconds, sample_rate_hz, channels=channels, hertz=hertz)
    out = BytesIO()
    layout = {1: "mono", 2: "stereo"}[channels]
    with av.open(out, "w", format=_MUXERS.get(form, form)) as container:
        stream = container.add_stream(_AUDIO[form], rate=sample_rate_hz, layout=layout)
        if not isinstance(stream, av.AudioStream):
            raise TypeError(f"{form} holds no audio")
        packed = np.ascontiguousarray((samples * 32767).astype(np.int16).T.reshape(1, -1))
        whole = av.AudioFrame.from_ndarray(packed, format="s16", layout=layout)
        whole.sample_rate, whole.pts = sample_rate_hz, 0
        fifo = av.AudioFifo()
        for part in av.AudioResampler(format=stream.format, layout=layout, rate=sample_rate_hz).resample(whole):
            fifo.write(part)
        per_packet = stream.codec_context.frame_size or len(samples[0])
        while (frame := fifo.read(per_packet, partial=True)) is not None:
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return out.getvalue()


def tone(seconds: float, sample_rate_hz: int, *, channels: int = 1, hertz: float = 440.0) -> npt.NDArray[np.float64]:
    """[channels, samples]."""
    time_s = np.arange(round(seconds * sample_rate_hz)) / sample_rate_hz
    return np.stack([0.5 * np.sin(2 * math.pi * hertz * (2**channel) * time_s) for channel in range(channels)])
