"""Times of the text engine's steps on a GPU: a prompt alone, and decode steps of many sequences.

One engine after the other over the same random weights, each alone on the device: ``ours``, with CUDA graphs; ``compiled``, with
``--compile-passes``; ``eager``, with ``--enforce-eager``. Medians. Without the kernels of paged attention, ``gathered``, keys and values
are gathered for each sequence, as where triton is missing. Runs on a CPU as well, where all but ``eager`` is the same.
"""

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from unittest import mock

import torch

from benchmarks import ending, machine
from benchmarks.engine import SHAPES, Target, make
from benchmarks.figures import add_json_option, write_figures
from triptych.domain.engine import EngineRequest
from triptych.domain.sampling import SamplingParams
from triptych.engine.compute import ComputeOptions
from triptych.engine.decoder import setup
from triptych.engine.decoder.options import EngineOptions
from triptych.engine.decoder.paged_attention import has_paged_kernel
from triptych.engine.decoder.text_engine import TransformersTextEngine

KINDS = ("ours", "compiled", "eager", "gathered")
CONTEXT_TOKENS = 256
"""Of each sequence when its decode steps are timed."""
STEP_TOKENS = 1024
"""Half of the token budget: no answer may end before all have begun."""
WARM_STEPS = 20


@dataclass(frozen=True, slots=True)
class Settings:
    model: str
    device: str
    dtype: str
    prompts: tuple[int, ...]
    rows: tuple[int, ...]
    rounds: int
    steps: int


@dataclass(frozen=True, slots=True)
class Row:
    kind: str
    start_s: float
    prompt_ms: dict[int, float]
    """By the prompt's tokens: until its first token."""
    decode_ms: dict[int, float]
    """By the number of sequences: one step of all."""


class Passes:
    """One engine under test."""

    def __init__(self, directory: Path, kind: str, settings: Settings) -> None:
        options = EngineOptions(
            kv_cache_bytes=(16 if settings.device != "cpu" else 1) << 30,
            max_sequences=max(settings.rows),
            cross_cache_bytes=0,
            token_budget=2 * STEP_TOKENS,
            enforce_eager=kind == "eager",
            compile_passes=kind == "compiled",
        )
        began_s = time.perf_counter()
        has_kernel = (lambda _: False) if kind == "gathered" else has_paged_kernel
        with mock.patch.object(setup, "has_paged_kernel", has_kernel):
            self._engine = TransformersTextEngine(
                directory / "multimodal",
                options,
                model_id="benchmark",
                max_embedding_bytes=0,
                compute=ComputeOptions(device=settings.device, dtype=settings.dtype),  # type: ignore[arg-type]
            )
        self.start_s = time.perf_counter() - began_s
        self._numbers = count()

    def prompt_ms(self, tokens: int, rounds: int) -> float:
        """The first one warms up."""
        return 1e3 * statistics.median(list(self._prompts(tokens, rounds + 1))[1:])

    def _prompts(self, tokens: int, rounds: int) -> Iterator[float]:
        for _ in range(rounds):
            self._add(tokens, 1)
            began_s = time.perf_counter()
            self._drain()
            yield time.perf_counter() - began_s

    def decode_ms(self, rows: int, steps: int) -> float:
        for _ in range(rows):
            self._add(CONTEXT_TOKENS, rows * CONTEXT_TOKENS // STEP_TOKENS + WARM_STEPS + steps + 2)
        decoding: set[str] = set()
        while len(decoding) < rows:
            decoding.update(output.request_id for output in self._engine.step())
        for _ in range(WARM_STEPS):
            self._engine.step()
        took: list[float] = []
        for _ in range(steps):
            began_s = time.perf_counter()
            assert len(self._engine.step()) == rows
            took.append(time.perf_counter() - began_s)
        self._drain()
        return 1e3 * statistics.median(took)

    def _add(self, prompt: int, answer: int) -> None:
        """No prompt is like another from its beginning on."""
        number = next(self._numbers)
        tokens = tuple(8 + (7919 * number + 31 * at) % 1000 for at in range(prompt))
        sampling = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True, seed=0)
        self._engine.add(EngineRequest(f"r{number}", tokens, (), sampling))

    def _drain(self) -> None:
        while self._engine.has_work:
            self._engine.step()


def measure(directory: Path, kind: str, settings: Settings) -> Row:
    engine = Passes(directory, kind, settings)
    prompts = {tokens: round(engine.prompt_ms(tokens, settings.rounds), 2) for tokens in settings.prompts}
    decodes = {rows: round(engine.decode_ms(rows, settings.steps), 2) for rows in settings.rows}
    return Row(kind, round(engine.start_s, 1), prompts, decodes)


def main() -> None:
    ending.by_sigterm()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json_option(parser)
    parser.add_argument("--model", default="qwen2.5-1.5b", choices=SHAPES)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--prompts", nargs="+", type=int, default=[32, 128, 500, 2048])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32, 128])
    parser.add_argument("--rounds", type=int, default=5, help="prompts of each length")
    parser.add_argument("--steps", type=int, default=30, help="decode steps of each number of sequences")
    parser.add_argument("--quick", action="store_true", help="a small model on a CPU: shows that it works")
    given = parser.parse_args()
    quick = Settings("qwen2.5-50m", "cpu", "float32", (16,), (1, 2), 1, 2)
    chosen = Settings(
        given.model, given.device, given.dtype, tuple(given.prompts), tuple(given.rows), given.rounds, given.steps
    )
    settings = quick if given.quick else chosen
    kinds = ("ours", "eager") if given.quick else tuple(given.kinds)
    on = machine.describe()
    print("; ".join(f"{key} {value}" for key, value in on.items()))
    print(settings)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="passes-benchmark") as made:
        make(settings.model, Path(made), Target(settings.device, settings.dtype))
        for kind in kinds:
            rows.append(measure(Path(made), kind, settings))
            print(rows[-1], flush=True)
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    write_figures(given.json, {"machine": on, "settings": asdict(settings), "rows": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
