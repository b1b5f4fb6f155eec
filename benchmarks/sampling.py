"""Steps of the text engine that sample 32 sequences: in one batch, and row by row as the reference does.

The two alternate from step to step of one engine, which is possible since both choose the same tokens. Times are
medians of CPU time on one thread, of whole steps and of their sampling; ratios are within the run. Logits of random
models are scaled to a standard deviation of 3, since a random head gives all tokens about the same.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks import ending, machine
from benchmarks.engine import make
from benchmarks.figures import add_json_option, write_figures
from tests.unit.engine.decoder.reference_sampling import Sampler
from triptych.domain.engine import EngineRequest
from triptych.domain.sampling import SamplingParams
from triptych.engine.compute import ComputeOptions
from triptych.engine.decoder import text_engine
from triptych.engine.decoder.options import EngineOptions
from triptych.engine.decoder.sampling import Sampled, sample
from triptych.engine.decoder.sequence import EngineSequence

ROWS = 32
PROMPT_TOKENS = 16
DEVIATION = 3.0
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top-p 0.95": {"temperature": 0.8, "top_p": 0.95},
    "top-k 50, top-p 0.95": {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
    "min-p 0.05": {"temperature": 0.8, "min_p": 0.05},
    "penalties": {"temperature": 0.8, "top_k": 50, "frequency_penalty": 0.3, "repetition_penalty": 1.1},
    "5 log-probabilities": {"temperature": 0.8, "top_k": 50, "logprobs": 5},
}


@dataclass(frozen=True, slots=True)
class Figures:
    """Milliseconds of CPU time of a step, and of its sampling."""

    model: str
    case: str
    batch_step_ms: float
    rows_step_ms: float
    batch_ms: float
    rows_ms: float


class Rows:
    """``sample`` by the reference, row by row."""

    def __init__(self) -> None:
        self._samplers: dict[str, Sampler] = {}

    def sample(self, logits: torch.Tensor, sequences: Sequence[EngineSequence]) -> list[Sampled | Exception]:
        sampled: list[Sampled | Exception] = []
        for row, sequence in zip(logits.numpy(), sequences, strict=True):
            if sequence.sequence_id not in self._samplers:
                prompt = sequence.token_ids[: sequence.prompt_tokens]
                self._samplers[sequence.sequence_id] = Sampler(
                    sequence.sampling,
                    prompt=prompt,
                    eos_ids=sequence.end_ids,
                    choice=sequence.choice,
                    grammar=sequence.grammar,
                )
            sampled.append(Sampled(*self._samplers[sequence.sequence_id].choose(row, sequence.answer, sequence.length)))
        return sampled


def measure(model: str, steps: int) -> Iterator[Figures]:
    with tempfile.TemporaryDirectory() as directory:
        vocabulary = make(model, Path(directory))
        engine = text_engine.TransformersTextEngine(
            Path(directory) / "multimodal",
            EngineOptions(kv_cache_bytes=256 << 20, max_sequences=ROWS, cross_cache_bytes=0),
            model_id=model,
            max_embedding_bytes=0,
            compute=ComputeOptions(),
        )
        if model != "demo":
            _scale(engine._adapter)  # noqa: SLF001 - the only way to scale an untrained head
        for case, fields in CASES.items():
            sampling = SamplingParams(max_tokens=2 * steps + 4, ignore_eos=True, seed=1, **fields)
            for row in range(ROWS):
                prompt = tuple(8 + (31 * row + 7 * at) % (vocabulary - 8) for at in range(PROMPT_TOKENS))
                engine.add(EngineRequest(f"{case}/{row}", prompt, (), sampling))
            while engine.prefill_queue_position is not None:
                engine.step()
            yield Figures(model, case, *(1e3 * statistics.median(times_s) for times_s in _times(engine, steps)))
            for row in range(ROWS):
                engine.cancel(f"{case}/{row}")


def _times(engine: text_engine.TransformersTextEngine, steps: int) -> list[list[float]]:
    """Seconds of steps in one batch and row by row, and of the sampling in each (0 for greedy steps)."""
    times: list[list[float]] = [[], [], [], []]
    for at, how in ((0, sample), (1, Rows().sample)) * steps:
        spent_s = [0.0]

        def timed(*args: Any, how: Any = how, spent_s: list[float] = spent_s) -> Any:
            began_s = time.process_time()
            sampled = how(*args)
            spent_s[0] += time.process_time() - began_s
            return sampled

        with patch.object(text_engine, "sample", timed):
            began_s = time.process_time()
            outputs = engine.step()
            times[at].append(time.process_time() - began_s)
        times[2 + at].append(spent_s[0])
        assert len(outputs) == ROWS
        assert not any(output.error for output in outputs)
    return times


def _scale(adapter: Any) -> None:
    inner, deviation = adapter.logits, list[torch.Tensor]()

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = inner(hidden)
        deviation.append(made.std())
        return made * (DEVIATION / deviation[0])

    adapter.logits = logits


def main() -> None:
    ending.by_sigterm()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=["demo", "qwen2.5-50m", "qwen2.5-vocabulary"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="only show that it works")
    add_json_option(parser)
    args = parser.parse_args()
    models, steps = (["demo"], 2) if args.quick else (args.models, args.steps)
    said = machine.describe()
    print(said)
    figures = []
    for model in models:
        for measured in measure(model, steps):
            print(
                f"{measured.model:20} {measured.case:22} step {measured.batch_step_ms:7.2f} ms, by rows {measured.rows_step_ms:7.2f}: "
                f"{measured.batch_step_ms / measured.rows_step_ms:.2f}; sampling {measured.batch_ms:7.2f}, by rows {measured.rows_ms:7.2f}"
            )
            figures.append(asdict(measured))
    write_figures(args.json, {"machine": said, "rows": ROWS, "steps": steps, "figures": figures})


if __name__ == "__main__":
    main()
