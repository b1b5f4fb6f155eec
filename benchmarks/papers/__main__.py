"""Tables of the papers that need only formulas, each row beside ours: ``python -m benchmarks.papers``."""

import sys

from rich.console import Console

from benchmarks.papers import epd_serve, heteroserve, hydrainfer, modserve
from benchmarks.papers.rows import show

PAPERS = (epd_serve, heteroserve, hydrainfer, modserve)


def main() -> int:
    """1 if a row differs without a reason."""
    console = Console(width=180)
    shown = [show(paper.TITLE, paper.rows(), console) for paper in PAPERS]
    return 0 if all(shown) else 1


if __name__ == "__main__":
    sys.exit(main())
