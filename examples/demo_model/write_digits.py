"""Write a few held-out digits as PNG files to ask the demo model about.

    python examples/demo_model/write_digits.py [--out DIR]

The first three held-out digits of each kind are written as `3_a.png`, `3_b.png`, `3_c.png`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from examples.demo_model import data

SIZE_PX = 112
LETTERS = "abc"


def chosen() -> dict[str, int]:
    """File names and the index of the digit that each shows."""
    digits = data.load()
    of_kind = {kind: [index for index in digits.heldout if digits.labels[index] == kind] for kind in range(10)}
    return {
        f"{kind}_{letter}.png": index
        for kind, indices in of_kind.items()
        for letter, index in zip(LETTERS, indices, strict=False)
    }


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description="Write held-out digits as PNG files.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "digits")
    out: Path = parser.parse_args().out
    for name, index in chosen().items():
        data.render(data.load().pixels[index], SIZE_PX).save(out / name)


if __name__ == "__main__":
    main()
