"""Requests as an OpenAI endpoint takes them: text of about so many tokens, and images that no cache has seen."""

import base64
import json
import random
import struct
import zlib
from dataclasses import dataclass
from typing import Any

from triptych.cli.bench.workload import Planned, Size

_WORDS = ("the", "of", "and", "to", "in", "is", "that", "for", "it", "as", "was", "with", "be", "by", "on", "not", "at")
"""Each is one token to nearly every tokenizer, so that words count tokens."""
_CELL_PIXELS = 16
"""Images are of coloured cells: each is another one, and they are as small to send as photographs."""


@dataclass(frozen=True, slots=True)
class Style:
    """What all requests of a run have in common."""

    model: str
    ignore_eos: bool = False
    """Ask for exactly ``output_tokens`` (an extension that vLLM's servers and Triptych's know)."""
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
