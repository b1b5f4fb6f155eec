"""Bodies of OpenAI requests: text of about a given number of tokens, and images that are in no cache."""

import base64
import json
import random
import struct
import zlib
from dataclasses import dataclass
from typing import Any

from triptych.workload.requests import Planned, Size

_WORDS = ("the", "of", "and", "to", "in", "is", "that", "for", "it", "as", "was", "with", "be", "by", "on", "not", "at")
"""Words of one token in nearly every tokenizer."""
_CELL_PIXELS = 16
"""Images consist of cells in random colours: all different, and about as large as photographs when compressed."""


@dataclass(frozen=True, slots=True)
class Style:
    """Options common to all requests of a run."""

    model: str
    ignore_eos: bool = False
    """Generate exactly ``output_tokens`` (an extension of vLLM's servers and Triptych's)."""
    temperature: float = 0.0


def body(planned: Planned, style: Style, rng: random.Random) -> bytes:
    """The JSON of a streamed chat request."""
    content: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(image).decode()}}
        for image in (png(size, rng) for size in planned.images)
    ]
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


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
