"""The ``triptych`` command: ``up`` and ``chat``, and the commands of the modules beside it. Heavy imports wait for their command."""

import asyncio
import io
import sys
from pathlib import Path
from typing import Annotated

import typer

from triptych.cli import certs, measuring, operating
from triptych.cli.options import DEFAULT_PORT, DEFAULT_ROUTER_PORT, DEFAULT_URL, ApiKey, Url, failures, run
from triptych.cli.outcome import CliError

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Serve multimodal models as encode, prefill and decode stages that scale independently.\n\n"
    "Start with **triptych up**, then in another terminal "
    '**triptych chat "What digits are shown?" --image examples/digits/3_a.png**\n\n'
    "Exit status: 0 success, 1 failure, 2 invalid request or usage, 130 interrupted.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

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
    epilog="Examples:\n\n- `triptych up` serves the demo model\n\n"
    "- `triptych up --model ~/models/llava --encoders 3 --port 9000`\n\n"
    "- `triptych up --model demo --model ~/models/llava` serves two models at one address\n\n"
    "- `triptych up --encoders 0 --text 0 --hybrid 1` runs the whole model in one process\n\n"
    "- `triptych up --admin-port 9100` serves metrics on fixed ports, for Prometheus\n\n"
    "- `triptych up --autoscale --pool-sizes E=1-6,PD=1-2` lets the pools follow the load\n\n"
    "- `triptych up --no-live > up.log` for logs and service managers"
)
def up(
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="Model directory, OWNER/NAME on a hub, or *demo* for the bundled demo model, which is the default. "
            "`NAME=` before it is the name it is served under. May be repeated: each model gets its own instances.",
            show_default=False,
        ),
    ] = None,
    encoders: Annotated[int, typer.Option(min=0, max=64, help="Encoder processes of each model.")] = 2,
    text: Annotated[int, typer.Option(min=0, max=64, help="Text processes (prefill and decode) of each model.")] = 1,
    hybrid: Annotated[
        int, typer.Option(min=0, max=64, help="Processes that encode, prefill and decode (the whole model in each).")
    ] = 0,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of the REST gateway; 0 picks a free one.")
    ] = DEFAULT_PORT,
    router_port: Annotated[
        int, typer.Option(min=0, max=65535, help="gRPC port of the (first) router, for the SDK; 0 picks a free one.")
    ] = DEFAULT_ROUTER_PORT,
    admin_port: Annotated[
        int,
        typer.Option(min=0, max=65535, help="First of the admin ports (metrics), one per process; 0 picks free ones."),
    ] = 0,
    mount_router: Annotated[
        bool, typer.Option("--mount-router", help="Run the router in the gateway's process: one hop less per token.")
    ] = False,
    threads: Annotated[int, typer.Option(min=1, help="Compute threads of each encoder and text process.")] = 1,
    delay_profile: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            help="Engines compute nothing, but take as long as the profiles in this file or directory predict.",
            show_default=False,
        ),
    ] = None,
    profiles: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            help="Profiles of the model's parts, for routers and the pool manager; with --delay-profile, by default those.",
            show_default=False,
        ),
    ] = None,
    autoscale: Annotated[
        bool, typer.Option("--autoscale", help="Let the pool manager start and stop instances as the load needs them.")
    ] = False,
    max_instances: Annotated[
        int | None,
        typer.Option(
            min=1, max=64, help="Largest size of a pool; by default 8, or what it begins with.", show_default=False
        ),
    ] = None,
    pool_sizes: Annotated[
        str | None,
        typer.Option(
            metavar="ROLE=LEAST-MOST,...",
            help="Smallest and largest size of single pools: `E=1-8,PD=1-2`, or of a model's, `NAME/E=2-4`.",
            show_default=False,
        ),
    ] = None,
    slo: Annotated[
        str | None,
        typer.Option(help="Service level objectives, such as `ttft=5x,image:ttft=2s`.", show_default=False),
    ] = None,
    log_dir: Annotated[
        Path | None,
        typer.Option(file_okay=False, help="Directory for the logs of the processes; by default a private one."),
    ] = None,
    live: Annotated[
        bool, typer.Option("--live/--no-live", help="Show processes, load and problems as they change.")
    ] = True,
) -> None:
    """Run a cluster of processes on this machine until Ctrl-C.

    One gateway, one pool manager, and for each model a router with encoder and text processes, all on the loopback address.
    A process that dies is started again; the cluster stops when the gateway or the only router crashes three times in a row
    at its start.
    """
    from triptych.cli import up as running
    from triptych.cli.cluster import LocalCluster
    from triptych.cli.show import plain_console
    from triptych.cli.terminal import unfailing_output

    with unfailing_output(), failures():
        if autoscale and profiles is None and delay_profile is None and model in (None, ["demo"]):
            from triptych.cli.profile.first_use import cache_directory, demo_profiles

            profiles = demo_profiles(plain_console(), threads=threads, cache=cache_directory())
        options = running.options_of(
            (encoders, text, hybrid),
            delay_profile=delay_profile,
            profiles=profiles,
            max_instances=max_instances,
            pool_sizes=pool_sizes,
            slo=slo,
        )
        if delay_profile is not None:
            plain_console().print(
                "engines compute nothing: they sleep as the profiles predict, and answers have no meaning"
            )
        cluster = LocalCluster(
            model or ["demo"],
            encoders=encoders,
            text=text,
            hybrid=hybrid,
            port=port,
            router_port=router_port,
            admin_port=admin_port,
            mount_router=mount_router,
            threads=threads,
            log_dir=log_dir,
            restart=True,
            autoscale=autoscale,
            options=options,
        )
        code = asyncio.run(running.up(cluster, plain_console(), live=live))
    raise typer.Exit(code)


@app.command(
    epilog='Examples:\n\n- `triptych chat "Hello!"`\n\n'
    '- `triptych chat "Which is the largest digit?" -i examples/digits/3_a.png -i examples/digits/7_b.png`\n\n'
    "- `triptych chat` starts a conversation; `/image PATH` attaches an image, `/help` lists all commands"
)
def chat(
    question: Annotated[
        str | None, typer.Argument(help="The question; without one, a conversation starts.", show_default=False)
    ] = None,
    image: Annotated[list[Path] | None, typer.Option("--image", "-i", help="An image; may be repeated.")] = None,
    video: Annotated[list[Path] | None, typer.Option(help="A video, for models that accept video.")] = None,
    audio: Annotated[list[Path] | None, typer.Option(help="An audio file, for models that accept audio.")] = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    model: Annotated[str | None, typer.Option(help="Model to ask; by default the first that is served.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer, in tokens.")] = None,
    temperature: Annotated[float, typer.Option(min=0, help="Sampling temperature; 0 is greedy.")] = 0.0,
    timeline: Annotated[
        bool | None,
        typer.Option(
            "--timeline/--no-timeline",
            help="Show where each stage ran and how long it took; the default after a single question.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Ask a question, optionally about images, and stream the answer."""
    from triptych.cli import chat as chatting
    from triptych.cli.files import local_file
    from triptych.cli.rest import Attachment
    from triptych.cli.show import plain_console

    with failures():
        if question is not None and not question.strip():
            raise CliError("the question is empty; leave it out to start a conversation", caller=True)
        files = (
            *(Attachment(local_file(name)) for name in image or ()),
            *(Attachment(local_file(name), "video") for name in video or ()),
            *(Attachment(local_file(name), "audio") for name in audio or ()),
        )
    show_timeline = question is not None if timeline is None else timeline
    asking = chatting.ChatSettings(url, api_key, model, max_tokens, temperature, show_timeline=show_timeline)
    if question is None:
        with failures():
            chatting.converse(asking, files, plain_console())
    else:
        run(chatting.ask(asking, question, files, plain_console()))


app.add_typer(operating.commands)
app.add_typer(measuring.commands)
app.add_typer(certs.commands)


def main() -> None:
    """The entry point that the package installs."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # do not fail on characters that the terminal cannot show
    app(prog_name="triptych")


if __name__ == "__main__":
    main()
