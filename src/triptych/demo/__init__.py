"""The demo model: a tiny vision language model that comes with the package and reads handwritten digits.

Its card is `model/README.md`; `examples/demo_model/` trains and measures it. Nothing here imports torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

MODEL_ID: Final = "triptych-demo"
MODEL_DIR: Final = Path(__file__).parent / "model"
