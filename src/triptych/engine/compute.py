"""Device and data type with which an engine computes."""

from dataclasses import dataclass
from typing import Annotated, Literal

from triptych.domain.bounds import Between, Size
from triptych.domain.limits import Count, check_limits


@dataclass(frozen=True, slots=True)
class ComputeOptions:
    """Device and data type of an engine."""

    device: str = "cpu"
    """Torch device on which this instance's part of the model runs."""
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    """Data type of the computation: float32, float16 or bfloat16. Encoders and text instances must use the same."""
    hardware: Annotated[str, Size(128)] = ""
    """Kind of hardware, by which its profiles are found; empty means the name of the device."""
    torch_threads: Annotated[int, Between(1, 256)] = 1
    """Threads of one batch of the encoder or one step of the text engine, for the whole process."""
    packed_weight_bytes: Count = 2 << 30
    """CPU, float32: memory for a second copy of weights, packed or, of small layers that are computed as one, in one
    piece. Each layer's shape is measured at start, and copied where that is fastest for some number of rows. The largest
    layers come first; 0 copies none."""

    def __post_init__(self) -> None:
        check_limits(self)
