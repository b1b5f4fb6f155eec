"""The commands ``plan transfers``, ``plan apply``, ``plan verify`` and ``plan again``. Their heavy imports wait until they run."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from triptych.cli import planning
from triptych.cli.measuring import Catalogue
from triptych.cli.offered import WEEK_S
from triptych.cli.options import DEFAULT_URL, ApiKey, Url, failures, run
from triptych.domain.bounds import MAX_INT31
from triptych.workload.requests import MAX_CLIP_S, MAX_CLIPS, MAX_IMAGES, MAX_TOKENS

commands = planning.commands


@commands.command(
    epilog="Examples:\n\n- `triptych plan transfers --model config.json --device E=l4,P=h100`\n\n"
    "- `triptych plan transfers --model ~/models/qwen --device h100 --images 4 --image-size 1024x768 --kv-dtype float8`"
)
def transfers(
    model: Annotated[
        str, typer.Option(help="Model directory (weights are not needed), `config.json`, or *demo*.")
    ] = "demo",
    device: Annotated[
        str, typer.Option(help="Device of all stages (`triptych devices`), or `ROLE=NAME,...`.")
    ] = "a100-80",
    tensor_parallel: Annotated[str, typer.Option(help="Devices of each instance, or `ROLE=N,...`.")] = "1",
    dtype: Annotated[
        Literal["float32", "float16", "bfloat16"] | None,
        typer.Option(help="Of the computation; by default the model's.", show_default=False),
    ] = None,
    kv_dtype: Annotated[
        Literal["float32", "float16", "bfloat16", "float8"] | None,
        typer.Option(help="Of keys and values; by default that of the computation.", show_default=False),
    ] = None,
    catalogue: Catalogue = None,
    images: Annotated[
        int | None,
        typer.Option(min=0, max=MAX_IMAGES, help="Images of the request.", show_default="1 if there is nothing else"),
    ] = None,
    image_size: Annotated[str, typer.Option(help="Pixels, `WIDTHxHEIGHT`.")] = "336x336",
    videos: Annotated[int, typer.Option(min=0, max=MAX_CLIPS, help="Videos of the request.")] = 0,
    video_size: Annotated[str, typer.Option(help="Pixels of a frame, `WIDTHxHEIGHT`.")] = "224x224",
    video_seconds: Annotated[float, typer.Option(min=0.1, max=MAX_CLIP_S, help="Length of a video.")] = 4.0,
    sounds: Annotated[int, typer.Option(min=0, max=MAX_CLIPS, help="Sounds of the request.")] = 0,
    sound_seconds: Annotated[float, typer.Option(min=0.1, max=MAX_CLIP_S, help="Length of a sound.")] = 5.0,
    text_tokens: Annotated[int, typer.Option(min=1, max=MAX_TOKENS, help="Tokens of text in the prompt.")] = 128,
    cached_tokens: Annotated[
        int,
        typer.Option(min=0, max=MAX_INT31, help="Tokens of the prompt that the reader of keys and values has already."),
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show what a request moves at every cut of a model, how long that takes over links, and which links bear it.

    Cuts are before the encoder (media or pixels), after it (embeddings), and after the prefill (keys and values). Times of
    stages are computed for the devices. Links are those of the catalogue of devices.
    """
    from triptych.cli.plan.transfers import Question, explain
    from triptych.cli.show import plain_console
    from triptych.workload.requests import Clip, Planned, Size

    with failures():
        count = images if images is not None else int(not videos and not sounds)
        request = Planned(
            0.0,
            text_tokens,
            (Size.parse(image_size),) * count,
            1,
            (Clip(Size.parse(video_size), video_seconds),) * videos,
            (sound_seconds,) * sounds,
        )
        question = Question(model, device, tensor_parallel, dtype, kv_dtype, catalogue, request, cached_tokens)
        explain(question, plain_console(), as_json=as_json)


PlanFile = Annotated[Path, typer.Argument(metavar="PLAN.json", exists=True, dir_okay=False, help="A plan.")]
CandidateNumber = Annotated[
    int | None,
    typer.Option(min=1, help="Candidate of the plan, by its number; by default the chosen one.", show_default=False),
]


@commands.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog="Examples:\n\n- `triptych plan apply plan.json` prints the command line\n\n"
    "- `triptych plan apply plan.json --start --port=9000` runs it\n\n"
    "- `triptych plan apply plan.json --to compose` writes a file beside `docker-compose.yml`\n\n"
    "- `triptych plan apply plan.json --to kubernetes --autoscale --out overlay` writes a kustomize overlay",
)
def apply(
    ctx: typer.Context,
    plan: PlanFile,
    to: Annotated[planning.Target, typer.Option(help="Where it is to run.")] = "up",
    candidate: CandidateNumber = None,
    out: Annotated[
        Path | None,
        typer.Option(
            file_okay=False, help="Directory of the files.", show_default="PLAN-up, PLAN-compose or PLAN-kubernetes"
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model with weights, if the plan names another place.", show_default=False)
    ] = None,
    autoscale: Annotated[
        bool,
        typer.Option(
            "--autoscale", help="Let pools follow their load, from half of the plan to what the budget allows."
        ),
    ] = False,
    start: Annotated[bool, typer.Option("--start", help="With --to up: run the command.")] = False,
    compose_file: Annotated[Path, typer.Option(help="Triptych's file for docker compose.")] = planning.COMPOSE_FILE,
    base: Annotated[Path, typer.Option(file_okay=False, help="Triptych's base for kustomize.")] = planning.BASE,
) -> None:
    """Run a plan: print or start the command of *triptych up*, or write files for docker compose or Kubernetes.

    Further options are settings of services, as of *triptych up*, each in one word: `--NAME=VALUE`. They come after the plan's.
    """
    from triptych.cli.plan.apply import Application
    from triptych.cli.plan.apply import apply as run_plan
    from triptych.cli.show import plain_console

    with failures():
        application = Application(
            plan, to, candidate, out, model, autoscale, start, compose_file, base, tuple(ctx.args)
        )
        run_plan(application, plain_console())


@commands.command(
    epilog="Examples:\n\n- `triptych plan verify plan.json`\n\n"
    "- `triptych plan verify plan.json --url https://cluster.example --api-key KEY --duration 120 --json`"
)
def verify(
    plan: PlanFile,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    model: Annotated[
        str | None, typer.Option(help="Model to ask; by default the first that is served.", show_default=False)
    ] = None,
    candidate: CandidateNumber = None,
    duration: Annotated[
        float | None,
        typer.Option(min=0.1, max=WEEK_S, help="Seconds in which requests arrive.", show_default="the plan's"),
    ] = None,
    error: Annotated[
        float | None,
        typer.Option(min=0.001, max=10, help="Relative error of times that passes.", show_default="the plan's, or 0.3"),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="File for what was measured.", show_default="beside the profiles"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Offer a plan's workload to a running cluster, and show what was predicted beside what was measured.

    It passes if the objectives are met and all times with enough requests are within the error that the plan expects. Else the
    exit status is 1. The measured factors are kept for the next plan.
    """
    from triptych.cli.bench.load import Endpoint
    from triptych.cli.plan.verify import Verification
    from triptych.cli.plan.verify import verify as hold
    from triptych.cli.show import plain_console

    verification = Verification(plan, Endpoint(url, api_key), model, candidate, duration, error, calibration)
    passed = run(hold(verification, plain_console(), as_json=as_json))
    raise typer.Exit(0 if passed else 1)


@commands.command(hidden=True)
def again(plan: PlanFile) -> None:
    """Say whether another placement is better for a mix of requests: a pool manager asks, as JSON on standard input."""
    from triptych.cli.plan.again import answer

    with failures():
        answer(plan)
