"""The commands ``up`` and ``serve``. Their heavy imports wait until they run."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from triptych.cli.options import DEFAULT_PORT, DEFAULT_ROUTER_PORT, failures, taking
from triptych.cli.outcome import CliError
from triptych.cli.placement import DEFAULT_ROLES, fair_threads, placed_kinds
from triptych.cli.presets import PRESETS, Preset, PresetName
from triptych.domain.stage import INSTANCE_NAMES

if TYPE_CHECKING:
    from triptych.cli.model import Model
    from triptych.cli.service_options import Flags

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
SERVE_EXAMPLES = (
    "Examples:\n\n- `triptych serve demo`\n\n- `triptych serve ~/models/Qwen2.5-VL-7B-Instruct --host 0.0.0.0 --api-key secret`\n\n"
    "- `triptych serve OWNER/NAME --tensor-parallel-size 2 --max-model-len 16384`\n\n"
    "- `triptych serve ~/models/llava --device cpu --port 9000`"
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


@dataclass(frozen=True, slots=True)
class UpOptions:
    """Options of ``triptych up`` and ``triptych serve``."""

    roles: Annotated[
        str | None,
        typer.Option(
            metavar="ROLE:COUNT,...",
            help="Processes of each model by role. A role names its stages: E encodes, P prefills, D decodes; there are "
            f"{', '.join(role.value for role in INSTANCE_NAMES)}.",
            show_default=DEFAULT_ROLES,
            rich_help_panel=_SIZES,
        ),
    ] = None
    tier: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[ROLE@]TIER:...",
            help="Describes a tier of hardware of *--roles PD@fast:1,PD@slow:2*: `slow:device=L4,price=0.8,speed=0.5,gpus=0/1`, the price in "
            "USD per hour, and the GPUs of each instance. May be repeated.",
            show_default=False,
            rich_help_panel=_SIZES,
        ),
    ] = None
    tier_settings: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[ROLE@]TIER:OPTIONS",
            help="Settings that only the instances of a tier have: `slow:--max-sequences=16 --dtype=float16`. May be repeated.",
            show_default=False,
            rich_help_panel=_SIZES,
        ),
    ] = None
    preset: Annotated[
        PresetName | None,
        typer.Option(
            help="A published architecture: its roles, its policies of routing, sharding, order and budgets, and whether it switches roles.",
            show_default=False,
            rich_help_panel=_SIZES,
        ),
    ] = None
    port: Annotated[
        int,
        typer.Option(min=0, max=65535, help="Port of the REST gateway; 0 picks a free one.", rich_help_panel=_PORTS),
    ] = DEFAULT_PORT
    router_port: Annotated[
        int,
        typer.Option(
            min=0,
            max=65535,
            help="gRPC port of the (first) router, for the SDK; 0 picks a free one.",
            rich_help_panel=_PORTS,
        ),
    ] = DEFAULT_ROUTER_PORT
    admin_port: Annotated[
        int,
        typer.Option(
            min=0,
            max=65535,
            help="First of the admin ports (metrics), one per process; 0 picks free ones.",
            rich_help_panel=_PORTS,
        ),
    ] = 0
    mount_router: Annotated[
        bool, typer.Option("--mount-router", help="Run the router in the gateway's process: one hop less per token.")
    ] = False
    threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=256,
            help="Compute threads of each encoder and text process; by default the machine's cores are divided among them, and with "
            "--autoscale each has one.",
            show_default=False,
        ),
    ] = None
    autoscale: Annotated[
        bool,
        typer.Option(
            "--autoscale",
            help="Let the pool manager start and stop instances as the load needs them.",
            rich_help_panel=_SIZES,
        ),
    ] = False
    switch_roles: Annotated[
        bool | None,
        typer.Option(
            "--switch-roles/--no-switch-roles",
            help="Let instances serve another stage as the load needs it; needs profiles.",
            show_default="as the preset does",
            rich_help_panel=_SIZES,
        ),
    ] = None
    reprofile: Annotated[
        bool,
        typer.Option(
            "--reprofile",
            help="With --autoscale or --switch-roles: measure the demo model's costs again.",
            rich_help_panel=_SIZES,
        ),
    ] = False
    log_dir: Annotated[
        Path | None,
        typer.Option(file_okay=False, help="Directory for the logs of the processes; by default a private one."),
    ] = None
    live: Annotated[
        bool, typer.Option("--live/--no-live", help="Show processes, load and problems as they change.")
    ] = True
    help_: Annotated[
        bool, typer.Option("--help", "-h", is_eager=True, callback=_show_help, help="Show this message and exit.")
    ] = False


@taking("options", UpOptions)
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
    *,
    options: UpOptions,
) -> None:
    """Run a cluster of processes on this machine until Ctrl-C.

    One gateway, one pool manager, and for each model a router and its instances, all on the loopback address.
    A process that dies is started again, after growing pauses, and given up after six ends without an answer. The cluster stops when
    the gateway or the only router crashes three times in a row at its start.
    """
    from tempfile import TemporaryDirectory

    from triptych.cli import gpus, serving
    from triptych.cli.model import Model
    from triptych.cli.process_plan import refuse_tls
    from triptych.cli.service_options import parse
    from triptych.cli.show import plain_console
    from triptych.cli.terminal import unfailing_output

    with unfailing_output(), failures(), TemporaryDirectory(prefix="triptych-tiers-") as folder:
        refuse_tls()
        models = Model.all_named(model or ["demo"])
        roles, _ = _roles(options)
        encodes = serving.texts_encode(roles)
        given = parse(ctx.args, _names(ctx))
        now = serving.settled(given, models, gpus.find_gpus, serving.installed_vllm(), encodes=encodes)
        if now.said:
            plain_console().print(now.said, soft_wrap=True)
        code = _run(models, now.flags, options, Path(folder), bundled=model in (None, ["demo"]))
    raise typer.Exit(code)


_OF_VLLM = "As of vllm serve"


@taking("options", UpOptions)
def serve(
    ctx: typer.Context,
    model: Annotated[
        str,
        typer.Argument(help="Model directory, OWNER/NAME[@REVISION] on a hub, or *demo* for the bundled demo model."),
    ],
    tensor_parallel_size: Annotated[
        int, typer.Option(min=1, max=1024, help="GPUs of each text instance, with vLLM.", rich_help_panel=_OF_VLLM)
    ] = 1,
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="Longest prompt and answer, with vLLM.", rich_help_panel=_OF_VLLM)
    ] = None,
    gpu_memory_utilization: Annotated[
        float | None,
        typer.Option(min=0.01, max=1, help="Share of each GPU's memory to use.", rich_help_panel=_OF_VLLM),
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="Name of the model in the API.", rich_help_panel=_OF_VLLM)
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(help="The key that every request has to have.", rich_help_panel=_OF_VLLM)
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(help="0.0.0.0 serves REST to the network, with a key.", rich_help_panel=_OF_VLLM),
    ] = None,
    chat_template: Annotated[str | None, typer.Option(hidden=True)] = None,
    allowed_local_media_path: Annotated[str | None, typer.Option(hidden=True)] = None,
    *,
    options: UpOptions,
) -> None:
    """Serve a model on the devices of this machine until Ctrl-C: **triptych up** with other defaults.

    GPUs are found, the data type is the checkpoint's on a GPU and float32 on a CPU, and vLLM generates where it is installed and
    serves the model. Each option of **triptych up** goes before these.
    """
    from tempfile import TemporaryDirectory

    from triptych.cli import gpus, serving
    from triptych.cli.model import Model
    from triptych.cli.process_plan import refuse_tls
    from triptych.cli.service_options import parse
    from triptych.cli.show import plain_console
    from triptych.cli.terminal import unfailing_output

    with unfailing_output(), failures(), TemporaryDirectory(prefix="triptych-serve-") as folder:
        refuse_tls()
        named = Model.named(model)
        named = named if served_model_name is None else replace(named, model_id=served_model_name)
        names = serving.VllmNames(
            tensor_parallel_size,
            max_model_len,
            gpu_memory_utilization,
            api_key,
            host,
            chat_template,
            allowed_local_media_path,
        )
        chosen = serving.served(
            named,
            parse(ctx.args, _names(ctx)),
            names,
            roles=options.roles if options.preset is None else _roles(options)[0],
            tiers=bool(options.tier or options.preset),
            find=gpus.find_gpus,
            release=serving.installed_vllm(),
            folder=Path(folder),
        )
        if chosen.tiers and options.switch_roles:
            raise CliError("--switch-roles: on several GPUs instances keep their roles", caller=True)
        plain_console().print(chosen.said, soft_wrap=True)
        placed = replace(options, roles=chosen.roles, tier=[*(options.tier or ()), *chosen.tiers])
        code = _run([named], chosen.flags, placed, Path(folder), bundled=model == "demo")
    raise typer.Exit(code)


def _names(ctx: typer.Context) -> list[str]:
    """The command's own options."""
    return [name for option in ctx.command.params for name in option.opts]


def _roles(options: UpOptions) -> tuple[str, Preset | None]:
    """Roles as ``--roles`` has them, and the preset."""
    chosen = None if options.preset is None else PRESETS[options.preset]
    usual = DEFAULT_ROLES if chosen is None else chosen.roles
    return usual if options.roles is None else options.roles, chosen


def _run(models: "Sequence[Model]", given: "Flags", options: UpOptions, folder: Path, *, bundled: bool) -> int:
    """Run the cluster; returns the exit status. ``given`` are flags of services, ``bundled``: of the demo model. Raises CliError."""
    from triptych.cli import up as running
    from triptych.cli.cluster import LocalCluster
    from triptych.cli.cluster_settings import ClusterSettings
    from triptych.cli.process_plan import refuse_impossible
    from triptych.cli.show import plain_console
    from triptych.cli.tiers import check_tiers, read_tiers, sleeping, with_gpu_bounds
    from triptych.runtime.cores import usable_cores

    roles, chosen = _roles(options)
    kinds = placed_kinds(roles)
    sizes = {kind.role: sum(kinds[other] for other in kinds if other.role is kind.role) for kind in kinds}
    tiers = read_tiers(kinds, options.tier or (), options.tier_settings or ())
    if options.preset is not None and chosen is not None:
        chosen.placed_as(roles, options.preset)
    engines, cores = len(models) * sum(sizes.values()), len(usable_cores())
    threads = options.threads or fair_threads(engines, cores, grows=options.autoscale)
    switches = chosen is not None and chosen.switching if options.switch_roles is None else options.switch_roles
    refuse_impossible(models, sizes.keys(), mount_router=options.mount_router, switch_roles=switches)
    switchable = switches or ("--replan" in given["pool_manager"] and options.switch_roles is not False)
    settings = ClusterSettings(
        models,
        sizes,
        given,
        chosen,
        autoscale=options.autoscale,
        switch_roles=switchable,
        tiers={kind: kinds[kind] for kind in tiers},
    )
    measures = (options.autoscale or switchable) and bundled
    measure = partial(_demo_profiles, threads, again=options.reprofile) if measures else None
    flags = settings.flags(measure, reprofile=options.reprofile)
    check_tiers(tiers, kinds, flags, models[0].path, switch_roles=switches)
    tiers, flags = sleeping(tiers, with_gpu_bounds(tiers, flags), given, folder)
    if any(flag.startswith("--delay-profile=") for of_service in flags.values() for flag in of_service):
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
        port=options.port,
        router_port=options.router_port,
        admin_port=options.admin_port,
        mount_router=options.mount_router,
        switch_roles=switches,
        switchable=switchable,
        threads=threads,
        log_dir=options.log_dir,
        restart=True,
        autoscale=options.autoscale,
        options=flags,
        tiers=tiers,
    )
    return asyncio.run(running.up(cluster, plain_console(), live=options.live))


def _demo_profiles(threads: int, *, again: bool) -> Path:
    from triptych.cli.profile.first_use import cache_directory, demo_profiles
    from triptych.cli.show import plain_console

    return demo_profiles(plain_console(), threads=threads, cache=cache_directory(), again=again)
