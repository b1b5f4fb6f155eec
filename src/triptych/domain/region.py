"""A range of memory."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Region:
    """Memory for registration with hardware. ``device`` is a CUDA device index, None for host memory."""

    address: int
    nbytes: int
    device: int | None = None
