"""Bodies of OpenAI requests: text of about a given number of tokens, and items that are in no cache."""

import base64
import io
import json
import random
import struct
import wave
import zlib
from dataclasses import dataclass
from typing import Any

from triptych.workload.requests import Clip, Planned, Size, WorkloadError

_WORDS = ("the", "of", "and", "to", "in", "is", "that", "for", "it", "as", "was", "with", "be", "by", "on", "not", "at")
"""Words of one token in nearly every tokenizer."""
_SAMPLES_PER_S = 16_000
_CELL_PIXELS = 16
"""Images and frames consist of cells in random colours: all different, and about as large as photographs when compressed."""


@dataclass(frozen=True, slots=True)
class Style:
    """Options common to all requests of a run."""

    model: str
    ignore_eos: bool = False
    """Generate exactly ``output_tokens`` (an extension of vLLM's servers and Triptych's)."""
    temperature: float = 0.0
    only_token: int | None = None
    """The token that answers consist of, by ``logit_bias``. Others may have no text, and a client does not see when these come."""


def body(planned: Planned, style: Style, rng: random.Random) -> bytes:
    """The JSON of a streamed chat request."""
    content = [_item("image_url", "image/png", png(size, rng)) for size in planned.images]
    content += [_item("video_url", "video/mp4", mp4(clip, rng)) for clip in planned.videos]
    content += [_item("audio_url", "audio/wav", wav(seconds, rng)) for seconds in planned.sounds_s]
    content.append({"type": "text", "text": " ".join(rng.choices(_WORDS, k=max(1, planned.text_tokens)))})
    document = {
        "model": style.model,
        "messages": [{"role": "user", "content": content}],
        "max_completion_tokens": planned.output_tokens,
        "temperature": style.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if style.ignore_eos:
        document["ignore_eos"] = True
    if style.only_token is not None:
        document["logit_bias"] = {str(style.only_token): 100}
    return json.dumps(document).encode()


def png(size: Size, rng: random.Random) -> bytes:
    """An RGB image of cells in random colours."""
    across = -(-size.width // _CELL_PIXELS)
    rows = bytearray()
    for top in range(0, size.height, _CELL_PIXELS):
        colours = rng.randbytes(3 * across)
        row = b"".join(colours[3 * cell : 3 * cell + 3] * _CELL_PIXELS for cell in range(across))
        rows += (b"\0" + row[: 3 * size.width]) * min(_CELL_PIXELS, size.height - top)
    header = struct.pack(">IIBBBBB", size.width, size.height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(bytes(rows), 1)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)


def mp4(clip: Clip, rng: random.Random) -> bytes:
    """A video of cells in random colours that move. Raises WorkloadError without PyAV."""
    try:
        import av
    except ImportError:
        raise WorkloadError("videos need PyAV: install Triptych's extra 'encoder'") from None
    out, size = io.BytesIO(), clip.size
    width, height = size.width + size.width % 2, size.height + size.height % 2  # H.264 halves them
    across, down = -(-width // _CELL_PIXELS), -(-height // _CELL_PIXELS)
    frames = max(1, round(clip.seconds * clip.frames_per_s))
    cells = [rng.randbytes(3 * (across + frames)) for _ in range(down)]
    with av.open(out, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=clip.frames_per_s, options={"preset": "ultrafast", "qp": "30"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for number in range(frames):
            frame = av.VideoFrame(width, height, "rgb24")
            plane = frame.planes[0]
            rows = bytearray()
            for top, colours in enumerate(cells):
                row = b"".join(
                    colours[3 * cell : 3 * cell + 3] * _CELL_PIXELS for cell in range(number, number + across)
                )
                padded = row[: 3 * width].ljust(plane.line_size, b"\0")
                rows += padded * min(_CELL_PIXELS, height - top * _CELL_PIXELS)
            plane.update(bytes(rows))
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return out.getvalue()


def wav(seconds: float, rng: random.Random) -> bytes:
    """Noise, mono, 16 bits at 16 kHz."""
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(_SAMPLES_PER_S)
        file.writeframes(rng.randbytes(2 * max(1, round(seconds * _SAMPLES_PER_S))))
    return out.getvalue()


def _item(part: str, media_type: str, data: bytes) -> dict[str, Any]:
    return {"type": part, part: {"url": f"data:{media_type};base64,{base64.b64encode(data).decode()}"}}


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
