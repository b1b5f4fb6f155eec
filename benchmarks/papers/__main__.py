"""Tables of the papers, each row beside ours: from formulas, and by simulation: ``python -m benchmarks.papers``."""

import argparse
import sys
import time
from collections.abc import Sequence

from rich.console import Console

from benchmarks import ending
from benchmarks.figures import add_json_option, write_figures
from benchmarks.papers import epd_serve, heteroserve, hydrainfer, modserve, vllm_blog
from benchmarks.papers.rows import TOLERANCE, Row, show

PAPERS = (epd_serve, modserve, hydrainfer, heteroserve, vllm_blog)


def main(arguments: Sequence[str] | None = None) -> int:
    """1 if a row differs without a reason."""
    ending.by_sigterm()
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    add_json_option(parser)
    parser.add_argument("--formulas", action="store_true", help="only the rows that need no simulation")
    options = parser.parse_args(arguments)
    console = Console(width=200)
    began_s = time.process_time()
    written, explained = list[dict[str, object]](), True
    for paper in PAPERS:
        rows: list[Row] = list(paper.rows())
        if not options.formulas:
            rows += paper.simulated()
        show(paper.TITLE, rows, console)
        explained &= all(row.agrees or row.differs for row in rows)
        written += [row.document(paper.TITLE) for row in rows]
    agree = sum(row["remark"] == "" for row in written)
    console.print(
        f"{agree} of {len(written)} rows within {TOLERANCE:.0%}, in {time.process_time() - began_s:.0f} s of CPU"
    )
    write_figures(options.json, {"rows": written})
    return 0 if explained else 1


if __name__ == "__main__":
    sys.exit(main())
