"""Prepares torch for the engines of a process."""

import torch

from triptych.engine.compute import ComputeOptions
from triptych.engine.heap import keep_freed


def prepare_torch(compute: ComputeOptions) -> None:
    """Set up torch before a model is loaded. It concerns the process as a whole: the engine that is opened last decides
    on the threads.
    """
    torch.set_num_threads(compute.torch_threads)
    device = torch.device(compute.device)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # in the engine's thread: kernels in triton are launched on the current one
    keep_freed()
    # Float32 is not rounded: by default convolutions round, and products do not.
    torch.backends.cudnn.allow_tf32 = False
    # It plans anew for each shape: 1.5 ms a call on an H200, where a call takes 0.06.
    torch.backends.cuda.enable_cudnn_sdp(False)
