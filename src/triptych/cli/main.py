"""The ``triptych`` command: options, exit statuses, and nothing that takes time to import."""

import asyncio
import io
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import typer

from triptych.cli.outcome import CliError

T = TypeVar("T")

DEFAULT_PORT = 8000
DEFAULT_ROUTER_PORT = 50051
DEFAULT_URL = f"http://127.0.0.1:{DEFAULT_PORT}"
_INTERRUPTED = 130

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

Url = Annotated[str, typer.Option(envvar="TRIPTYCH_URL", help="Address of the gateway.")]
PoolManager = Annotated[
    str | None,
    typer.Option(
        envvar="TRIPTYCH_POOL_MANAGER",
        metavar="HOST:PORT",
        help="Address of the pool manager; by default that of a local *triptych up*.",
        show_default=False,
    ),
]
ApiKey = Annotated[
    str | None,
    typer.Option(envvar="TRIPTYCH_API_KEY", help="API key, if the gateway requires one.", show_default=False),
]


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

    with unfailing_output(), _failures():
        delayed = () if delay_profile is None else ("--delay-profile", str(delay_profile.absolute()))
        if delayed:
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
            options={"encoder": delayed, "text": delayed},
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

    with _failures():
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
        with _failures():
            chatting.converse(asking, files, plain_console())
    else:
        _run(chatting.ask(asking, question, files, plain_console()))


@app.command(
    epilog="Examples:\n\n- `triptych status`\n\n"
    "- `triptych status --admin http://127.0.0.1:9100` adds the load of that process\n\n"
    "- `triptych status --json | jq .ready` in a script; the exit status is 0 when every stage has an instance"
)
def status(
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    admin: Annotated[
        list[str] | None,
        typer.Option(help="Address of a process's admin port; may be repeated.", show_default=False),
    ] = None,
    pool_manager: PoolManager = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show whether a cluster is ready, its pools and their members, its instances and its models."""
    from triptych.cli import status as looking
    from triptych.cli.show import plain_console

    ready = _run(looking.status(url, api_key, tuple(admin or ()), pool_manager, plain_console(), as_json=as_json))
    raise typer.Exit(0 if ready else 1)


@app.command(
    epilog="Examples:\n\n- `triptych drain encoder-2`\n\n- `triptych drain text-1 --pool-manager 10.0.0.4:50041`"
)
def drain(
    instance: Annotated[str, typer.Argument(help="The instance's id, as in `triptych status`.")],
    url: Url = DEFAULT_URL,
    pool_manager: PoolManager = None,
) -> None:
    """Let an instance finish what it has and get no new work. Its process stays until it is stopped."""
    from triptych.cli import pools
    from triptych.cli.show import plain_console

    _run(pools.drain(instance, url, pool_manager, plain_console()))


@app.command(
    epilog="Examples:\n\n- `triptych bench --rate 2 --duration 30 --images 1:0.6,4:0.3,8:0.1 --output-tokens 32`\n\n"
    "- `triptych bench --sweep 1,2,4,8 --slo-ttft-ms 500 --slo-tpot-ms 50 --plot sweep.png` finds the goodput\n\n"
    "- `triptych bench --trace traces/servegen-mm-image --start 36000 --duration 60 --rate 4`\n\n"
    "- `triptych bench --url https://other.example/v1 --api-key KEY --model NAME` loads any OpenAI endpoint"
)
def bench(
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    model: Annotated[str | None, typer.Option(help="Model to ask; by default the first that is served.")] = None,
    rate: Annotated[float | None, typer.Option(min=0.001, help="Requests per second.", show_default=False)] = None,
    sweep: Annotated[
        str | None, typer.Option(help="Several rates, one run each: `1,2,4,8`.", show_default=False)
    ] = None,
    duration: Annotated[float, typer.Option(min=0.1, help="Seconds during which requests arrive, per run.")] = 30.0,
    burstiness: Annotated[
        float,
        typer.Option(
            min=0, max=100, help="Squared coefficient of variation of arrival gaps: 0 even, 1 Poisson, above 1 bursts."
        ),
    ] = 1.0,
    images: Annotated[str, typer.Option(help="Images per request: a number, or `VALUE:WEIGHT,...`.")] = "1",
    image_size: Annotated[
        str | None,
        typer.Option(help="Pixels, `WIDTHxHEIGHT`; by default 336x336, or as in the trace.", show_default=False),
    ] = None,
    text_tokens: Annotated[str, typer.Option(help="Words of text per request, about a token each.")] = "32",
    output_tokens: Annotated[str, typer.Option(help="Longest answer, in tokens.")] = "32",
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Generate exactly that many tokens (vLLM's extension of the API).")
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option(exists=True, help="A ServeGen directory, or a CSV of Azure's LMM trace.", show_default=False),
    ] = None,
    start: Annotated[float, typer.Option(min=0, help="Start position in the trace, in seconds.")] = 0.0,
    slo_ttft_ms: Annotated[float | None, typer.Option(min=0, help="SLO: time to first token.")] = None,
    slo_tpot_ms: Annotated[
        float | None, typer.Option(min=0, help="SLO: time per output token after the first.")
    ] = None,
    attainment: Annotated[
        float, typer.Option(min=0, max=1, help="Share of requests that must meet the SLOs, for goodput.")
    ] = 0.9,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds until a request counts as failed.")] = 300.0,
    max_in_flight: Annotated[
        int, typer.Option(min=1, help="Most requests in flight; further ones are not sent and count as failed.")
    ] = 4096,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all results to this file.", dir_okay=False)
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Write plots to this PNG (needs extra *bench*).", dir_okay=False)
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed; the same seed generates the same requests.")] = 0,
) -> None:
    """Load any OpenAI endpoint and measure it: TTFT, TPOT, SLO attainment, goodput.

    The load is open-loop: requests are sent when they are due, however slow the endpoint is, and latencies count from that
    time. Failed requests are counted by kind and miss their SLOs.
    """
    from triptych.cli.bench import command
    from triptych.cli.bench.load import Endpoint
    from triptych.cli.show import plain_console

    with _failures():
        job = command.Bench.from_options(
            endpoint=Endpoint(url, api_key, timeout, max_in_flight),
            model=model,
            mix=(images, text_tokens, output_tokens),
            image_size=image_size,
            trace=trace,
            rates=(rate, sweep),
            start_s=start,
            duration_s=duration,
            burstiness=burstiness,
            ignore_eos=ignore_eos,
            slo_ms=(slo_ttft_ms, slo_tpot_ms),
            attainment=attainment,
            seed=seed,
        )
        outputs = command.Outputs.checked(json_file, plot)
    answered = _run(command.bench_and_write(job, outputs, plain_console()))
    raise typer.Exit(0 if answered else 1)


@app.command(
    epilog="Examples:\n\n- `triptych profile --quick` measures the demo model in about a minute\n\n"
    "- `triptych profile --model ~/models/llava --part decoder --threads 8 --out profiles`\n\n"
    "- `triptych profile --model ~/models/llava --device cuda --dtype bfloat16 --plot`"
)
def profile(
    model: Annotated[
        str,
        typer.Option(help="Model directory, OWNER/NAME on a hub, or *demo* for the bundled demo model."),
    ] = "demo",
    part: Annotated[
        list[str] | None,
        typer.Option(help="*encoder* or *decoder*; may be repeated. By default both.", show_default=False),
    ] = None,
    out: Annotated[Path, typer.Option(file_okay=False, help="Directory for the profiles.")] = Path("profiles"),
    quick: Annotated[bool, typer.Option("--quick", help="Few sizes and few repetitions.")] = False,
    dtype: Annotated[str, typer.Option(help="*float32*, *float16* or *bfloat16*.")] = "float32",
    device: Annotated[str, typer.Option(help="*cpu* or *cuda*.")] = "cpu",
    threads: Annotated[int, typer.Option(min=1, help="Compute threads.")] = 1,
    kv_cache_mib: Annotated[int, typer.Option(min=1, help="KV memory of the decoder, in MiB.")] = 256,
    slo_factor: Annotated[
        float, typer.Option(min=1, help="Objectives of the load search, as a multiple of the latencies without load.")
    ] = 5.0,
    plot: Annotated[bool, typer.Option("--plot", help="Also write plots as PNG (needs extra *bench*).")] = False,
) -> None:
    """Measure what a model's parts cost on this hardware, and write a profile of each.

    Times of encoding, preparing items, prefill and decode by size; latencies under load, and the largest load and batch
    within objectives. Nothing else should run meanwhile. After Ctrl-C the same command goes on where it was.
    """
    import importlib.util

    from triptych.cli.profile.command import Job
    from triptych.cli.profile.command import profile as measure
    from triptych.cli.show import plain_console
    from triptych.domain.stage import ModelPart

    with _failures():
        try:
            parts = tuple(ModelPart(one) for one in part or [one.value for one in ModelPart])
        except ValueError as error:
            raise CliError(f"--part: {error}; name encoder or decoder", caller=True) from None
        needed = [("torch", "encoder,text"), *([("matplotlib", "bench")] if plot else [])]
        for module, extra in needed:
            if importlib.util.find_spec(module) is None:
                raise CliError(f"this needs {module}: pip install 'triptych[{extra}]'", caller=True)
        job = Job(model, parts, out, quick, dtype, device, threads, kv_cache_mib << 20, slo_factor, plot)
        steady = measure(job, plain_console())
    raise typer.Exit(0 if steady else 1)


class _failures:  # noqa: N801 - used as a statement
    """Ends the command with one line and the exit status of the error."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, CliError):
            _fail(str(error), 2 if error.caller else 1)
        if isinstance(error, KeyboardInterrupt):
            raise typer.Exit(_INTERRUPTED) from None


def _run(work: Coroutine[Any, Any, T]) -> T:
    with _failures():
        return asyncio.run(work)
    raise AssertionError("failures leave")


def _fail(message: str, code: int) -> NoReturn:
    from triptych.cli.show import plain_console

    plain_console(stderr=True).print(f"triptych: {message}", soft_wrap=True)
    raise typer.Exit(code)


def main() -> None:
    """The entry point that the package installs."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # do not fail on characters that the terminal cannot show
    app(prog_name="triptych")


if __name__ == "__main__":
    main()
