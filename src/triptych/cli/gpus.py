"""GPUs of this machine. torch is asked in a process of its own, and only where the system has one: its import takes seconds."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ROOT = Path("/")
_NVIDIA, _AMD = ("dev/nvidia[0-9]*", "dev/dxg"), ("dev/kfd",)
"""Files of the system's drivers; dxg is that of WSL."""
_ASK = """
import json, torch
count = torch.cuda.device_count() if torch.cuda.is_available() else 0
found = [torch.cuda.get_device_properties(index) for index in range(count)]
print(json.dumps({
    "torch": torch.__version__,
    "builds": torch.version.cuda is not None or torch.version.hip is not None,
    "gpus": [[gpu.name, gpu.total_memory] for gpu in found],
}))
"""
_ASK_S = 120.0


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU that torch can use."""

    device: str
    """Its name in CUDA_VISIBLE_DEVICES, of NVIDIA and AMD."""
    name: str
    memory_nbytes: int


@dataclass(frozen=True, slots=True)
class FoundGpus:
    """GPUs that torch can use."""

    gpus: tuple[Gpu, ...] = ()
    fault: str = ""
    """Why torch uses none although the system has one, and what to do; else empty."""


def find_gpus(root: Path = _ROOT) -> FoundGpus:
    """Look for drivers' files below ``root``, and ask torch if there are some."""
    amd = _has(root, _AMD)
    if not amd and not _has(root, _NVIDIA):
        return FoundGpus()
    try:
        done = subprocess.run(  # noqa: S603 - this interpreter
            [sys.executable, "-c", _ASK], capture_output=True, text=True, timeout=_ASK_S, check=False
        )
        answer = json.loads(done.stdout.splitlines()[-1])
    except (subprocess.TimeoutExpired, OSError):
        return FoundGpus(fault=f"there is a GPU, but torch does not answer within {_ASK_S:g} s")
    except (ValueError, IndexError):
        reason = (done.stderr.splitlines() or ["no answer"])[-1]
        return FoundGpus(fault=f"there is a GPU, but torch cannot be asked: {reason}")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")  # noqa: TID251 - the drivers' own, which children get
    return read_answer(answer, visible, amd=amd)


def read_answer(answer: Mapping[str, Any], visible: str | None, *, amd: bool) -> FoundGpus:
    """What torch's answer means. ``visible``: CUDA_VISIBLE_DEVICES of this process."""
    release = answer["torch"].partition("+")[0]
    names = visible.split(",") if visible else list(map(str, range(len(answer["gpus"]))))
    gpus = tuple(
        Gpu(device.strip(), name, nbytes) for device, (name, nbytes) in zip(names, answer["gpus"], strict=False)
    )
    if gpus or visible in ("", "-1"):
        return FoundGpus(gpus)
    if answer["builds"]:
        tool = "rocminfo" if amd else "nvidia-smi"
        return FoundGpus(fault=f"there is a GPU, but torch {answer['torch']} cannot use it: {tool} says more")
    wanted = f"pip install --force-reinstall torch=={release}"
    if amd:
        wanted += " --index-url https://download.pytorch.org/whl/rocmVERSION (with that of ROCm here)"
    kind = "ROCm" if amd else "CUDA"
    return FoundGpus(fault=f"there is a GPU, but torch {answer['torch']} is a build without {kind}: {wanted}")


def _has(root: Path, patterns: tuple[str, ...]) -> bool:
    return any(True for pattern in patterns for _ in root.glob(pattern))
