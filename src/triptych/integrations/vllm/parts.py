"""Content parts that a client sends to a vLLM that runs by itself in place of a resolved image (docs/vllm.md). Needs
torch, not vLLM.
"""

import base64
from io import BytesIO
from typing import Any

import torch

from triptych.domain.embedding import EMBEDS
from triptych.domain.resolving import ResolvedItem
from triptych.engine.tensors import TORCH_DTYPES
from triptych.errors import InvalidRequest


def image_part(item: ResolvedItem) -> dict[str, Any]:
    """A part of a message for vLLM's OpenAI API: the name of the embedding, and what vLLM needs to make room for it.

    For families with a grid, its numbers; for others a tensor of the embedding's shape without content, 2 KB of base64. Raises
    InvalidRequest for embeddings that vLLM does not take.
    """
    return {"type": "image_embeds", "image_embeds": _room(item), "uuid": item.uuid}


def _room(item: ResolvedItem) -> dict[str, list[int]] | str:
    if item.grid:
        return {"image_grid_thw": list(item.grid)}
    spec = next((spec for spec in item.ticket.tensors if spec.name == EMBEDS), None)
    if spec is None or len(spec.shape) != 2:
        raise InvalidRequest("vLLM takes no embeddings of this form")
    out = BytesIO()
    torch.save(torch.zeros((1, 1), dtype=TORCH_DTYPES[spec.dtype]).expand(spec.shape), out)  # one element is stored
    return base64.b64encode(out.getvalue()).decode()
