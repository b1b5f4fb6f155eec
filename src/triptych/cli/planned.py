"""The command ``plan transfers``. Its heavy imports wait until it runs."""

from typing import Annotated, Literal

import typer

from triptych.cli import planning
from triptych.cli.measuring import Catalogue
from triptych.cli.options import failures
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
