"""Answers a pool manager that follows a plan: whether another placement is better for the mix of requests that it sees."""

import os
import sys
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from triptych.cli.outcome import CliError
from triptych.cli.plan.apply import candidate_of, read_plan
from triptych.cli.plan.factory import ModelFactory
from triptych.cli.plan.reading import hardware_of, load_of, settings_of
from triptych.domain.replanning import PlanQuestion, Proposal
from triptych.planning.again import Conditions, Search
from triptych.policy.roofline import DoesNotFit
from triptych.runtime.plans import PlanRecord
from triptych.sim.limits import NotSimulated
from triptych.sim.runs import CannotSimulate

_MOST_NBYTES = 1 << 20
_LOWEST = 19
"""The niceness of a search, so that it takes no time from those who serve."""


def answer(path: Path) -> None:
    """Read the question from standard input, and print the answer, both as JSON. Raises CliError, WorkloadError."""
    os.nice(_LOWEST)
    plan = read_plan(path)
    try:
        question = TypeAdapter(PlanQuestion).validate_json(sys.stdin.buffer.read(_MOST_NBYTES))
    except ValidationError as error:
        raise CliError(
            f"standard input has no question of a pool manager: {error.errors()[0]['msg']}", caller=True
        ) from None
    print(TypeAdapter(Proposal).dump_json(proposal_for(plan, question)).decode())


def proposal_for(plan: PlanRecord, question: PlanQuestion) -> Proposal:
    """Raises CliError, WorkloadError."""
    placement, load = candidate_of(plan, None).placement.queued, load_of(plan)
    hardware = hardware_of(plan, placement)
    factory = ModelFactory(plan.model, hardware, settings_of(plan, placement))
    conditions = Conditions(load.workload.burstiness, hardware.control_s, load.timeout_s)
    try:
        return Search(plan, question, factory, conditions).run()
    except (CannotSimulate, DoesNotFit, NotSimulated, ValueError) as error:
        raise CliError(str(error), caller=False) from None
