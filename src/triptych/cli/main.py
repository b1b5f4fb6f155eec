"""The ``triptych`` command."""

import asyncio
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from triptych.cli import chat as chatting
from triptych.cli import up as running
from triptych.cli.cluster import ClusterError, LocalCluster
from triptych.cli.rest import RestError
from triptych.cli.show import plain_console

DEFAULT_PORT = 8000
DEFAULT_URL = f"http://127.0.0.1:{DEFAULT_PORT}"
_FAILED, _MISUSED = 1, 2

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Serve multimodal models as encode, prefill and decode stages that scale apart.\n\n"
    "Start with **triptych up**, then in another terminal "
    '**triptych chat "What digits are shown?" --image examples/digits/3_a.png**',
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"triptych {version('triptych')}")
        raise typer.Exit


@app.callback()
def root(
    _: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options of the command itself."""


@app.command(
    epilog="Examples:\n\n- `triptych up` serves the demo model\n\n- `triptych up --model ~/models/llava --encoders 3 --port 9000`"
)
def up(
    model: Annotated[str, typer.Option(help="Directory of a model, or *demo* for the one that comes along.")] = "demo",
    encoders: Annotated[int, typer.Option(min=1, max=64, help="Processes that encode images.")] = 2,
    text: Annotated[int, typer.Option(min=1, max=64, help="Processes that prefill and decode.")] = 1,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of the REST gateway; 0 takes a free one.")
    ] = DEFAULT_PORT,
    threads: Annotated[int, typer.Option(min=1, help="Compute threads of each encoder and text process.")] = 1,
    log_dir: Annotated[
        Path | None,
        typer.Option(file_okay=False, help="Where processes write their logs; by default a private directory."),
    ] = None,
) -> None:
    """Run a cluster of processes on this machine until Ctrl-C.

    One gateway and one router in front of encoder and text processes, all on the loopback address. When an encoder or a
    text process dies, the rest goes on; without the gateway or the router everything ends.
    """
    try:
        cluster = LocalCluster(model, encoders=encoders, text=text, port=port, threads=threads, log_dir=log_dir)
        code = asyncio.run(running.up(cluster, plain_console()))
    except ClusterError as error:
        _fail(str(error), _FAILED)
    raise typer.Exit(code)


@app.command(
    epilog='Examples:\n\n- `triptych chat "Hello!"`\n\n'
    '- `triptych chat "Which is the largest digit?" -i examples/digits/3_a.png -i examples/digits/7_b.png`'
)
def chat(
    question: Annotated[str, typer.Argument(help="What to ask.", show_default=False)],
    image: Annotated[
        list[Path] | None,
        typer.Option("--image", "-i", exists=True, dir_okay=False, readable=True, help="An image; may be repeated."),
    ] = None,
    url: Annotated[str, typer.Option(help="Address of the gateway.")] = DEFAULT_URL,
    model: Annotated[str | None, typer.Option(help="Model to ask; by default the first that is served.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer, in tokens.")] = None,
    temperature: Annotated[float, typer.Option(min=0, help="0 always takes the likeliest token.")] = 0.0,
    timeline: Annotated[
        bool, typer.Option("--timeline/--no-timeline", help="Show where the request ran and how long it took.")
    ] = True,
) -> None:
    """Ask a question, about images if you like, and see the answer as it comes."""
    question_ = chatting.Question(question, tuple(image or ()), model, max_tokens, temperature)
    try:
        asyncio.run(chatting.chat(url, question_, plain_console(), show_timeline=timeline))
    except RestError as error:
        _fail(str(error), _MISUSED if error.caller else _FAILED)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _fail(message: str, code: int) -> None:
    plain_console(stderr=True).print(f"triptych: {message}", soft_wrap=True)
    raise typer.Exit(code)


def main() -> None:
    """The entry point that the package installs."""
    app(prog_name="triptych")


if __name__ == "__main__":
    main()
