"""Runs of simulations, side by side in processes of their own, and what is kept of them when they are interrupted."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress

from triptych.cli.outcome import CliError
from triptych.runtime.cores import usable_cores
from triptych.runtime.parent import end_with_parent
from triptych.runtime.process import CannotStart
from triptych.sim.fidelity import Fidelity
from triptych.sim.machines.run import simulate as simulate_machines
from triptych.sim.outcome import Outcome
from triptych.sim.queues.run import simulate as simulate_queues
from triptych.sim.run import Simulate, simulate
from triptych.virtual.virtual_time import VirtualTimeError
from triptych.workload.requests import Plan

if TYPE_CHECKING:
    from triptych.cli.simulate.command import Simulation

SIMULATORS: Mapping[Fidelity, Simulate] = {
    "services": simulate,
    "machines": simulate_machines,
    "queues": simulate_queues,
}


@dataclass(frozen=True, slots=True)
class Case:
    """One run of a simulation."""

    simulation: "Simulation"
    rate: float | None
    """Rate that was asked for; None for a trace's own."""
    plan: Plan
    seed: int
    keeps_spans: bool = False


@dataclass(frozen=True, slots=True)
class Ran:
    """A run that has ended. Its outcome has the requests after the warm-up alone."""

    case: Case
    outcome: Outcome


Then = Callable[[Ran], Case | None]
"""The choice of what is to run after a run that has ended."""


def run_all(cases: Sequence[Case], console: Console, then: Then = lambda _: None) -> tuple[list[Ran], bool]:
    """Run the cases, and those that follow from them; return those that have ended by rate and seed, and whether all have.

    After Ctrl-C it returns what there is: a run alone is there with the requests that have ended. Raises CliError.
    """
    ran: list[Ran] = []
    try:
        with (
            Progress(console=console, transient=True, disable=not console.is_terminal) as bar,
            closing(_running(cases, bar, then)) as running,
        ):
            for case, outcome in running:
                if outcome.interrupted and ran:
                    break  # one of a search, of which only whole runs count
                counted = _counted(outcome, case.simulation.warm_up_s)
                if counted.records:
                    ran.append(Ran(case, counted))
                if outcome.interrupted:
                    of = len(case.plan.requests)
                    console.print(f"interrupted: {len(outcome.records)} of {of} requests had ended")
                    return ran, False
            else:
                return _in_order(ran), True
    except KeyboardInterrupt:
        pass
    console.print(f"interrupted: {len(ran)} runs had ended")
    return _in_order(ran), False


def _in_order(ran: Sequence[Ran]) -> list[Ran]:
    """Sort runs, which end in any order."""
    return sorted(ran, key=lambda run: (run.outcome.rate, run.case.seed))


def _running(cases: Sequence[Case], bar: Progress, then: Then) -> Generator[tuple[Case, Outcome]]:
    task = bar.add_task("requests", total=sum(len(case.plan.requests) for case in cases))

    def following(case: Case, outcome: Outcome) -> Case | None:
        """The next case; its requests are to be done as well."""
        if outcome.interrupted or (follows := then(Ran(case, _counted(outcome, case.simulation.warm_up_s)))) is None:
            return None
        bar.update(task, total=(bar.tasks[0].total or 0) + len(follows.plan.requests))
        return follows

    if len(cases) == 1:
        case: Case | None = cases[0]
        while case is not None:
            outcome = _simulated(case, lambda: bar.advance(task))
            yield case, outcome
            case = following(case, outcome)
        return
    before = set(multiprocessing.active_children())
    workers = min(len(cases), len(usable_cores()))
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _begin_worker, (os.getpid(),)) as pool:
        running = {pool.submit(_simulated, case): case for case in cases}
        try:
            while running:
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    case, outcome = running.pop(future), future.result()
                    bar.advance(task, len(case.plan.requests))
                    if (follows := following(case, outcome)) is not None:
                        running[pool.submit(_simulated, follows)] = follows
                    yield case, outcome
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in set(multiprocessing.active_children()) - before:
                worker.terminate()  # it would finish its run first
            raise


def _begin_worker(parent_pid: int) -> None:
    """Leave Ctrl-C, which goes to the whole group, to the parent; and do not outlive it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if not end_with_parent(parent_pid):
        raise SystemExit


def _simulated(case: Case, advance: Callable[[], None] | None = None) -> Outcome:
    """One run, in its own process or in this one. Raises CliError for a cluster that does not get ready."""
    simulation = case.simulation
    try:
        outcome = SIMULATORS[simulation.fidelity](
            simulation.simulated.deployment,
            case.plan,
            seed=case.seed,
            timeout_s=simulation.timeout_s,
            keeps_spans=case.keeps_spans,
            note=(lambda _: None) if advance is None else (lambda _: advance()),
        )
    except (CannotStart, TimeoutError, VirtualTimeError, OSError) as error:
        raise CliError(
            f"the cluster cannot be simulated: {str(error) or 'it does not get ready in time'}", caller=True
        ) from None
    return replace(outcome, rate=case.plan.rate if case.rate is None else case.rate)


def _counted(outcome: Outcome, warm_up_s: float) -> Outcome:
    """Only the requests after the warm-up, whose end is the beginning then."""
    numbers = [at for at, record in enumerate(outcome.records) if record.planned.arrival_s >= warm_up_s]
    records = [outcome.records[at] for at in numbers]
    return replace(
        outcome,
        records=[
            replace(record, planned=replace(record.planned, arrival_s=record.planned.arrival_s - warm_up_s))
            for record in records
        ],
        timelines=[outcome.timelines[at] for at in numbers],
    )
