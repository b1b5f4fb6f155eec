"""Runs of simulations, with their progress, and what is kept of them when they are interrupted."""

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress

from triptych.cli.outcome import CliError
from triptych.sim.outcome import Outcome
from triptych.sim.runs import CannotSimulate, Job, counted, side_by_side
from triptych.workload.requests import Plan

if TYPE_CHECKING:
    from triptych.cli.simulate.command import Simulation


@dataclass(frozen=True, slots=True)
class Case:
    """One run of a simulation."""

    simulation: "Simulation"
    rate: float | None
    """Rate that was asked for; None for a trace's own."""
    plan: Plan
    seed: int
    keeps_spans: bool = False

    @property
    def job(self) -> Job:
        simulation = self.simulation
        deployment, fidelity = simulation.simulated.deployment, simulation.fidelity
        return Job(deployment, self.plan, fidelity, self.seed, self.rate, simulation.timeout_s, self.keeps_spans)


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
                after_warm_up = counted(outcome, case.simulation.warm_up_s)
                if after_warm_up.records:
                    ran.append(Ran(case, after_warm_up))
                if outcome.interrupted:
                    of = len(case.plan.requests)
                    console.print(f"interrupted: {len(outcome.records)} of {of} requests had ended")
                    return ran, False
            else:
                return _in_order(ran), True
    except KeyboardInterrupt:
        pass
    except CannotSimulate as error:
        raise CliError(str(error), caller=True) from None
    console.print(f"interrupted: {len(ran)} runs had ended")
    return _in_order(ran), False


def _in_order(ran: Sequence[Ran]) -> list[Ran]:
    """Sort runs, which end in any order."""
    return sorted(ran, key=lambda run: (run.outcome.rate, run.case.seed))


def _running(cases: Sequence[Case], bar: Progress, then: Then) -> Generator[tuple[Case, Outcome]]:
    """A case alone runs in this process, several side by side."""
    task = bar.add_task("requests", total=sum(len(case.plan.requests) for case in cases))

    def following(case: Case, outcome: Outcome) -> Case | None:
        """The next case; its requests are to be done as well."""
        if outcome.interrupted or (follows := then(Ran(case, counted(outcome, case.simulation.warm_up_s)))) is None:
            return None
        bar.update(task, total=(bar.tasks[0].total or 0) + len(follows.plan.requests))
        return follows

    if len(cases) == 1:
        case: Case | None = cases[0]
        while case is not None:
            outcome = case.job.run(lambda _: bar.advance(task))
            yield case, outcome
            case = following(case, outcome)
        return

    def jobs_after(case: Case, outcome: Outcome) -> Sequence[tuple[Case, Job]]:
        bar.advance(task, len(case.plan.requests))
        follows = following(case, outcome)
        return () if follows is None else ((follows, follows.job),)

    with closing(side_by_side([(case, case.job) for case in cases], jobs_after)) as ending:
        yield from ending
