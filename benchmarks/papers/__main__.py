"""Tables of the papers, each row beside ours: from formulas, and by simulation: ``python -m benchmarks.papers``."""

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor

from rich.console import Console

from benchmarks import ending
from benchmarks.figures import add_json_option, write_figures
from benchmarks.papers import epd_serve, heteroserve, hydrainfer, modserve, vllm_blog
from benchmarks.papers.rows import TOLERANCE, Row, show

PAPERS = (epd_serve, modserve, hydrainfer, heteroserve, vllm_blog)


def _made(table: Callable[[], Iterable[Row]]) -> list[Row]:
    return list(table())


def main(arguments: Sequence[str] | None = None) -> int:
    """1 if a row differs without a reason."""
    ending.by_sigterm()
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    add_json_option(parser)
    parser.add_argument("--formulas", action="store_true", help="only the rows that need no simulation")
    options = parser.parse_args(arguments)
    console = Console(width=200)
    written, explained, agree = list[dict[str, object]](), True, 0
    tables = {paper: () if options.formulas else paper.simulated() for paper in PAPERS}
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        running = {paper: [pool.submit(_made, table) for table in own] for paper, own in tables.items()}
        simulated = {paper: [row for table in own for row in table.result()] for paper, own in running.items()}
    for paper in PAPERS:
        rows = [*paper.rows(), *simulated[paper]]
        show(paper.TITLE, rows, console)
        explained &= all(row.agrees or row.differs for row in rows)
        agree += sum(row.agrees for row in rows)
        written += [row.document(paper.TITLE) for row in rows]
    console.print(f"{agree} of {len(written)} rows within {TOLERANCE:.0%}, in {sum(os.times()[:4]):.0f} s of CPU")
    write_figures(options.json, {"rows": written})
    return 0 if explained else 1


if __name__ == "__main__":
    sys.exit(main())
