"""The commands for LoRA adapters: ``lora load``, ``lora unload`` and ``lora list``."""

from typing import Annotated

import typer

from triptych.cli.options import DEFAULT_URL, ApiKey, Url, failures, run
from triptych.cli.outcome import CliError

_LOAD_S = 300.0

commands = typer.Typer(no_args_is_help=True, help="Load and unload LoRA adapters of a running cluster.")


@commands.command(
    epilog="Examples:\n\n- `triptych lora load digits=adapters/digits`\n\n"
    "- `triptych lora load digits=adapters/digits --parent triptych-demo` where several models are served"
)
def load(
    adapter: Annotated[
        str,
        typer.Argument(
            metavar="NAME=DIR",
            help="Name of the model that it is served as; directory on the instances, below their *lora_root*.",
        ),
    ],
    parent: Annotated[
        str | None, typer.Option(help="The base model, where several are served.", show_default=False)
    ] = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Load an adapter, as peft saves it, at all instances: requests for its name are answered with it from then on.

    The gateway takes this from keys with `operator = true`, and without keys from this machine.
    """
    with failures():
        name, _, directory = adapter.partition("=")
        if not name or not directory:
            raise CliError(f"{adapter!r} is not NAME=DIR", caller=True)
    run(_load(name, directory, parent, url, api_key))


@commands.command(epilog="Examples:\n\n- `triptych lora unload digits`")
def unload(
    name: Annotated[str, typer.Argument(help="The adapter's name.")], url: Url = DEFAULT_URL, api_key: ApiKey = None
) -> None:
    """Unload an adapter at all instances. Requests that run go on to their end; new ones are refused."""
    run(_unload(name, url, api_key))


@commands.command(name="list", epilog="Examples:\n\n- `triptych lora list`")
def listed(url: Url = DEFAULT_URL, api_key: ApiKey = None) -> None:
    """List the adapters that are served, with their base models."""
    run(_list(url, api_key))


async def _load(name: str, directory: str, parent: str | None, url: str, api_key: str | None) -> None:
    from triptych.cli.rest import RestClient
    from triptych.cli.show import plain_console

    async with RestClient(url, api_key=api_key, timeout_s=_LOAD_S) as client:
        model = await client.load_lora(name, directory, parent)
    plain_console().print(f"{name} is served, with base {model.get('parent')}", soft_wrap=True)


async def _unload(name: str, url: str, api_key: str | None) -> None:
    from triptych.cli.rest import RestClient
    from triptych.cli.show import plain_console

    async with RestClient(url, api_key=api_key) as client:
        await client.unload_lora(name)
    plain_console().print(f"{name} takes no more requests", soft_wrap=True)


async def _list(url: str, api_key: str | None) -> None:
    from triptych.cli.rest import RestClient
    from triptych.cli.show import plain_console

    async with RestClient(url, api_key=api_key) as client:
        loras = await client.loras()
    for name, parent in loras:
        plain_console().print(f"{name}  of {parent}", soft_wrap=True)
