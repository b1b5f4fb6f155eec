"""Identity of a model's part on this machine, by which its profile is found (ADR 20)."""

import torch
import transformers

import triptych
from triptych.domain.profile import ProfileIdentity
from triptych.domain.stage import ModelPart, Stage
from triptych.engine.checkpoint import DTYPES, Checkpoint
from triptych.engine.compute import ComputeOptions
from triptych.runtime.host import cpu_name


def part_identity(checkpoint: Checkpoint, part: ModelPart, compute: ComputeOptions) -> ProfileIdentity:
    versions = {"triptych": triptych.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    stages = {Stage.ENCODE} if part is ModelPart.ENCODER else {Stage.PREFILL, Stage.DECODE}
    return ProfileIdentity(
        part=part,
        digest=checkpoint.part_digest(part),
        stages=frozenset(stages),
        hardware=compute.hardware or _name_of(compute.device),
        dtype=DTYPES[compute.dtype],
        software=" ".join([part.value, *(f"{name}/{version}" for name, version in versions.items())]),
        options={"device": compute.device.partition(":")[0], "threads": str(compute.torch_threads)},
    )


def _name_of(device: str) -> str:
    if device.partition(":")[0] == "cuda":
        return torch.cuda.get_device_name(device)
    return cpu_name()
