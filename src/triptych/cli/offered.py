"""Options of the commands that offer a load: the requests, when they come, and what is wanted of the answers."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from triptych.domain.bounds import MAX_INT31
from triptych.workload.requests import DURATION_S, MAX_CLIP_S

if TYPE_CHECKING:
    from triptych.workload.report import Objectives
    from triptych.workload.workload import Workload

WEEK_S = 7 * 86_400.0
_YEAR_S = 366 * 86_400.0
_LOAD = "Workload"
_PACES = ("rate", "sweep", "goodput")
"""Options of which one says how fast requests come."""


@dataclass(frozen=True, slots=True)
class Offered:
    """Values of the options of ``offered``."""

    workload: "Workload"
    objectives: "Objectives"
    attainment: float
    timeout_s: float


def gives_way(ctx: typer.Context, param: typer.CallbackParam, value: float | str | None) -> float | str | None:
    """The pace of a file of options, unless the command line has another one. A callback of each of these options."""
    sources = {name: ctx.get_parameter_source(name) for name in _PACES}
    own = sources[str(param.name)]
    is_overridden = any(source is not None and source.name == "COMMANDLINE" for source in sources.values())
    return None if is_overridden and own is not None and own.name == "DEFAULT_MAP" else value


def offered(
    rate: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            max=1e6,
            callback=gives_way,
            help="Requests per second.",
            show_default=False,
            rich_help_panel=_LOAD,
        ),
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(
            callback=gives_way,
            help="Several rates, one run each: `1,2,4,8`.",
            show_default=False,
            rich_help_panel=_LOAD,
        ),
    ] = None,
    duration: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            max=WEEK_S,
            help="Seconds during which requests arrive, per run.",
            show_default=f"{DURATION_S:g}, or a recording's length",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    burstiness: Annotated[
        float,
        typer.Option(
            min=0,
            max=100,
            help="Squared coefficient of variation of arrival gaps: 0 even, 1 Poisson, above 1 bursts.",
            rich_help_panel=_LOAD,
        ),
    ] = 1.0,
    images: Annotated[
        str, typer.Option(help="Images per request: a number, or `VALUE:WEIGHT,...`.", rich_help_panel=_LOAD)
    ] = "1",
    image_size: Annotated[
        str | None,
        typer.Option(
            help="Pixels, `WIDTHxHEIGHT`; by default 336x336, or as in the trace.",
            show_default=False,
            rich_help_panel=_LOAD,
        ),
    ] = None,
    videos: Annotated[
        str, typer.Option(help="Videos per request: a number, or `VALUE:WEIGHT,...`.", rich_help_panel=_LOAD)
    ] = "0",
    video_size: Annotated[
        str, typer.Option(help="Pixels of a frame, `WIDTHxHEIGHT`.", rich_help_panel=_LOAD)
    ] = "224x224",
    video_seconds: Annotated[
        float, typer.Option(min=0.1, max=MAX_CLIP_S, help="Length of a video.", rich_help_panel=_LOAD)
    ] = 4.0,
    sounds: Annotated[
        str, typer.Option(help="Sounds per request: a number, or `VALUE:WEIGHT,...`.", rich_help_panel=_LOAD)
    ] = "0",
    sound_seconds: Annotated[
        float, typer.Option(min=0.1, max=MAX_CLIP_S, help="Length of a sound.", rich_help_panel=_LOAD)
    ] = 5.0,
    text_tokens: Annotated[str, typer.Option(help="Tokens of text per request.", rich_help_panel=_LOAD)] = "64",
    output_tokens: Annotated[str, typer.Option(help="Tokens of an answer.", rich_help_panel=_LOAD)] = "128",
    trace: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            help="Requests of a file: JSON lines of `triptych workload record`, a CSV of Azure's LMM trace, or a ServeGen directory.",
            show_default=False,
            rich_help_panel=_LOAD,
        ),
    ] = None,
    start: Annotated[
        float, typer.Option(min=0, max=_YEAR_S, help="Start position in the trace, in seconds.", rich_help_panel=_LOAD)
    ] = 0.0,
    seed: Annotated[
        int,
        typer.Option(
            min=-MAX_INT31,
            max=MAX_INT31,
            help="Random seed; the same seed gives the same requests, at every rate.",
            rich_help_panel=_LOAD,
        ),
    ] = 0,
    timeout: Annotated[
        float,
        typer.Option(min=0.1, max=WEEK_S, help="Seconds until a request counts as failed.", rich_help_panel=_LOAD),
    ] = 300.0,
    slo_ttft_ms: Annotated[
        float | None, typer.Option(min=0, max=WEEK_S * 1000, help="SLO: time to first token.", rich_help_panel=_LOAD)
    ] = None,
    slo_tpot_ms: Annotated[
        float | None,
        typer.Option(
            min=0, max=WEEK_S * 1000, help="SLO: time per output token after the first.", rich_help_panel=_LOAD
        ),
    ] = None,
    attainment: Annotated[
        float,
        typer.Option(
            min=0, max=1, help="Share of requests that must meet the SLOs, for goodput.", rich_help_panel=_LOAD
        ),
    ] = 0.9,
) -> Offered:
    """Raises WorkloadError."""
    from triptych.workload.report import Objectives
    from triptych.workload.workload import Workload

    workload = Workload.from_options(
        mix=(images, text_tokens, output_tokens),
        image_size=image_size,
        clips=(videos, video_size, video_seconds),
        sounds=(sounds, sound_seconds),
        trace=trace,
        rates=(rate, sweep),
        start_s=start,
        duration_s=duration,
        burstiness=burstiness,
        seed=seed,
    )
    return Offered(workload, Objectives.of_ms(slo_ttft_ms, slo_tpot_ms), attainment, timeout)
