"""The command ``plan``. Its heavy imports wait until it runs."""

import inspect
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from triptych.cli.offered import Offered, offered
from triptych.cli.options import failures, taking
from triptych.cli.outcome import CliError

EXAMPLES = (
    "Examples:\n\n- `triptych plan --model config.json --devices h100=8 --rate 20 --slo ttft=2s,tbt=100ms`\n\n"
    "- `triptych plan --model config.json --devices l4=16,h100=4 --slo ttft=1s --images 0:0.3,1:0.7` looks for the highest goodput\n\n"
    "- `triptych plan --model config.json --max-price 40/h --slo-ttft-ms 1000 --trace monday.jsonl --json plan.json`"
)
_BUDGET = "Budget"
_WHERE = "Deployment"
_OUT = "Output"
_SEARCH = "search"
_EXPLAIN = "--explain-transfer"
_NOT_OFFERED = ("rate", "sweep", "duration", "timeout", "slo_ttft_ms", "slo_tpot_ms", "attainment")
"""Parameters of the load that a plan has elsewhere, or does not keep."""
_KEPT = ("dtype", "catalogue", "profiles", "control_ms", "devices_per_host", "host_network")
"""Parameters that all placements of a plan share, as options of ``triptych simulate``."""


class PlanGroup(TyperGroup):
    """A group whose command ``search`` needs no name. ``plan --explain-transfer`` is ``plan transfers``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if _EXPLAIN in args:
            args = ["transfers", *(argument for argument in args if argument != _EXPLAIN)]
        elif not args or args[0] not in self.commands:
            args = [_SEARCH, *args]
        return super().parse_args(ctx, args)


Target = Literal["up", "compose", "kubernetes"]
"""Where a plan can run."""
COMPOSE_FILE, BASE = Path("docker-compose.yml"), Path("deploy/kubernetes/base")
"""Files of Triptych's checkout, from its root."""

commands = typer.Typer(cls=PlanGroup, help="Find a cluster for a workload: roles, devices and settings, by simulation.")


@commands.command(_SEARCH, epilog=EXAMPLES, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
@taking("load", offered)
def search(
    ctx: typer.Context,
    load: Offered,
    model: Annotated[
        str,
        typer.Option(
            help="Model directory (weights are not needed), `config.json`, or *demo*.", rich_help_panel=_WHERE
        ),
    ] = "demo",
    devices: Annotated[
        str | None,
        typer.Option(
            metavar="NAME=COUNT,...",
            help="Devices that there are (`triptych devices`), or kinds to choose from: `h100=8,l4`.",
            show_default="all GPUs with a price",
            rich_help_panel=_BUDGET,
        ),
    ] = None,
    max_price: Annotated[
        str | None,
        typer.Option(metavar="USD/h", help="What the devices may cost.", show_default=False, rich_help_panel=_BUDGET),
    ] = None,
    prefer: Annotated[
        Literal["cheapest", "goodput", "ttft"] | None,
        typer.Option(
            help="What is chosen: the cheapest that serves --rate, the highest goodput, or the shortest time to the first token.",
            show_default="cheapest, or goodput without --rate",
            rich_help_panel=_BUDGET,
        ),
    ] = None,
    prepare_cores: Annotated[
        int,
        typer.Option(
            min=1,
            max=1024,
            help="Cores that preprocess, of each instance that encodes, at most.",
            rich_help_panel=_WHERE,
        ),
    ] = 8,
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
    control_ms: Annotated[
        float,
        typer.Option(min=0, max=1000, help="Time of a message between two processes.", rich_help_panel=_WHERE),
    ] = 0.3,
    devices_per_host: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1024,
            help="Place instances on hosts of so many devices, as for *triptych simulate*.",
            show_default="each instance on its own",
            rich_help_panel=_WHERE,
        ),
    ] = None,
    host_network: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            max=1e6,
            metavar="GB/S",
            help="What the instances of a host share for transfers with others, in each direction.",
            show_default="not shared",
            rich_help_panel=_WHERE,
        ),
    ] = None,
    candidates: Annotated[
        int, typer.Option(min=1, max=200, help="Placements that are simulated, at most.", rich_help_panel=_OUT)
    ] = 24,
    json_file: Annotated[
        Path | None, typer.Option("--json", dir_okay=False, help="Write the plan to this file.", rich_help_panel=_OUT)
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="Write a page with charts (needs extra *bench*).", rich_help_panel=_OUT),
    ] = None,
    apply: Annotated[
        Target | None,
        typer.Option(
            help="Run what is chosen, as *triptych plan apply* does with the file of --json.",
            show_default=False,
            rich_help_panel=_OUT,
        ),
    ] = None,
) -> None:
    """Find a cluster for a workload: roles, devices, tensor parallelism, batches and policies.

    All placements within the budget are judged by a closed form, and the best of them simulated. Without weights and devices,
    as *triptych simulate*; settings of services are options too.
    """
    from triptych.cli.plan.apply import Application
    from triptych.cli.plan.apply import apply as run_plan
    from triptych.cli.plan.search import Asked, Outputs, options_of, plan
    from triptych.cli.service_options import by_name
    from triptych.cli.show import plain_console
    from triptych.cli.simulate.deployment import Hardware

    own = [name for option in ctx.command.params for name in option.opts]
    of_load = [name for name in inspect.signature(offered).parameters if name not in _NOT_OFFERED]
    with failures():
        hardware = Hardware(
            next(iter((devices or "a100-80").split(","))).partition("=")[0],
            "1",
            dtype,
            catalogue,
            profiles,
            prepare_cores,
            control_ms / 1000,
            None,
            devices_per_host,
            None if host_network is None else 1e9 * host_network,
        )
        asked = Asked(
            model=model,
            devices=devices,
            max_price=max_price,
            prefer=prefer,
            hardware=hardware,
            common=options_of(ctx.params, _KEPT),
            settings=by_name(ctx.args, own),
            workload=load.workload,
            workload_options=options_of(ctx.params, of_load),
            objectives=load.objectives,
            attainment=load.attainment,
            timeout_s=load.timeout_s,
            contenders=candidates,
        )
        if apply is not None and json_file is None:
            raise CliError("--apply reads the plan from a file: name it with --json", caller=True)
        plan(asked, Outputs.checked(json_file, report), plain_console())
        if apply is not None and json_file is not None:
            run_plan(Application(json_file, apply), plain_console())
