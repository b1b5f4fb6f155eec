"""`make demo-burst`: a burst of images, and the pools that grow and shrink with it, in about a minute.

A gateway, a router, a pool manager, an encoder and a text instance run as processes on this machine. The engines
compute nothing: they sleep as a synthetic profile says, since a machine of a few cores has no capacity to add.
Everything else is real: requests, routing, transfers, reports, decisions, starts and drains. The exit status is 0 only
if the pool grew, and the requests from half a minute after the burst began met the objective.
"""

import asyncio
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from benchmarks import ending
from benchmarks.burst import MANAGER
from benchmarks.bursts import FIRST_S, SLO_FACTOR, Outcome, Sample, Served, Shape, System, poisson_burst, replayed
from triptych.cli import show
from triptych.domain.stage import Role
from triptych.testing.delay_models import Attention

SHAPE = Shape(before_s=4.0, burst_s=36.0, after_s=32.0)
IMPATIENT = (*MANAGER, "--attainment-window-s", "15")
"""Pools shrink 15 s after the last miss instead of 60 s."""
EVERY_S = 2
WINDOW_S = 5.0


def line(sample: Sample, outcome: Outcome) -> str:
    """The pools now, and the attainment of the requests whose objective has passed."""
    at_s = sample.at_s
    workload = outcome.workload
    decided_s = at_s - outcome.slo_s
    share = outcome.attainment(decided_s - WINDOW_S, decided_s)
    due = [request for request in workload.requests if decided_s - WINDOW_S <= request.arrival_s < decided_s]
    answered = [record for record in outcome.records if decided_s - WINDOW_S <= record.planned.arrival_s < decided_s]
    if due and share is not None:
        share *= len(answered) / len(due)  # one without an answer yet has missed it already
    elif due:
        share = 0.0
    pools = []
    for name, role in (("encoders", Role.E), ("text", Role.PD)):
        ready, there = sample.ready.get(role, 0), sample.there.get(role, 0)
        pools.append(f"{name} {ready:>2} {'#' * ready + '.' * max(0, there - ready):<10}")
    rate = workload.rate(at_s - EVERY_S, at_s) if at_s >= EVERY_S else 0.0
    told = "burst" if workload.begins_s <= at_s < workload.ends_s else ""
    return f"{at_s:5.0f} s  {told:<5} {rate:5.1f}/s  {'  '.join(pools)}  in time: {'-' if share is None else f'{share:4.0%}'}"


async def main(console: Console) -> int:
    workload = poisson_burst(SHAPE, seed=1)
    with tempfile.TemporaryDirectory(prefix="triptych-burst-") as directory:
        served = Served.written(Path(directory), Attention.DECODER_ONLY)
        console.print(
            "The engines compute nothing: they sleep as a synthetic profile says (0.4 s per image, 5 s to load), and answers have no\n"
            "meaning. Requests, routing, transfers, decisions and processes are real.\n"
        )
        console.print(
            f"One encoder bears {served.encoder_per_s:.1f} images/s; the burst has {workload.burst_per_s:.0f}/s, "
            f"{workload.burst_per_s / served.encoder_per_s:.0f} times as many.\n"
            f"In time: first token within {SLO_FACTOR:g} times the isolated latency. # serves, . starts or drains.\n"
            "Starting the cluster, and measuring the isolated latency ...",
        )

        def seen(sample: Sample, outcome: Outcome) -> None:
            if round(sample.at_s) % EVERY_S == 0:
                console.print(line(sample, outcome), soft_wrap=True, highlight=False)

        outcome = await replayed(
            served, System("demo"), workload, manager_options=IMPATIENT, log_dir=Path(directory) / "logs", seen=seen
        )
    console.print(
        f"\nisolated latency {outcome.isolated_s:.2f} s, objective {outcome.slo_s:.2f} s; first tokens in time:"
    )
    for name, phase in outcome.phases.items():
        share = outcome.attainment(*phase)
        console.print(f"  {name:<18} {'-' if share is None else f'{share:.1%}'}", highlight=False)
    console.print(f"failed requests: {outcome.failed or 'none'}")
    if not outcome.kept_up:
        console.print(
            f"this machine was too slow for the load generator ({outcome.late_s:.2f} s late): the figures mean little"
        )
    console.print("python -m benchmarks.burst compares this with a fixed pool, and with one pool that does everything.")
    grew = outcome.largest(Role.E) > 1
    if not grew or (outcome.settled or 0.0) < 0.9:
        console.print(f"the pool did not follow the burst: {outcome.settled} in time from {FIRST_S:g} s on")
        return 1
    return 0


if __name__ == "__main__":
    ending.by_sigterm()
    sys.exit(asyncio.run(main(show.plain_console())))
