"""What a soak finds: written to the directory that ``SOAK_RECORD`` names in the environment, if it does."""

import json
import os
from pathlib import Path
from typing import Any

from benchmarks.machine import describe


def keep(name: str, found: dict[str, Any]) -> None:
    """Write ``NAME.json``, with the machine."""
    directory = os.environ.get("SOAK_RECORD")  # noqa: TID251 - whoever runs the tests chooses where
    if directory:
        Path(directory).mkdir(parents=True, exist_ok=True)
        (Path(directory) / f"{name}.json").write_text(json.dumps({"machine": describe(), **found}, indent=2) + "\n")
