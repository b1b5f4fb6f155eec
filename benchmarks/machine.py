"""Describes the machine of a benchmark, for its results."""

import os
import platform
from importlib.metadata import version
from pathlib import Path


def describe() -> dict[str, str]:
    """Processor, cores, memory, GPUs of NVIDIA, and versions that affect speed."""
    cpu = next(
        (line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.processor() or "unknown",
    )
    memory = next((line.split()[1] for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), "0")
    informed = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    models = [line.split(":", 1)[1].strip() for path in informed for line in _lines(path) if line.startswith("Model:")]
    return {
        "cpu": cpu,
        "cores": str(os.cpu_count()),
        "memory_gib": f"{int(memory) / 2**20:.0f}",
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "grpcio": version("grpcio"),
        **({"gpus": ", ".join(models)} if models else {}),
    }


def _lines(path: str | Path) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
