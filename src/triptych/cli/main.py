"""The ``triptych`` command: ``chat``, and the commands of the modules beside it. Heavy imports wait for their command."""

import io
import sys
from pathlib import Path
from typing import Annotated

import typer

from triptych.cli import certs, lora, measuring, operating, planned, simulating, starting
from triptych.cli.options import DEFAULT_URL, ApiKey, Url, failures, run
from triptych.cli.outcome import CliError
from triptych.domain.bounds import MAX_INT31

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


app.command(
    epilog=starting.EXAMPLES,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)(starting.up)
app.command(
    epilog=starting.SERVE_EXAMPLES,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)(starting.serve)
app.command(
    cls=simulating.ReadAgain,
    epilog=simulating.EXAMPLES,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)(simulating.simulate)


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
    max_tokens: Annotated[int | None, typer.Option(min=1, max=MAX_INT31, help="Longest answer, in tokens.")] = None,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="Sampling temperature; 0 is greedy.")] = 0.0,
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
app.add_typer(planned.commands, name="plan")
app.add_typer(lora.commands, name="lora")


def main() -> None:
    """Run the command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # do not fail on characters that the terminal cannot show
    app(prog_name="triptych")
