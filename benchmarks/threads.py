"""Threads of text engines against cores: tokens and prompts per second of one or two processes, by how idle threads wait.

Torch computes with GNU OpenMP, whose idle threads spin for some milliseconds before they sleep (``active``, its default), or sleep at once
(``passive``). Where processes have more threads than there are cores, those that spin take cores from those that compute. All processes
of a row compute the same cases at the same time; figures are sums over processes. Rows take turns.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import ending, machine
from benchmarks.engine import SHAPES, Worker, cases, make, warm_up
from benchmarks.figures import add_json_option, write_figures

KINDS = ("1 at a time", "8 at a time", "32 at a time", "1,000 tokens")


@dataclass(frozen=True, slots=True)
class Row:
    processes: int
    threads: int
    wait: str

    @property
    def name(self) -> str:
        return f"{self.processes} x {self.threads} threads, {self.wait}"


ROWS = (
    Row(1, 1, "active"),
    Row(1, 2, "active"),
    Row(1, 2, "passive"),
    Row(2, 1, "active"),
    Row(2, 2, "active"),
    Row(2, 2, "passive"),
)


@contextmanager
def processes(row: Row, directory: Path) -> Iterator[list[Worker]]:
    variables = {"OMP_WAIT_POLICY": "PASSIVE"} if row.wait == "passive" else {}
    with ExitStack() as stack:
        made = []
        for _ in range(row.processes):
            made.append(Worker("ours", sys.executable, directory, row.threads, variables))
            stack.callback(made[-1].close)
        yield made


def measured(row: Row, workers: list[Worker], wanted: list[dict[str, Any]], pool: ThreadPoolExecutor) -> list[float]:
    """Tokens, and prompts of 1,000 tokens, per second."""
    rates = []
    for case in wanted:
        answers = list(pool.map(lambda worker, case=case: worker.ask(case), workers))
        rates.append(
            sum(answer["tokens_per_s"] if "tokens_per_s" in answer else 1 / answer["ttft_s"] for answer in answers)
        )
    print(f"  {row.name}: {[round(rate, 2) for rate in rates]}", file=sys.stderr, flush=True)
    return rates


def main() -> None:
    ending.by_sigterm()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json_option(parser)
    parser.add_argument("--model", default="qwen2.5-50m", choices=["demo", *SHAPES])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="the demo model, two rows, one round: shows that it works")
    options = parser.parse_args()
    model, rounds, scale = ("demo", 1, 0.1) if options.quick else (options.model, options.rounds, 0.3)
    rows = (ROWS[0], ROWS[-1]) if options.quick else ROWS
    on = machine.describe()
    print("; ".join(f"{key} {value}" for key, value in on.items()))
    taken: dict[Row, list[list[float]]] = {row: [] for row in rows}
    with tempfile.TemporaryDirectory(prefix="threads-benchmark") as made, ThreadPoolExecutor(2) as pool:
        directory = Path(made)
        vocabulary = make(model, directory)
        for number in range(1, rounds + 1):
            wanted = list(cases(vocabulary, number, scale=scale))[: len(KINDS)]
            for row in rows[:: 1 if number % 2 else -1]:
                with processes(row, directory) as workers:
                    measured(row, workers, list(warm_up(vocabulary)), pool)
                    taken[row].append(measured(row, workers, wanted, pool))
    figures = []
    print(
        f"{model}: per second, and over one process with one thread\n{'':>28}"
        + "".join(f"{kind:>22}" for kind in KINDS)
    )
    base = [statistics.median(by_round) for by_round in zip(*taken[ROWS[0]], strict=True)]
    for row, rates in taken.items():
        medians = [statistics.median(by_round) for by_round in zip(*rates, strict=True)]
        print(f"{row.name:>28}" + "".join(f"{m:>14.2f} ({m / b:>4.2f}x)" for m, b in zip(medians, base, strict=True)))
        figures.append(asdict(row) | {"rates": dict(zip(KINDS, medians, strict=True)), "rounds": rates})
    write_figures(options.json, {"machine": on, "settings": {"model": model, "rounds": rounds}, "rows": figures})


if __name__ == "__main__":
    main()
