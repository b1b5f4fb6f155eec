"""Free memory of a device."""

import torch

from triptych.engine.compute import ComputeOptions
from triptych.engine.host_memory import available_nbytes


def free_nbytes(compute: ComputeOptions) -> int | None:
    """Free memory of the device; None if unknown."""
    device = torch.device(compute.device)
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return available_nbytes() if device.type == "cpu" else None
