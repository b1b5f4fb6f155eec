"""Conversion between torch tensors and the bytes that are transferred."""

from collections.abc import Mapping

import torch

from triptych.domain.embedding import DType, Tensor, TensorSpec

TORCH_DTYPES: Mapping[DType, torch.dtype] = {
    DType.F32: torch.float32,
    DType.F16: torch.float16,
    DType.BF16: torch.bfloat16,
    DType.I64: torch.int64,
    DType.I32: torch.int32,
    DType.U8: torch.uint8,
    DType.BOOL: torch.bool,
}

_DOMAIN_DTYPES = {value: key for key, value in TORCH_DTYPES.items()}


def domain_dtype(dtype: torch.dtype) -> DType:
    return _DOMAIN_DTYPES[dtype]


def to_bytes(spec: TensorSpec, tensor: torch.Tensor) -> Tensor:
    """A read-only view of a tensor's bytes; copied only from another device or a strided layout."""
    if tuple(tensor.shape) != spec.shape or tensor.dtype != TORCH_DTYPES[spec.dtype]:
        raise ValueError(f"tensor {spec.name!r} is {tensor.dtype} {tuple(tensor.shape)}, not as declared")
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return Tensor(spec, flat.numpy().data.toreadonly())


def from_bytes(tensor: Tensor, device: torch.device) -> torch.Tensor:
    """A copy of the bytes as a tensor on ``device``."""
    spec = tensor.spec
    if spec.nbytes == 0:
        return torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype], device=device)
    owned = bytearray(tensor.data)  # torch takes no read-only memory, and the caller may reuse its buffer
    return torch.frombuffer(owned, dtype=TORCH_DTYPES[spec.dtype]).view(spec.shape).to(device)


def argmax(rows: torch.Tensor) -> list[int]:
    """Argmax of each row of [n, m]; the first of equal values."""
    # numpy is vectorized; torch's argmax takes a tenth of a step of 32 sequences on a CPU.
    found: list[int] = (rows.numpy() if rows.device.type == "cpu" else rows).argmax(-1).tolist()
    return found


def is_finite(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())
