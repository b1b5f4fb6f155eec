"""Analytic costs of decoders on a CPU beside measured ones: how far computed profiles err, and steps that decode and compute prompts.

Each model's tables are measured. Of each: errors of the analytic ones with the catalogue's efficiencies, with those fitted to
its own rows (at rows that were held out), and with those fitted to the other model. Then steps with both are timed, and compared with
``Costs.step_s`` of the measured tables and with the sum of a step and a prompt.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks import ending, machine
from benchmarks.engine import make
from benchmarks.figures import add_json_option, write_figures
from triptych.domain.architecture import DecoderArchitecture
from triptych.domain.embedding import DType
from triptych.domain.engine import EngineRequest
from triptych.domain.profile import TABLES, Measured, Origin, Profile, ProfileIdentity
from triptych.domain.sampling import SamplingParams
from triptych.domain.stage import ModelPart, Stage
from triptych.engine.checkpoint import open_checkpoint
from triptych.engine.compute import ComputeOptions
from triptych.engine.decoder.options import EngineOptions
from triptych.engine.decoder.text_engine import TransformersTextEngine
from triptych.engine.profiling import EFFORTS, Options, ProfiledDecoder, measure_tables
from triptych.families.architecture import Architecture
from triptych.families.model_files import ModelFiles
from triptych.policy.calibration import Sample, calibrate, decoder_samples
from triptych.policy.costs import Costs
from triptych.policy.roofline import Target
from triptych.runtime.catalogue import at_hand, load_catalogue

MODELS = ("demo", "qwen2.5-50m")
DECODES, CONTEXTS, PROMPTS = (1, 4, 16), (64, 256), (16, 64, 256)
_KV_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Errors:
    """Relative errors of a table, by where the efficiencies come from: medians."""

    model: str
    table: str
    rows: int
    catalogue: float
    held_out: float
    """Fitted to three of four rows, at the others."""
    other_model: float


@dataclass(frozen=True, slots=True)
class Step:
    """A step that decodes and computes a prompt: milliseconds."""

    model: str
    decodes: int
    context: int
    prompt: int
    measured_ms: float
    one_pass_ms: float
    """``Costs.step_s``."""
    sum_ms: float


class Model:
    """A model with its measured tables."""

    def __init__(self, name: str, directory: Path, threads: int) -> None:
        self.name = name
        make(name, directory)
        self._path = directory / "multimodal"
        self._compute = ComputeOptions(torch_threads=threads)
        self.decoder: DecoderArchitecture = Architecture.load(ModelFiles.load(self._path)).decoder
        effort = EFFORTS["quick"]
        options = Options(self._path, ModelPart.DECODER, self._compute, _KV_BYTES, effort, 5.0)
        tables: dict[str, list[Any]] = {"prefill": [], "decode": []}

        def take(report: Mapping[str, Any]) -> None:
            if report["kind"] == "row":
                tables[report["table"]].append(TABLES[report["table"]](*report["place"], report["seconds"]))

        measure_tables(ProfiledDecoder.load(open_checkpoint(self._path), options), None, effort.row_s, take)
        stages = frozenset({Stage.PREFILL, Stage.DECODE})
        self.profile = Profile(
            ProfileIdentity(ModelPart.DECODER, "0" * 16, stages, "here", DType.F32),
            Measured(Origin.MEASURED, ""),
            **{name: tuple(rows) for name, rows in tables.items()},
        )

    def samples(self, target: Target) -> tuple[Sample, ...]:
        return decoder_samples(self.profile, self.decoder, target)

    def steps(self, repeats: int) -> list[Step]:
        """Steps with a prompt, each timed so many times beside sequences that go on."""
        engine = TransformersTextEngine(
            self._path,
            EngineOptions(
                kv_cache_bytes=_KV_BYTES, max_sequences=max(DECODES) + 1, token_budget=max(DECODES) + max(PROMPTS)
            ),
            model_id=self.name,
            max_embedding_bytes=1 << 20,
            compute=self._compute,
        )
        token = next(token for token in count(8) if token not in engine.placeholder_ids)
        names, costs, steps = count(), Costs(self.profile), []

        def add(prompt: int, answer: int) -> str:
            number = next(names)
            sampling = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True, seed=0)
            salt = number.to_bytes(8, "big")
            engine.add(EngineRequest(str(number), (token,) * prompt, (), sampling, tenant_salt=salt))
            return str(number)

        for decodes in DECODES:
            for context in CONTEXTS:
                running = [add(context, 100) for _ in range(decodes)]
                for _ in running:
                    engine.step()
                for prompt in PROMPTS:
                    taken = []
                    for _ in range(repeats):
                        add(prompt, 1)
                        began_s = time.perf_counter()
                        engine.step()
                        taken.append(time.perf_counter() - began_s)
                    measured_s = statistics.median(taken)
                    one_s = costs.step_s(decodes, context, [(prompt, 0)]).value
                    sum_s = costs.decode_s(decodes, context).value + costs.prefill_s(prompt).value
                    steps.append(Step(self.name, decodes, context, prompt, 1e3 * measured_s, 1e3 * one_s, 1e3 * sum_s))
                for name in running:
                    engine.cancel(name)
                while engine.has_work:
                    engine.step()
        return steps


def errors(models: Sequence[Model], target: Target) -> list[Errors]:
    found = {model.name: calibrate(model.samples(target), target, model.name) for model in models}
    rows = []
    for model in models:
        other = next((found[another.name] for another in models if another is not model), found[model.name])
        for held_out in found[model.name].held_out:
            samples = [sample for sample in model.samples(target) if sample.table == held_out.table]
            rows.append(
                Errors(
                    model.name,
                    held_out.table,
                    len(samples),
                    _median(samples, target),
                    held_out.median,
                    _median(samples, target.reaching(other.efficiency)),
                )
            )
    return rows


def _median(samples: Sequence[Sample], target: Target) -> float:
    return statistics.median(abs(target.pass_s(sample.each) / sample.seconds - 1) for sample in samples)


def main() -> None:
    ending.by_sigterm()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=9, help="of each step with a prompt")
    parser.add_argument("--quick", action="store_true", help="the demo model alone: shows that it works")
    add_json_option(parser)
    options = parser.parse_args()
    names = MODELS[:1] if options.quick else MODELS
    repeats = 2 if options.quick else options.repeats
    said = machine.describe()
    print(f"{said['cpu']}, {options.threads} threads", flush=True)
    target = Target(at_hand(load_catalogue().device("cpu"), options.threads), DType.F32)
    with tempfile.TemporaryDirectory() as directory:
        models = []
        for name in names:
            folder = Path(directory) / name
            folder.mkdir()
            models.append(Model(name, folder, options.threads))
        rows = errors(models, target)
        for row in rows:
            print(
                f"{row.model:<12} {row.table:<8} {row.rows:3d} rows: median error {row.catalogue:5.0%} with the catalogue's efficiencies, "
                f"{row.held_out:5.0%} calibrated (held out), {row.other_model:5.0%} calibrated by the other model"
            )
        steps = [step for model in models for step in model.steps(repeats)]
    for name in names:
        own = [step for step in steps if step.model == name]
        as_one_pass = statistics.median(abs(step.one_pass_ms / step.measured_ms - 1) for step in own)
        summed = statistics.median(abs(step.sum_ms / step.measured_ms - 1) for step in own)
        print(
            f"{name:<12} {len(own):3d} steps with a prompt: median error {as_one_pass:.0%} as one pass, {summed:.0%} as the sum of both"
        )
    written = {"errors": [asdict(row) for row in rows], "steps": [asdict(step) for step in steps]}
    write_figures(options.json, {"machine": said, "threads": options.threads, "repeats": repeats, **written})


if __name__ == "__main__":
    main()
