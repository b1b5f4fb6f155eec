"""The option ``--json FILE`` of every benchmark: where its figures go, beside what it prints."""

import json
from argparse import ArgumentParser
from collections.abc import Mapping
from pathlib import Path


def add_json_option(parser: ArgumentParser) -> None:
    """Add ``--json FILE``, whose value, a path or None, is for ``write_figures``."""
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the figures, settings and machine to this file"
    )


def write_figures(path: Path | None, figures: Mapping[str, object]) -> None:
    """Write ``figures`` to ``path``, whose directory is made where it is missing; nothing where no path was given."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(figures, indent=1) + "\n")
