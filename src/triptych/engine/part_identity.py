"""What a part of a model is when it runs here: by this its profile is found (ADR 20)."""

import torch
import transformers

import triptych
from triptych.domain.profile import ProfileIdentity
from triptych.domain.stage import ModelPart, Stage
from triptych.engine.checkpoint import DTYPES, Checkpoint
from triptych.runtime.host import cpu_name


def part_identity(
    checkpoint: Checkpoint, part: ModelPart, *, dtype: str, device: str, threads: int, hardware: str = ""
) -> ProfileIdentity:
    """``hardware`` replaces the name of the device."""
    versions = {"triptych": triptych.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    stages = {Stage.ENCODE} if part is ModelPart.ENCODER else {Stage.PREFILL, Stage.DECODE}
    return ProfileIdentity(
        part=part,
        digest=checkpoint.part_digest(part),
        stages=frozenset(stages),
        hardware=hardware or _name_of(device),
        dtype=DTYPES[dtype],
        software=" ".join([part.value, *(f"{name}/{version}" for name, version in versions.items())]),
        options={"device": device.partition(":")[0], "threads": str(threads)},
    )


def _name_of(device: str) -> str:
    if device.partition(":")[0] == "cuda":
        return torch.cuda.get_device_name(device)
    return cpu_name()
