"""The commands for operators: ``status``, ``scale``, ``limits``, ``roll``, ``drain`` and ``switch``."""

import re
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from triptych.cli.options import ApiKey, failures, of_managers, run
from triptych.cli.outcome import CliError
from triptych.domain.membership import MAX_MEMBERS
from triptych.domain.stage import Role

if TYPE_CHECKING:
    from triptych.cli.managers import Managers

commands = typer.Typer()


@commands.command(
    epilog="Examples:\n\n- `triptych status`\n\n"
    "- `triptych status --admin http://127.0.0.1:9100` adds the load of that process\n\n"
    "- `triptych status --json | jq .ready` in a script; the exit status is 0 when every stage has an instance"
)
@of_managers
def status(
    known: "Managers",
    api_key: ApiKey = None,
    admin: Annotated[
        list[str] | None,
        typer.Option(help="Address of a process's admin port; may be repeated.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show whether a cluster is ready, its pools with their sizes, attainment and last decisions, and its instances."""
    from triptych.cli import status as looking
    from triptych.cli.show import plain_console

    ready = run(looking.status(known, api_key, tuple(admin or ()), plain_console(), as_json=as_json))
    raise typer.Exit(0 if ready else 1)


class _WithNumbers(TyperCommand):
    """Takes ``-1`` as a number, not as an option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        negative = next((argument for argument in args if re.fullmatch(r"-\d+", argument)), None)
        if negative is not None:
            raise typer.BadParameter(f"{negative} is less than no instance", param_hint="size")
        return super().parse_args(ctx, args)


@commands.command(
    cls=_WithNumbers,
    epilog="Examples:\n\n- `triptych scale encoder 3 --for 30m`\n\n- `triptych scale triptych-demo/PD 2`\n\n"
    "- `triptych scale encoder --auto` ends it",
)
@of_managers
def scale(
    known: "Managers",
    pool: Annotated[
        str,
        typer.Argument(
            help="MODEL/ROLE as in `triptych status`; the role alone (*encoder*, *text*, *PD*) if one has it."
        ),
    ],
    size: Annotated[
        int | None, typer.Argument(min=0, max=MAX_MEMBERS, help="Number of instances.", show_default=False)
    ] = None,
    for_: Annotated[str, typer.Option("--for", help="How long: *90s*, *30m*, *2h*, *1d*.")] = "1h",
    auto: Annotated[bool, typer.Option("--auto", help="End a size that was set by hand.")] = False,
) -> None:
    """Set the size of a pool by hand for a time, or end that. With autoscaling it follows the load again afterwards."""
    from triptych.cli import pools
    from triptych.cli.show import plain_console

    with failures():
        if auto and size is not None:
            raise CliError("--auto ends a size that was set by hand: leave out the size", caller=True)
        if not auto and size is None:
            raise CliError(
                f"how many instances is {pool} to have? (--auto ends a size that was set by hand)", caller=True
            )
        for_s = pools.duration_s(for_)
    run(pools.scale(pool, size, for_s, known, plain_console()))


@commands.command(
    epilog="Examples:\n\n- `triptych limits text-1 --max-sequences 64`\n\n- `triptych limits encoder --max-batch-items 4`\n\n"
    "- `triptych limits text-1 --auto` ends it"
)
@of_managers
def limits(
    known: "Managers",
    target: Annotated[
        str, typer.Argument(metavar="INSTANCE|POOL", help="An instance's id, or a pool as in `triptych scale`.")
    ],
    max_batch_items: Annotated[
        int | None, typer.Option(min=1, max=1 << 20, help="Items in one pass of an encoder.", show_default=False)
    ] = None,
    max_sequences: Annotated[
        int | None, typer.Option(min=1, max=1 << 20, help="Sequences in one step.", show_default=False)
    ] = None,
    token_budget: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1 << 20,
            help="Tokens in one step.",
            show_default="that of the start, or as many as sequences",
        ),
    ] = None,
    auto: Annotated[bool, typer.Option("--auto", help="End limits that were set by hand.")] = False,
    wait: Annotated[str, typer.Option(metavar="TIME", help="Wait so long until they are in use.")] = "30s",
) -> None:
    """Set the limits of batches on running instances by hand. What is not named is as at their start.

    They hold until another order or the end of the instance. Instances that are started later begin with their settings.
    """
    from triptych.cli import pools
    from triptych.cli.show import plain_console
    from triptych.domain.instance import InstanceLimits

    with failures():
        wanted = InstanceLimits(max_batch_items, max_sequences, token_budget)
        if auto and wanted.given:
            raise CliError("--auto ends limits that were set by hand: leave out the others", caller=True)
        if not auto and not wanted.given:
            raise CliError(
                "name a limit: --max-batch-items, --max-sequences, --token-budget (--auto ends those set by hand)",
                caller=True,
            )
        wait_s = pools.duration_s(wait)
    run(pools.limit(target, wanted, known, plain_console(), wait_s=wait_s))


@commands.command(epilog="Examples:\n\n- `triptych roll text 2 --wait 10m`\n\n- `triptych roll PD@h100 4`")
@of_managers
def roll(
    known: "Managers",
    pool: Annotated[str, typer.Argument(help="A pool, as in `triptych scale`.")],
    degree: Annotated[int, typer.Argument(min=1, max=1024, help="Devices over which an instance divides the model.")],
    wait: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Wait for the end, at most *90s*, *10m*, *2h*.", show_default=False),
    ] = None,
) -> None:
    """Replace the instances of a pool, one by one, by such with another tensor-parallel degree. No request fails.

    One instance more runs meanwhile. If one with the new degree does not start, the others stay as they are.
    """
    from triptych.cli import pools
    from triptych.cli.show import plain_console

    with failures():
        wait_s = 0.0 if wait is None else pools.duration_s(wait)
    run(pools.roll(pool, degree, known, plain_console(), wait_s=wait_s))


@commands.command(
    epilog="Examples:\n\n- `triptych drain encoder-2`\n\n- `triptych drain text-1 --pool-manager 10.0.0.4:50041 --wait 10m`"
)
@of_managers
def drain(
    known: "Managers",
    instance: Annotated[str, typer.Argument(help="The instance's or router's id, as in `triptych status`.")],
    force: Annotated[bool, typer.Option("--force", help="Also the last one of its kind.")] = False,
    wait: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="Wait until it has finished, at most *90s*, *10m*, *2h*.", show_default=False
        ),
    ] = None,
) -> None:
    """Let an instance or router finish what it has and get no new work, for good.

    A pool manager that keeps the size of the pool stops it then, and starts another. Otherwise its process stays until you end
    it. The last one of its kind is drained with `--force` only.
    """
    from triptych.cli import pools
    from triptych.cli.show import plain_console

    with failures():
        wait_s = 0.0 if wait is None else pools.duration_s(wait)
    run(pools.drain(instance, known, plain_console(), force=force, wait_s=wait_s))


@commands.command(
    epilog="Examples:\n\n- `triptych switch text-2 D`\n\n- `triptych switch text-2 PD --pool-manager 10.0.0.4:50041 --wait 10s`"
)
@of_managers
def switch(
    known: "Managers",
    instance: Annotated[str, typer.Argument(help="The instance's id, as in `triptych status`.")],
    role: Annotated[Role, typer.Argument(help="The stages that it is to serve.", case_sensitive=False)],
    force: Annotated[bool, typer.Option("--force", help="Also if it is the last one with a stage.")] = False,
    wait: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Wait until it does, at most *5s*, *1m*.", show_default=False),
    ] = None,
) -> None:
    """Let an instance that runs with `--switchable` serve the stages of another role, without losing a request.

    It serves its own role again when it is started again. Without `--force` one that is the last with a stage is refused.
    """
    from triptych.cli import pools
    from triptych.cli.show import plain_console

    with failures():
        wait_s = 0.0 if wait is None else pools.duration_s(wait)
    run(pools.switch(instance, role, known, plain_console(), force=force, wait_s=wait_s))
