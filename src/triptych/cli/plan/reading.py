"""Options of other commands, read without running them: those of a simulation, and those of a load."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import typer

from triptych.cli.hardware import simulated_hardware
from triptych.cli.offered import Offered, offered
from triptych.cli.options import taking
from triptych.cli.simulating import read_line, simulate
from triptych.runtime.plans import Options, Placement, PlanRecord, words

if TYPE_CHECKING:
    from triptych.cli.simulate.command import Simulation
    from triptych.cli.simulate.deployment import Hardware

_OF_SERVICES_TOO = frozenset({"dtype", "profiles"})
"""Options of ``triptych simulate`` that are settings of services as well, with the same meaning."""


def simulation_of(plan: PlanRecord, placement: Placement) -> "Simulation":
    """The simulation of a placement under the plan's workload. What is wrong with it ends the command with a message."""
    options = (*placement.cluster_options, *placement.hardware_options, *words(plan.common), *words(plan.workload))
    return read_line((f"--model={plan.model}", *options))


def load_of(plan: PlanRecord) -> Offered:
    """The load that a plan is for. What is wrong with it ends the command with a message."""
    command = _command(taking("load", offered)(_given))
    with command.make_context("load", list(words(plan.workload))) as context:
        load = command.invoke(context)
    assert isinstance(load, Offered)  # noqa: S101 - what ``_given`` returns
    return load


def hardware_of(plan: PlanRecord, placement: Placement) -> "Hardware":
    """The hardware of a plan, with the device of the placement's first role. What is wrong with it ends the command with a message."""
    read = _hardware_reader()
    names, command = option_names(read), _command(read)
    options = {name: value for name, value in plan.common.items() if f"--{name}" in names}
    with command.make_context("hardware", list(words(options))) as context:
        hardware: Hardware = command.invoke(context)
    return replace(hardware, device=next(iter(placement.devices.values())), prepare_cores=placement.prepare_cores)


def settings_of(plan: PlanRecord, placement: Placement) -> Options:
    """Settings of services of a placement, as options."""
    names = option_names(_hardware_reader())
    return {**{name: value for name, value in plan.common.items() if f"--{name}" not in names}, **placement.settings}


@cache
def _hardware_reader() -> Callable[..., Any]:
    return taking("hardware", simulated_hardware)(_given_hardware)


def _given_hardware(hardware: "Hardware") -> "Hardware":
    return hardware


def _given(load: Offered) -> Offered:
    return load


@cache
def option_names(function: Callable[..., Any]) -> frozenset[str]:
    """Options of a command itself, not those of services, as they are written."""
    return frozenset(name for option in _command(function).params for name in (*option.opts, *option.secondary_opts))


def _command(function: Callable[..., Any]) -> Any:
    app = typer.Typer(add_completion=False)
    app.command()(function)
    return typer.main.get_command(app)


def service_words(plan: PlanRecord, placement: Placement) -> Sequence[str]:
    """Options of services that a plan has for a placement, as ``triptych up`` takes them."""
    simulated = option_names(simulate)
    options = {
        name: value for name, value in plan.common.items() if name in _OF_SERVICES_TOO or f"--{name}" not in simulated
    }
    return words({**options, **placement.settings})
