"""The command ``plan``. Its heavy imports wait until it runs."""

import inspect
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from triptych.cli.hardware import DEVICE, ModelName, simulated_hardware
from triptych.cli.offered import Offered, offered
from triptych.cli.options import failures, taking
from triptych.cli.outcome import CliError

if TYPE_CHECKING:
    from triptych.cli.simulate.deployment import Hardware

EXAMPLES = (
    "Examples:\n\n- `triptych plan --model config.json --devices h100=8 --rate 20 --slo ttft=2s,tbt=100ms`\n\n"
    "- `triptych plan --model config.json --devices l4=16,h100=4 --slo ttft=1s --images 0:0.3,1:0.7` looks for the highest goodput\n\n"
    "- `triptych plan --model config.json --max-price 40/h --slo-ttft-ms 1000 --trace monday.jsonl --json plan.json`"
)
_BUDGET = "Budget"
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
@taking("hardware", simulated_hardware)
def search(
    ctx: typer.Context,
    load: Offered,
    hardware: "Hardware",
    model: ModelName = "demo",
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

    own = [name for option in ctx.command.params for name in option.opts]
    of_load = [name for name in inspect.signature(offered).parameters if name not in _NOT_OFFERED]
    with failures():
        asked = Asked(
            model=model,
            devices=devices,
            max_price=max_price,
            prefer=prefer,
            hardware=replace(hardware, device=(devices or DEVICE).split(",")[0].partition("=")[0]),
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
