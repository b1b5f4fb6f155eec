"""The command ``up``. Its heavy imports wait until it runs."""

import asyncio
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from triptych.cli.options import DEFAULT_PORT, DEFAULT_ROUTER_PORT, failures
from triptych.cli.placement import DEFAULT_ROLES, fair_threads, placed_kinds
from triptych.cli.presets import PRESETS, PresetName
from triptych.domain.stage import INSTANCE_NAMES

EXAMPLES = (
    "Examples:\n\n- `triptych up` serves the demo model\n\n"
    "- `triptych up --model ~/models/llava --roles E:3,PD:1 --port 9000`\n\n"
    "- `triptych up --model demo --model ~/models/llava` serves two models at one address\n\n"
    "- `triptych up --roles EPD:1` runs the whole model in one process\n\n"
    "- `triptych up --roles E:2,P:1,D:2` encodes, prefills and decodes in instances of their own\n\n"
    "- `triptych up --preset hydra-ep-d --roles EP:2,D:1` starts a published architecture, with these counts\n\n"
    "- `triptych up --engine vllm --model ~/models/qwen --vllm-args='--max-model-len 8192'` generates with vLLM\n\n"
    "- `triptych up --admin-port 9100` serves metrics on fixed ports, for Prometheus\n\n"
    "- `triptych up --autoscale --pool-sizes E=1-6,PD=1-2` lets the pools follow the load\n\n"
    "- `triptych up --roles E:2,P:1,D:1 --switch-roles --slo ttft=5x,tbt=5x` lets instances serve the stage that is short\n\n"
    "- `triptych up --no-live > up.log` for logs and service managers"
)


def _show_help(ctx: typer.Context, wanted: bool) -> None:
    """Prints the command's own options, then the usual settings of services, and ends the command."""
    if not wanted:
        return
    from rich.table import Table

    from triptych.cli.service_options import usual_rows
    from triptych.cli.show import plain_console

    console = plain_console()
    console.print(ctx.get_help())
    table = Table("Settings of services", "", box=None, pad_edge=False, header_style="bold")
    for row in usual_rows():
        table.add_row(*row)
    console.print(table)
    console.print(_SETTINGS)
    raise typer.Exit


_PORTS = "Ports"
_SIZES = "Sizes of pools"
_SETTINGS = (
    "Every setting of a service is an option: --NAME for all processes that have it, --SERVICE-NAME for those of one service "
    "(--router-log-level DEBUG). python -m triptych.services.SERVICE --help lists them."
)


def up(
    ctx: typer.Context,
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="Model directory, OWNER/NAME on a hub, or *demo* for the bundled demo model, which is the default. "
            "`NAME=` before it is the name it is served under. May be repeated: each model gets its own instances.",
            show_default=False,
        ),
    ] = None,
    roles: Annotated[
        str | None,
        typer.Option(
            metavar="ROLE:COUNT,...",
            help="Processes of each model by role. A role names its stages: E encodes, P prefills, D decodes; there are "
            f"{', '.join(role.value for role in INSTANCE_NAMES)}.",
            show_default=DEFAULT_ROLES,
            rich_help_panel=_SIZES,
        ),
    ] = None,
    tier: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[ROLE@]TIER:...",
            help="Describes a tier of hardware of *--roles PD@fast:1,PD@slow:2*: `slow:device=L4,price=0.8,speed=0.5,gpus=0/1`, the price in "
            "USD per hour, and the GPUs of each instance. May be repeated.",
            show_default=False,
            rich_help_panel=_SIZES,
        ),
    ] = None,
    tier_settings: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[ROLE@]TIER:OPTIONS",
            help="Settings that only the instances of a tier have: `slow:--max-sequences=16 --dtype=float16`. May be repeated.",
            show_default=False,
            rich_help_panel=_SIZES,
        ),
    ] = None,
    preset: Annotated[
        PresetName | None,
        typer.Option(
            help="A published architecture: its roles, its policies of routing, sharding, order and budgets, and whether it switches roles.",
            show_default=False,
            rich_help_panel=_SIZES,
        ),
    ] = None,
    port: Annotated[
        int,
        typer.Option(min=0, max=65535, help="Port of the REST gateway; 0 picks a free one.", rich_help_panel=_PORTS),
    ] = DEFAULT_PORT,
    router_port: Annotated[
        int,
        typer.Option(
            min=0,
            max=65535,
            help="gRPC port of the (first) router, for the SDK; 0 picks a free one.",
            rich_help_panel=_PORTS,
        ),
    ] = DEFAULT_ROUTER_PORT,
    admin_port: Annotated[
        int,
        typer.Option(
            min=0,
            max=65535,
            help="First of the admin ports (metrics), one per process; 0 picks free ones.",
            rich_help_panel=_PORTS,
        ),
    ] = 0,
    mount_router: Annotated[
        bool, typer.Option("--mount-router", help="Run the router in the gateway's process: one hop less per token.")
    ] = False,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=256,
            help="Compute threads of each encoder and text process; by default the machine's cores are divided among them, and with "
            "--autoscale each has one.",
            show_default=False,
        ),
    ] = None,
    autoscale: Annotated[
        bool,
        typer.Option(
            "--autoscale",
            help="Let the pool manager start and stop instances as the load needs them.",
            rich_help_panel=_SIZES,
        ),
    ] = False,
    switch_roles: Annotated[
        bool | None,
        typer.Option(
            "--switch-roles/--no-switch-roles",
            help="Let instances serve another stage as the load needs it; needs profiles.",
            show_default="as the preset does",
            rich_help_panel=_SIZES,
        ),
    ] = None,
    reprofile: Annotated[
        bool,
        typer.Option(
            "--reprofile",
            help="With --autoscale or --switch-roles: measure the demo model's costs again.",
            rich_help_panel=_SIZES,
        ),
    ] = False,
    log_dir: Annotated[
        Path | None,
        typer.Option(file_okay=False, help="Directory for the logs of the processes; by default a private one."),
    ] = None,
    live: Annotated[
        bool, typer.Option("--live/--no-live", help="Show processes, load and problems as they change.")
    ] = True,
    _: Annotated[
        bool, typer.Option("--help", "-h", is_eager=True, callback=_show_help, help="Show this message and exit.")
    ] = False,
) -> None:
    """Run a cluster of processes on this machine until Ctrl-C.

    One gateway, one pool manager, and for each model a router and its instances, all on the loopback address.
    A process that dies is started again, after growing pauses, and given up after six ends without an answer. The cluster stops when
    the gateway or the only router crashes three times in a row at its start.
    """
    from tempfile import TemporaryDirectory

    from triptych.cli import up as running
    from triptych.cli.cluster import LocalCluster
    from triptych.cli.cluster_settings import ClusterSettings
    from triptych.cli.model import Model
    from triptych.cli.process_plan import refuse_impossible, refuse_tls
    from triptych.cli.service_options import parse
    from triptych.cli.show import plain_console
    from triptych.cli.terminal import unfailing_output
    from triptych.cli.tiers import check_tiers, read_tiers, sleeping, with_gpu_bounds
    from triptych.runtime.cores import usable_cores

    with unfailing_output(), failures(), TemporaryDirectory(prefix="triptych-tiers-") as folder:
        refuse_tls()
        models = Model.all_named(model or ["demo"])
        chosen = None if preset is None else PRESETS[preset]
        if roles is None:
            roles = DEFAULT_ROLES if chosen is None else chosen.roles
        kinds = placed_kinds(roles)
        sizes = {kind.role: sum(kinds[other] for other in kinds if other.role is kind.role) for kind in kinds}
        tiers = read_tiers(kinds, tier or (), tier_settings or ())
        if preset is not None and chosen is not None:
            chosen.placed_as(roles, preset)
        engines, cores = len(models) * sum(sizes.values()), len(usable_cores())
        threads = threads or fair_threads(engines, cores, grows=autoscale)
        switches = chosen is not None and chosen.switching if switch_roles is None else switch_roles
        refuse_impossible(models, sizes.keys(), mount_router=mount_router, switch_roles=switches)
        option_names = [name for option in ctx.command.params for name in option.opts]
        given = parse(ctx.args, option_names)
        switchable = switches or ("--replan" in given["pool_manager"] and switch_roles is not False)
        settings = ClusterSettings(
            models,
            sizes,
            given,
            chosen,
            autoscale=autoscale,
            switch_roles=switchable,
            tiers={kind: kinds[kind] for kind in tiers},
        )
        measures = (autoscale or switchable) and model in (None, ["demo"])
        measure = partial(_demo_profiles, threads, again=reprofile) if measures else None
        options = settings.flags(measure, reprofile=reprofile)
        check_tiers(tiers, kinds, options, models[0].path, switch_roles=switches)
        tiers, options = sleeping(tiers, with_gpu_bounds(tiers, options), given, Path(folder))
        if any(flag.startswith("--delay-profile=") for flags in options.values() for flag in flags):
            plain_console().print(
                "engines compute nothing: they sleep as the profiles predict, and answers have no meaning"
            )
        if threads > 1 and threads * engines > cores:
            plain_console().print(
                f"{engines} processes with {threads} threads each share {cores} cores, and hold each other up: use fewer --threads"
            )
        cluster = LocalCluster(
            models,
            roles=roles,
            port=port,
            router_port=router_port,
            admin_port=admin_port,
            mount_router=mount_router,
            switch_roles=switches,
            switchable=switchable,
            threads=threads,
            log_dir=log_dir,
            restart=True,
            autoscale=autoscale,
            options=options,
            tiers=tiers,
        )
        code = asyncio.run(running.up(cluster, plain_console(), live=live))
    raise typer.Exit(code)


def _demo_profiles(threads: int, *, again: bool) -> Path:
    from triptych.cli.profile.first_use import cache_directory, demo_profiles
    from triptych.cli.show import plain_console

    return demo_profiles(plain_console(), threads=threads, cache=cache_directory(), again=again)
