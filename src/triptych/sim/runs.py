"""Runs of simulations, side by side in processes of their own."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import TypeVar

from triptych.runtime.cores import usable_cores
from triptych.runtime.parent import end_with_parent
from triptych.runtime.process import CannotStart
from triptych.virtual.virtual_time import VirtualTimeError
from triptych.workload.fidelity import Fidelity
from triptych.workload.requests import Plan

from .machines.run import simulate as simulate_machines
from .outcome import Outcome
from .queues.run import simulate as simulate_queues
from .run import Note, Simulate, simulate
from .scenario import Deployment

T = TypeVar("T")

SIMULATORS: Mapping[Fidelity, Simulate] = {
    "services": simulate,
    "machines": simulate_machines,
    "queues": simulate_queues,
}


class CannotSimulate(ValueError):
    """A cluster that does not get ready. The message says why."""


@dataclass(frozen=True, slots=True)
class Job:
    """One run: a deployment that serves the requests of a plan."""

    deployment: Deployment
    plan: Plan
    fidelity: Fidelity
    seed: int
    rate: float | None = None
    """Rate that was asked for; None for the plan's own."""
    timeout_s: float = 300.0
    keeps_spans: bool = False

    def run(self, note: Note = lambda _: None) -> Outcome:
        """Raises CannotSimulate, and NotSimulated for what the fidelity does not have."""
        try:
            outcome = SIMULATORS[self.fidelity](
                self.deployment,
                self.plan,
                seed=self.seed,
                timeout_s=self.timeout_s,
                keeps_spans=self.keeps_spans,
                note=note,
            )
        except (CannotStart, TimeoutError, VirtualTimeError, OSError) as error:
            raise CannotSimulate(
                f"the cluster cannot be simulated: {str(error) or 'it does not get ready in time'}"
            ) from None
        return replace(outcome, rate=self.plan.rate if self.rate is None else self.rate)


def counted(outcome: Outcome, warm_up_s: float) -> Outcome:
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


def side_by_side(
    tasks: Sequence[tuple[T, Job]], following: Callable[[T, Outcome], Sequence[tuple[T, Job]]]
) -> Generator[tuple[T, Outcome]]:
    """Run the jobs of tasks, and those of the tasks that follow from an outcome, in as many processes as there are cores.

    Outcomes come in any order. A caller that closes it ends what runs. Raises CannotSimulate.
    """
    before = set(multiprocessing.active_children())
    with ProcessPoolExecutor(
        len(usable_cores()), multiprocessing.get_context("spawn"), _begin_worker, (os.getpid(),)
    ) as pool:
        running = {pool.submit(Job.run, job): task for task, job in tasks}
        try:
            while running:
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    task, outcome = running.pop(future), future.result()
                    running |= {pool.submit(Job.run, job): other for other, job in following(task, outcome)}
                    yield task, outcome
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
