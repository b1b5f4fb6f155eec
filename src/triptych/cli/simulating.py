"""The command ``simulate``. Its heavy imports wait until it runs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from triptych.cli.options import failures
from triptych.cli.outcome import CliError
from triptych.cli.placement import DEFAULT_ROLES
from triptych.cli.presets import PresetName
from triptych.domain.bounds import MAX_INT31
from triptych.workload.requests import MAX_CLIP_S

EXAMPLES = (
    "Examples:\n\n- `triptych simulate --model config.json --device a100-80 --preset epd --rate 4`\n\n"
    "- `triptych simulate --model ~/models/qwen --device E=l4,PD=h100 --roles E:4,PD:2 --sweep 2,4,8 --slo-ttft-ms 2000`\n\n"
    "- `triptych simulate --profiles profiles --roles E:2,PD:1 --rate 2 --report simulation.html` uses measured profiles\n\n"
    "- `triptych simulate --scenario scenario.toml --rate 8` reads options from a file, and overrides one"
)
_WEEK_S = 7 * 86_400.0
_MAX_FILE_NBYTES = 1 << 20
_LOAD = "Workload"
_WHERE = "Deployment"
_OUT = "Output"


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
        flags: list[str] = []
        for name, value in _flat(scenario, document):
            if (option := known.get(name)) is not None and option.name is not None:
                defaults[option.name] = _default(value, several=option.nargs != 1 or getattr(option, "multiple", False))
            else:
                flags += _flags(name, value)
        ctx.default_map = {**(ctx.default_map or {}), **defaults}
        ctx.meta["scenario"] = flags
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


def _of_file(ctx: typer.Context, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "DEFAULT_MAP"


def simulate(
    ctx: typer.Context,
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
    model: Annotated[
        str,
        typer.Option(
            help="Model directory (weights are not needed), `config.json`, or *demo*.", rich_help_panel=_WHERE
        ),
    ] = "demo",
    roles: Annotated[
        str | None,
        typer.Option(
            metavar="ROLE:COUNT,...",
            help="Instances by role, as for *triptych up*.",
            show_default=DEFAULT_ROLES,
            rich_help_panel=_WHERE,
        ),
    ] = None,
    preset: Annotated[
        PresetName | None,
        typer.Option(help="A published architecture, as for *triptych up*.", rich_help_panel=_WHERE),
    ] = None,
    device: Annotated[
        str,
        typer.Option(help="Device of each instance (`triptych devices`), or `ROLE=NAME,...`.", rich_help_panel=_WHERE),
    ] = "a100-80",
    tensor_parallel: Annotated[
        str, typer.Option(help="Devices of each instance, or `ROLE=N,...`.", rich_help_panel=_WHERE)
    ] = "1",
    dtype: Annotated[
        Literal["float32", "float16", "bfloat16"] | None,
        typer.Option(help="Of the computation; by default the model's.", rich_help_panel=_WHERE),
    ] = None,
    catalogue: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, help="Devices beside those that are shipped.", rich_help_panel=_WHERE
        ),
    ] = None,
    profiles: Annotated[
        Path | None,
        typer.Option(exists=True, help="Measured profiles, used in place of computed costs.", rich_help_panel=_WHERE),
    ] = None,
    prepare_cores: Annotated[
        int,
        typer.Option(
            min=1, max=1024, help="Cores that preprocess, of each instance that encodes.", rich_help_panel=_WHERE
        ),
    ] = 8,
    control_ms: Annotated[
        float,
        typer.Option(min=0, max=1000, help="Time of a message between two processes.", rich_help_panel=_WHERE),
    ] = 0.3,
    host: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="TOML file: cores that all processes share, and what services take of them.",
            rich_help_panel=_WHERE,
        ),
    ] = None,
    autoscale: Annotated[
        bool, typer.Option("--autoscale", help="Let the pool manager start and stop instances.", rich_help_panel=_WHERE)
    ] = False,
    switch_roles: Annotated[
        bool | None,
        typer.Option(
            "--switch-roles/--no-switch-roles",
            help="Let instances serve another stage.",
            show_default="as the preset does",
            rich_help_panel=_WHERE,
        ),
    ] = None,
    fault: Annotated[
        list[str] | None,
        typer.Option(
            help="`SECONDS:WHAT:INSTANCE` with WHAT kill, start, hang or go-on. May be repeated.",
            rich_help_panel=_WHERE,
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(min=0.001, max=1e6, help="Requests per second.", show_default=False, rich_help_panel=_LOAD),
    ] = None,
    sweep: Annotated[
        str | None, typer.Option(help="Several rates: `1,2,4,8`.", show_default=False, rich_help_panel=_LOAD)
    ] = None,
    duration: Annotated[
        float, typer.Option(min=0.1, max=_WEEK_S, help="Seconds during which requests arrive.", rich_help_panel=_LOAD)
    ] = 120.0,
    burstiness: Annotated[
        float,
        typer.Option(
            min=0,
            max=100,
            help="Squared coefficient of variation of arrival gaps: 0 even, 1 Poisson.",
            rich_help_panel=_LOAD,
        ),
    ] = 1.0,
    images: Annotated[
        str, typer.Option(help="Images per request: a number, or `VALUE:WEIGHT,...`.", rich_help_panel=_LOAD)
    ] = "1",
    image_size: Annotated[
        str | None, typer.Option(help="Pixels, `WIDTHxHEIGHT`.", show_default="336x336", rich_help_panel=_LOAD)
    ] = None,
    videos: Annotated[str, typer.Option(help="Videos per request.", rich_help_panel=_LOAD)] = "0",
    video_size: Annotated[str, typer.Option(help="Pixels of a frame.", rich_help_panel=_LOAD)] = "224x224",
    video_seconds: Annotated[
        float, typer.Option(min=0.1, max=MAX_CLIP_S, help="Length of a video.", rich_help_panel=_LOAD)
    ] = 4.0,
    sounds: Annotated[str, typer.Option(help="Sounds per request.", rich_help_panel=_LOAD)] = "0",
    sound_seconds: Annotated[
        float, typer.Option(min=0.1, max=MAX_CLIP_S, help="Length of a sound.", rich_help_panel=_LOAD)
    ] = 5.0,
    text_tokens: Annotated[str, typer.Option(help="Tokens of text per request.", rich_help_panel=_LOAD)] = "64",
    output_tokens: Annotated[str, typer.Option(help="Tokens of an answer.", rich_help_panel=_LOAD)] = "128",
    trace: Annotated[
        Path | None,
        typer.Option(exists=True, help="A ServeGen directory, or a CSV of Azure's LMM trace.", rich_help_panel=_LOAD),
    ] = None,
    start: Annotated[float, typer.Option(min=0, help="Start in the trace, seconds.", rich_help_panel=_LOAD)] = 0.0,
    seed: Annotated[int, typer.Option(min=-MAX_INT31, max=MAX_INT31, help="Random seed.", rich_help_panel=_LOAD)] = 0,
    seeds: Annotated[
        int,
        typer.Option(
            min=1, max=1000, help="Runs of each rate, with this seed and those after it.", rich_help_panel=_LOAD
        ),
    ] = 1,
    warm_up: Annotated[
        float, typer.Option(min=0, max=_WEEK_S, help="Seconds whose requests are not counted.", rich_help_panel=_LOAD)
    ] = 0.0,
    timeout: Annotated[
        float, typer.Option(min=0.1, max=3600, help="Seconds until a request fails.", rich_help_panel=_LOAD)
    ] = 300.0,
    slo_ttft_ms: Annotated[
        float | None, typer.Option(min=0, max=_WEEK_S * 1000, help="SLO: time to first token.", rich_help_panel=_OUT)
    ] = None,
    slo_tpot_ms: Annotated[
        float | None,
        typer.Option(
            min=0, max=_WEEK_S * 1000, help="SLO: time per output token after the first.", rich_help_panel=_OUT
        ),
    ] = None,
    attainment: Annotated[
        float,
        typer.Option(
            min=0, max=1, help="Share of requests that must meet the SLOs, for goodput.", rich_help_panel=_OUT
        ),
    ] = 0.9,
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
) -> None:
    """Simulate a cluster: the real services, policies and state machines, in virtual time.

    Costs come from measured profiles, or are computed for a device from the model's configuration. Settings of services are
    options, as of *triptych up*, except those that have no effect here, which are refused.
    """
    del scenario  # its callback has read it
    from triptych.cli.service_options import parse
    from triptych.cli.show import plain_console
    from triptych.cli.simulate import command
    from triptych.cli.simulate.deployment import Hardware, deployment_of
    from triptych.workload.report import Objectives
    from triptych.workload.workload import Workload

    with failures():
        if rate is not None and sweep is not None and _of_file(ctx, "rate") != _of_file(ctx, "sweep"):
            rate, sweep = (None, sweep) if _of_file(ctx, "rate") else (rate, None)
        own = [name for option in ctx.command.params for name in option.opts]
        given = parse([*ctx.meta.get("scenario", ()), *ctx.args], own)
        workload = Workload.from_options(
            mix=(images, text_tokens, output_tokens),
            image_size=image_size,
            clips=(videos, video_size, video_seconds),
            sounds=(sounds, sound_seconds),
            trace=trace,
            rates=(rate, sweep),
            start_s=start,
            duration_s=duration,
            burstiness=burstiness,
            seed=seed,
        )
        hardware = Hardware(device, tensor_parallel, dtype, catalogue, profiles, prepare_cores, control_ms / 1000, host)
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
        outputs = command.Outputs.checked(json_file, report, perfetto)
        asked = {name: str(value) for name, value in ctx.params.items() if value is not None and value != []}
        services = [flag for flags in given.values() for flag in flags]
        simulation = command.Simulation(
            simulated,
            workload,
            seeds,
            Objectives.of_ms(slo_ttft_ms, slo_tpot_ms),
            attainment,
            timeout,
            warm_up,
            asked | ({"options of services": " ".join(dict.fromkeys(services))} if services else {}),
        )
        command.run(simulation, outputs, plain_console())
