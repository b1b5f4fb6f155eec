"""The command ``simulate``. Its heavy imports wait until it runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from triptych.cli.hardware import DEGREE, DEVICE, WHERE, ModelName, simulated_hardware
from triptych.cli.offered import WEEK_S, Offered, gives_way, offered
from triptych.cli.options import failures, taking
from triptych.cli.outcome import CliError
from triptych.cli.placement import DEFAULT_ROLES
from triptych.cli.presets import PresetName
from triptych.workload.fidelity import Fidelity

if TYPE_CHECKING:
    from triptych.cli.service_options import Flags
    from triptych.cli.simulate.command import Outputs, Simulation
    from triptych.cli.simulate.deployment import Hardware

EXAMPLES = (
    "Examples:\n\n- `triptych simulate --model config.json --device a100-80 --preset epd --rate 4`\n\n"
    "- `triptych simulate --model ~/models/qwen --device E=l4,PD=h100 --roles E:4,PD:2 --sweep 2,4,8 --slo-ttft-ms 2000`\n\n"
    "- `triptych simulate --profiles profiles --roles E:2,PD:1 --rate 2 --report simulation.html` uses measured profiles\n\n"
    "- `triptych simulate --scenario scenario.toml --rate 8` reads options from a file, and overrides one\n\n"
    "- `triptych simulate --device h100 --goodput 1..64 --slo-ttft-ms 2000` finds the highest rate within the objective\n\n"
    "- `triptych simulate --compare a.toml b.toml --rate 4` shows the differences of two scenarios"
)
_MAX_FILE_NBYTES = 1 << 20
_SEVERAL = 5
"""Seeds of a result with an interval."""
_NOT_IN_A_FILE = ("scenario", "compare")
_LOAD = "Workload"
_OUT = "Output"


@dataclass(slots=True)
class _Parsed:
    """A reading of the command line, as it is left beside the values of its options."""

    line: list[str] = field(default_factory=list)
    service_flags: list[str] = field(default_factory=list)
    """Options of services in the file."""
    is_compared: bool = False
    """Whether it is one of two scenarios to compare, which the caller runs."""


class ReadAgain(TyperCommand):
    """A command whose line can be read again, with another file of options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.obj = ctx.obj or _Parsed()
        ctx.obj.line = list(args)
        return super().parse_args(ctx, args)

    def read_again(self, ctx: Any, scenario: Path) -> "Simulation":
        """What the line says with this file in place of those to compare."""
        again = self.make_context(
            ctx.info_name, [*ctx.obj.line, f"--scenario={scenario}"], ctx.parent, obj=_Parsed(is_compared=True)
        )
        with again:
            simulation: Simulation = self.invoke(again)
        return simulation


def _read_scenario(ctx: typer.Context, scenario: Path | None) -> Path | None:
    """Options of the file become defaults of the command's; the others are options of services."""
    from triptych.files import BadFile, read_toml

    if scenario is None:
        return None
    with failures():
        try:
            document = read_toml(scenario, _MAX_FILE_NBYTES)
        except BadFile as error:
            raise CliError(f"{scenario} {error}", caller=True) from None
        known = {
            name.removeprefix("--").replace("-", "_"): option for option in ctx.command.params for name in option.opts
        }
        defaults: dict[str, Any] = {}
        for name, value in _flat(scenario, document):
            if name in _NOT_IN_A_FILE:
                raise CliError(f"{scenario}: {name} is an option of the command line alone", caller=True)
            if (option := known.get(name)) is not None and option.name is not None:
                defaults[option.name] = _default(value, several=option.nargs != 1 or getattr(option, "multiple", False))
            else:
                ctx.obj.service_flags += _flags(name, value)
        ctx.default_map = {**(ctx.default_map or {}), **defaults}
    return scenario


def _flat(scenario: Path, document: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Entries of the tables, whose names only sort them. Raises CliError."""
    entries: list[tuple[str, Any]] = []
    for name, value in document.items():
        of_table = value.items() if isinstance(value, dict) else [(name, value)]
        for key, entry in of_table:
            if isinstance(entry, dict):
                raise CliError(f"{scenario}: {name}.{key} is a table within a table", caller=True)
            entries.append((key.replace("-", "_"), entry))
    names = [name for name, _ in entries]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise CliError(f"{scenario}: {twice} is there more than once", caller=True)
    return entries


def _default(value: Any, *, several: bool) -> Any:
    """A list of an option that is given once is written with commas."""
    if several:
        return value if isinstance(value, list) else [value]
    return ",".join(map(str, value)) if isinstance(value, list) else value


def _flags(name: str, value: Any) -> list[str]:
    dashed = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{dashed}" if value else f"--no-{dashed}"]
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return [f"--{dashed}={text}"]


@taking("hardware", simulated_hardware)
def placed_hardware(
    hardware: "Hardware",
    device: Annotated[
        str,
        typer.Option(
            help="Device of each instance (`triptych devices`), or `ROLE[@TIER]=NAME,...`.", rich_help_panel=WHERE
        ),
    ] = DEVICE,
    tensor_parallel: Annotated[
        str, typer.Option(help="Devices of each instance, or `ROLE[@TIER]=N,...`.", rich_help_panel=WHERE)
    ] = DEGREE,
    host: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="TOML file: cores that all processes share, and what services take of them.",
            rich_help_panel=WHERE,
        ),
    ] = None,
    encoders_on: Annotated[
        str | None,
        typer.Option(
            metavar="ROLE",
            help="Encoders compute on the devices of these instances, at the same time.",
            show_default="devices of their own",
            rich_help_panel=WHERE,
        ),
    ] = None,
    shared_speed: Annotated[
        float | None,
        typer.Option(
            min=0.01,
            max=1.0,
            help="With --encoders-on: speed of each of two engines that compute at once on one device. 0.5 if they take turns, 1 if they do not meet.",
            show_default="0.5",
            rich_help_panel=WHERE,
        ),
    ] = None,
) -> "Hardware":
    """The hardware that these options describe, with the devices of all instances."""
    return replace(
        hardware,
        device=device,
        degree=tensor_parallel,
        host=host,
        encoders_on=encoders_on,
        shared_speed=shared_speed,
    )


@taking("load", offered)
@taking("hardware", placed_hardware)
def simulate(
    ctx: typer.Context,
    load: Offered,
    hardware: "Hardware",
    scenario: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            is_eager=True,
            callback=_read_scenario,
            help="TOML file with options: `rate = 4`. Tables only sort them.",
        ),
    ] = None,
    model: ModelName = "demo",
    roles: Annotated[
        str | None,
        typer.Option(
            metavar="ROLE[@TIER]:COUNT,...",
            help="Instances by role, as for *triptych up*.",
            show_default=DEFAULT_ROLES,
            rich_help_panel=WHERE,
        ),
    ] = None,
    preset: Annotated[
        PresetName | None,
        typer.Option(help="A published architecture, as for *triptych up*.", rich_help_panel=WHERE),
    ] = None,
    autoscale: Annotated[
        bool, typer.Option("--autoscale", help="Let the pool manager start and stop instances.", rich_help_panel=WHERE)
    ] = False,
    switch_roles: Annotated[
        bool | None,
        typer.Option(
            "--switch-roles/--no-switch-roles",
            help="Let instances serve another stage.",
            show_default="as the preset does",
            rich_help_panel=WHERE,
        ),
    ] = None,
    fault: Annotated[
        list[str] | None,
        typer.Option(
            help="`SECONDS:WHAT:INSTANCE` with WHAT kill, start, hang or go-on. May be repeated.",
            rich_help_panel=WHERE,
        ),
    ] = None,
    goodput: Annotated[
        str | None,
        typer.Option(
            metavar="LEAST..HIGHEST",
            callback=gives_way,
            help="Look for the goodput between two rates, in place of --rate.",
            show_default=False,
            rich_help_panel=_LOAD,
        ),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1000,
            help="Runs of each rate, with --seed and the seeds after it.",
            show_default="1, or 5 with --goodput or --compare",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    warm_up: Annotated[
        float, typer.Option(min=0, max=WEEK_S, help="Seconds whose requests are not counted.", rich_help_panel=_LOAD)
    ] = 0.0,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(
            metavar="A.toml B.toml",
            exists=True,
            dir_okay=False,
            help="Simulate two scenarios with the same requests, and show their differences.",
            show_default=False,
            rich_help_panel=_OUT,
        ),
    ] = None,
    fidelity: Annotated[
        Fidelity,
        typer.Option(
            help="Run the real services, or their state machines alone: faster, and equal where it has all. Or approximate both by queues.",
            rich_help_panel=_OUT,
        ),
    ] = "services",
    json_file: Annotated[
        Path | None,
        typer.Option("--json", dir_okay=False, help="Write all results to this file.", rich_help_panel=_OUT),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="Write a page with charts (needs extra *bench*).", rich_help_panel=_OUT),
    ] = None,
    perfetto: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="Write what instances did, for Perfetto or Chrome.", rich_help_panel=_OUT),
    ] = None,
) -> "Simulation | None":
    """Simulate a cluster: the real services, policies and state machines, in virtual time.

    Costs come from measured profiles, or are computed for a device from the model's configuration. Settings of services are
    options, as of *triptych up*, except those that have no effect here, which are refused.
    """
    from triptych.cli.service_options import parse
    from triptych.cli.show import plain_console
    from triptych.cli.simulate import command
    from triptych.cli.simulate.deployment import deployment_of
    from triptych.workload.search import Bracket

    parsed: _Parsed = ctx.obj
    with failures():
        if compare is not None and not parsed.is_compared:
            if scenario is not None:
                raise CliError("--compare names the scenarios: leave out --scenario", caller=True)
            _compare(ctx, compare, command.Outputs.checked(json_file, report, perfetto))
            return None
        own = [name for option in ctx.command.params for name in option.opts]
        given = parse([*parsed.service_flags, *ctx.args], own)
        simulated = deployment_of(
            model=model,
            roles=roles,
            preset=preset,
            autoscale=autoscale,
            switch_roles=switch_roles,
            hardware=hardware,
            given=given,
            faults=fault or (),
        )
        simulation = command.Simulation(
            simulated,
            load.workload,
            None if goodput is None else Bracket.parse(goodput),
            seeds or (_SEVERAL if goodput is not None or compare is not None else 1),
            load.objectives,
            load.attainment,
            load.timeout_s,
            warm_up,
            _asked(ctx, given),
            fidelity,
        )
        if not parsed.is_compared:
            command.run(simulation, command.Outputs.checked(json_file, report, perfetto), plain_console())
    return simulation


def _asked(ctx: typer.Context, given: "Flags") -> Mapping[str, str]:
    """The command's options by name, as results have them."""
    asked = {name: str(value) for name, value in ctx.params.items() if value is not None and value != []}
    services = dict.fromkeys(flag for flags in given.values() for flag in flags)
    return asked | ({"options of services": " ".join(services)} if services else {})


def _compare(ctx: typer.Context, scenarios: tuple[Path, Path], outputs: "Outputs") -> None:
    """Show the differences of two scenarios. Raises CliError."""
    from triptych.cli.show import plain_console
    from triptych.cli.simulate.compare import Side, compare

    alike = scenarios[0].name == scenarios[1].name
    first, second = (Side(str(path) if alike else path.name, _of_scenario(ctx, path)) for path in scenarios)
    compare((first, second), outputs, plain_console())


def read_line(arguments: Sequence[str]) -> "Simulation":
    """The simulation of a command line, which does not run. What is wrong with it ends the command with a message."""
    app = typer.Typer(add_completion=False)
    app.command(cls=ReadAgain, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(simulate)
    command = typer.main.get_command(app)
    with command.make_context("simulate", list(arguments), obj=_Parsed(is_compared=True)) as context:
        simulation: Simulation = command.invoke(context)
    return simulation


def _of_scenario(ctx: typer.Context, path: Path) -> "Simulation":
    """A scenario of two to compare. What is wrong with it is said by its own reading; a further line says where."""
    from triptych.cli.show import plain_console

    assert isinstance(ctx.command, ReadAgain)  # noqa: S101 - the command of this module
    try:
        return ctx.command.read_again(ctx, path)
    except typer.Exit:
        plain_console(stderr=True).print(f"triptych: this is of {path}", soft_wrap=True)
        raise
