"""Check that a model fits into the memory of a device."""

import torch

from triptych.engine.checkpoint import DTYPES, Checkpoint
from triptych.engine.compute import ComputeOptions
from triptych.engine.host_memory import available_nbytes
from triptych.engine.tensors import TORCH_DTYPES

_FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Bytes of a value, as safetensors name the types."""


def weights_nbytes(checkpoint: Checkpoint, compute: ComputeOptions) -> int:
    """Bytes of all weights in the data type of the computation, by the headers of the files."""
    itemsize = TORCH_DTYPES[DTYPES[compute.dtype]].itemsize
    return sum(
        tensor.nbytes // _FLOATS[tensor.dtype] * itemsize if tensor.dtype in _FLOATS else tensor.nbytes
        for tensor in checkpoint.stored_tensors()
    )


def free_nbytes(compute: ComputeOptions) -> int | None:
    """Free memory of the device; None if unknown."""
    device = torch.device(compute.device)
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return available_nbytes() if device.type == "cpu" else None
