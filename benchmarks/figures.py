"""The option ``--json FILE`` of every benchmark: where its figures go, beside what it prints; and how ratios are printed."""

import json
import statistics
from argparse import ArgumentParser
from collections.abc import Iterable, Mapping
from pathlib import Path

Quartiles = tuple[float, float, float]
"""The median, the first quartile and the third."""


def add_json_option(parser: ArgumentParser) -> None:
    """Add ``--json FILE``, whose value, a path or None, is for ``write_figures``."""
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the figures, settings and machine to this file"
    )


def add_before_options(parser: ArgumentParser, rounds: int) -> None:
    """Add ``--rounds N``, by default ``rounds``, and ``--before DIR``, of benchmarks that compare two working trees in one run."""
    parser.add_argument("--rounds", type=int, default=rounds, help="rounds of each working tree")
    parser.add_argument("--before", type=Path, help="root of another working tree, to compare with")


def write_figures(path: Path | None, figures: Mapping[str, object]) -> None:
    """Write ``figures`` to ``path``, whose directory is made where it is missing; nothing where no path was given."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(figures, indent=1) + "\n")


def quartiles(ratios: Iterable[float]) -> Quartiles | None:
    """None without ratios."""
    found = sorted(ratios)
    return (statistics.median(found), found[len(found) // 4], found[(3 * len(found)) // 4]) if found else None


def shown(ratio: Quartiles | None) -> str:
    """As it follows a figure."""
    return "" if ratio is None else f" ({ratio[0]:4.2f}x; {ratio[1]:4.2f} to {ratio[2]:4.2f})"
