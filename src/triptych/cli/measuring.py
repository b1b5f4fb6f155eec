"""The commands that measure: ``bench`` and ``profile``; and ``devices``, for which profiles are computed."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from triptych.cli.offered import WEEK_S, Offered, offered
from triptych.cli.options import DEFAULT_URL, ApiKey, Url, failures, run, taking
from triptych.cli.outcome import CliError
from triptych.domain.slo import USUAL_FACTOR
from triptych.domain.stage import ModelPart

commands = typer.Typer()

_USUAL_KV_CACHE_MIB = 256

Catalogue = Annotated[
    Path | None,
    typer.Option(
        exists=True,
        dir_okay=False,
        help="TOML file with further devices, or others in place of known ones.",
        show_default=False,
    ),
]


@commands.command(
    epilog="Examples:\n\n- `triptych bench --rate 2 --duration 30 --images 1:0.6,4:0.3,8:0.1 --output-tokens 32`\n\n"
    "- `triptych bench --sweep 1,2,4,8 --slo-ttft-ms 500 --slo-tpot-ms 50 --plot sweep.png` finds the goodput\n\n"
    "- `triptych bench --trace traces/servegen-mm-image --start 36000 --duration 60 --rate 4`\n\n"
    "- `triptych bench --url https://other.example/v1 --api-key KEY --model NAME` loads any OpenAI endpoint"
)
@taking("load", offered, duration=30.0, text_tokens="32", output_tokens="32")
def bench(
    load: Offered,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    model: Annotated[str | None, typer.Option(help="Model to ask; by default the first that is served.")] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Generate exactly that many tokens (vLLM's extension of the API).")
    ] = False,
    max_in_flight: Annotated[
        int,
        typer.Option(
            min=1, max=1 << 20, help="Most requests in flight; further ones are not sent and count as failed."
        ),
    ] = 4096,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all results to this file.", dir_okay=False)
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Write plots to this PNG (needs extra *bench*).", dir_okay=False)
    ] = None,
) -> None:
    """Load any OpenAI endpoint and measure it: TTFT, TPOT, SLO attainment, goodput.

    The load is open-loop: requests are sent when they are due, however slow the endpoint is, and latencies count from that
    time. Failed requests are counted by kind and miss their SLOs. The exit status is 1 if any could not be sent or broke;
    refusals (429) and timeouts are results.
    """
    from triptych.cli.bench import command
    from triptych.cli.bench.load import Endpoint
    from triptych.cli.show import plain_console

    with failures():
        job = command.Bench(
            endpoint=Endpoint(url, api_key, load.timeout_s, max_in_flight),
            model=model,
            workload=load.workload,
            ignore_eos=ignore_eos,
            objectives=load.objectives,
            attainment=load.attainment,
        )
        outputs = command.Outputs.checked(json_file, plot)
    succeeded = run(command.bench_and_write(job, outputs, plain_console()))
    raise typer.Exit(0 if succeeded else 1)


@commands.command(
    epilog="Examples:\n\n- `triptych profile --quick` measures the demo model in about a minute\n\n"
    "- `triptych profile --model ~/models/llava --part decoder --threads 8 --out profiles`\n\n"
    "- `triptych profile --model ~/models/llava --device cuda --dtype bfloat16 --plot`\n\n"
    "- `triptych profile --engine vllm --vllm-args='--max-num-seqs 64' --model ~/models/llava` measures the decoder with vLLM\n\n"
    "- `triptych profile --analytic --model config.json --device h100 --tensor-parallel 2` computes it, without weights or device"
)
def profile(
    model: Annotated[
        str,
        typer.Option(
            help="Model directory, OWNER/NAME on a hub, or *demo* for the bundled demo model; with --analytic also a `config.json`."
        ),
    ] = "demo",
    part: Annotated[
        list[ModelPart] | None,
        typer.Option(help="One part only; may be repeated. By default both.", show_default=False),
    ] = None,
    out: Annotated[Path, typer.Option(file_okay=False, help="Directory for the profiles.")] = Path("profiles"),
    quick: Annotated[bool, typer.Option("--quick", help="Few sizes and few repetitions.")] = False,
    dtype: Annotated[
        Literal["float32", "float16", "bfloat16"] | None,
        typer.Option(
            help="Of the computation: by default float32, with --analytic that of the configuration.",
            show_default=False,
        ),
    ] = None,
    device: Annotated[
        str, typer.Option(help="*cpu* or *cuda*; with --analytic a device of `triptych devices`.")
    ] = "cpu",
    threads: Annotated[int, typer.Option(min=1, max=256, help="Compute threads.")] = 1,
    kv_cache_mib: Annotated[
        int | None,
        typer.Option(
            min=1, max=1 << 24, help="KV memory of the decoder, in MiB.", show_default=str(_USUAL_KV_CACHE_MIB)
        ),
    ] = None,
    slo_factor: Annotated[
        float | None,
        typer.Option(
            min=1,
            max=1e6,
            help="Objectives of the load search, as a multiple of the latencies without load.",
            show_default=f"{USUAL_FACTOR:g}",
        ),
    ] = None,
    plot: Annotated[bool, typer.Option("--plot", help="Also write plots as PNG (needs extra *bench*).")] = False,
    engine: Annotated[
        Literal["triptych", "vllm"], typer.Option(help="Engine of the decoder, as of `triptych up`.")
    ] = "triptych",
    vllm_args: Annotated[
        str, typer.Option(help="With --engine vllm: vLLM's arguments of the instances.", show_default=False)
    ] = "",
    encoder_engine: Annotated[Literal["triptych", "vllm"], typer.Option(help="Engine of the encoder.")] = "triptych",
    encoder_vllm_args: Annotated[
        str, typer.Option(help="With --encoder-engine vllm: vLLM's arguments of the encoders.", show_default=False)
    ] = "",
    analytic: Annotated[
        bool,
        typer.Option("--analytic", help="Compute the profiles from the configuration and the catalogue of devices."),
    ] = False,
    tensor_parallel: Annotated[int, typer.Option(min=1, max=64, help="With --analytic: devices of an instance.")] = 1,
    catalogue: Catalogue = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            help="With --analytic: measured profile (or a directory of one per part) to fit the device's efficiencies to.",
            show_default=False,
        ),
    ] = None,
    calibrate_model: Annotated[
        str | None,
        typer.Option(help="Model that --calibrate was measured with, if it is another one.", show_default=False),
    ] = None,
) -> None:
    """Measure what a model's parts cost on this hardware, and write a profile of each.

    Times of encoding, preparing items, prefill and decode by size; latencies under load, and the largest load and batch
    within objectives. Nothing else should run meanwhile. After Ctrl-C the same command goes on where it was.

    With --engine vllm the decoder is measured as vLLM runs it in text instances, with the same --vllm-args.

    With --analytic nothing is measured, and neither weights nor the device are needed.
    """
    import importlib.util

    from triptych.cli.profile.command import Job, PartEngine
    from triptych.cli.profile.command import profile as measure
    from triptych.cli.show import plain_console

    with failures():
        engines = {
            ModelPart.ENCODER: PartEngine(encoder_engine, encoder_vllm_args),
            ModelPart.DECODER: PartEngine(engine, vllm_args),
        }
        parts = tuple(part or ModelPart)
        for of_part, prefix in ((ModelPart.ENCODER, "encoder-"), (ModelPart.DECODER, "")):
            if engines[of_part].vllm_args and not engines[of_part].by_vllm:
                raise CliError(f"--{prefix}vllm-args goes with --{prefix}engine vllm", caller=True)
            if engines[of_part].by_vllm and of_part not in parts:
                raise CliError(f"--{prefix}engine is that of the {of_part.value}, which --part leaves out", caller=True)
        by_vllm = [of_part for of_part in parts if engines[of_part].by_vllm]
        if analytic:
            from triptych.cli.profile.analytic import AnalyticJob, compute

            measured = {
                "--quick": quick,
                "--plot": plot,
                "--kv-cache-mib": kv_cache_mib is not None,
                "--slo-factor": slo_factor is not None,
                "--engine": engine == "vllm",
                "--encoder-engine": encoder_engine == "vllm",
            }
            if given := [option for option, is_given in measured.items() if is_given]:
                raise CliError(
                    f"{' and '.join(given)} would have no effect: leave out with --analytic what is for measuring",
                    caller=True,
                )
            if calibrate_model is not None and calibrate is None:
                raise CliError("--calibrate-model goes with --calibrate", caller=True)
            compute(
                AnalyticJob(
                    model, parts, out, device, tensor_parallel, dtype, threads, catalogue, calibrate, calibrate_model
                ),
                plain_console(),
            )
            return
        if tensor_parallel > 1 or catalogue or calibrate or calibrate_model:
            raise CliError(
                "--tensor-parallel, --catalogue, --calibrate and --calibrate-model go with --analytic", caller=True
            )
        if by_vllm and device != "cpu":
            raise CliError("--device: vLLM chooses its devices itself, by CUDA_VISIBLE_DEVICES", caller=True)
        if ModelPart.DECODER in by_vllm and kv_cache_mib is not None:
            raise CliError(
                "--kv-cache-mib: with --engine vllm it is --kv-cache-memory-bytes in --vllm-args", caller=True
            )
        needed = [
            ("torch", "encoder,text"),
            *([("vllm", "vllm")] if by_vllm else []),
            *([("matplotlib", "bench")] if plot else []),
        ]
        for module, extra in needed:
            if importlib.util.find_spec(module) is None:
                raise CliError(f"this needs {module}: install Triptych's extra '{extra}'", caller=True)
        job = Job(
            model,
            parts,
            out,
            quick,
            dtype or "float32",
            device,
            threads,
            (kv_cache_mib or _USUAL_KV_CACHE_MIB) << 20,
            slo_factor or USUAL_FACTOR,
            plot,
            engines,
        )
        steady = measure(job, plain_console())
    raise typer.Exit(0 if steady else 1)


@commands.command(
    epilog="Examples:\n\n- `triptych devices`\n\n- `triptych devices h100`\n\n- `triptych devices --catalogue own.toml --json`"
)
def devices(
    name: Annotated[
        str | None, typer.Argument(help="One of them, with all figures and sources.", show_default=False)
    ] = None,
    catalogue: Catalogue = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show the devices for which `triptych profile --analytic` computes profiles: rates, memory, links and prices."""
    from triptych.cli.devices import show
    from triptych.cli.show import plain_console

    with failures():
        show(name, catalogue, plain_console(), as_json=as_json)


workload = typer.Typer(no_args_is_help=True, help="Workloads of live clusters.")
commands.add_typer(workload, name="workload")


@workload.command(
    epilog="Examples:\n\n- `triptych workload record monday.jsonl` follows a local cluster until Ctrl-C\n\n"
    "- `triptych workload record burst.jsonl --duration 600 --admin http://10.0.0.4:9100`\n\n"
    "- `triptych simulate --trace burst.jsonl --duration 600` then replays it, as does `triptych bench`"
)
def record(
    out: Annotated[Path, typer.Argument(metavar="FILE.jsonl", dir_okay=False, help="File to write.")],
    url: Url = DEFAULT_URL,
    admin: Annotated[
        list[str] | None,
        typer.Option(
            help="Admin port of a router; may be repeated. By default those of the local *triptych up*.",
            show_default=False,
        ),
    ] = None,
    duration: Annotated[
        float | None,
        typer.Option(min=1, max=WEEK_S, help="Seconds to record; by default until Ctrl-C.", show_default=False),
    ] = None,
) -> None:
    """Record the requests of a live cluster: when they come, the sizes of what they have, and the lengths of their answers.

    What they say is not recorded, and tenants are numbered. A line is written when a request has ended. What is not in the file
    is counted; the exit status is 1 if something was missed.
    """
    from triptych.cli.recorder import Job
    from triptych.cli.recorder import record as follow
    from triptych.cli.show import plain_console

    job = Job(out, url, tuple(admin or ()), duration)
    with failures():
        job.check()
    raise typer.Exit(0 if run(follow(job, plain_console())) else 1)
