"""Tokens of a step of the text engine on a CPU: what a smaller token budget costs a long prompt, and what it spares all others.

One engine per token budget; one has the default, which is measured at start. They take turns. Of each, in each round: the CPU time of the
long prompt alone; then, while eight answers are decoded, the long prompt comes, and during its first step a prompt of 16 tokens that is
due earlier. Ratios are to the largest budget in the same round.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import NamedTuple

from benchmarks import ending, machine, random_llava
from benchmarks.engine import make
from benchmarks.figures import Quartiles, add_json_option, quartiles, shown, write_figures
from benchmarks.random_qwen import Shape
from triptych.domain.engine import EngineOutput, EngineRequest
from triptych.domain.queue_position import QueuePosition
from triptych.domain.sampling import SamplingParams
from triptych.engine.compute import ComputeOptions
from triptych.engine.decoder.options import EngineOptions
from triptych.engine.decoder.text_engine import TransformersTextEngine

MODELS = {"demo": 900, "qwen2.5-50m": 1000, "llava-160m": 2000}
"""Tokens of the long prompt."""
BUDGETS = (64, 128, 256, 512, 1024, 2048)
ANSWERS = 8
SHORT_TOKENS = 16


class Times(NamedTuple):
    """Seconds."""

    alone_s: float
    """CPU time of the long prompt without answers beside it."""
    short_s: float
    """From when the long prompt's first step begins, soon after which the short prompt comes, to the short one's first token."""
    gap_s: float
    """The longest time between two tokens of an answer meanwhile."""
    long_s: float
    """From when the long prompt comes to its first token."""


@dataclass(frozen=True, slots=True)
class Row:
    model: str
    prompt_tokens: int
    budget: int
    measured: bool
    """Whether it is the budget of an engine without options."""
    median: Times
    to_largest: Mapping[str, Quartiles | None]
    """By the names of ``Times``."""


class Engine:
    """An engine, asked one thing after the other."""

    def __init__(self, directory: Path, budget: int | None, threads: int) -> None:
        self.is_measured = budget is None
        self._engine = TransformersTextEngine(
            directory,
            EngineOptions(token_budget=budget),
            model_id="random",
            max_embedding_bytes=1 << 20,
            compute=ComputeOptions(torch_threads=threads),
        )
        self._token = next(token for token in count(8) if token not in self._engine.placeholder_ids)
        self._names = count()

    @property
    def budget(self) -> int:
        return self._engine.token_budget

    def times(self, prompt_tokens: int) -> Times:
        began_s = time.process_time()
        self._add(prompt_tokens, due_s=0)
        self._until_idle()
        alone_s = time.process_time() - began_s
        for _ in range(ANSWERS):
            self._add(SHORT_TOKENS, due_s=0, answer_tokens=100)
            self._engine.step()
        came_s = time.perf_counter()
        long = self._add(prompt_tokens, due_s=2)
        first_s: dict[str, float] = {}
        gaps_s = [self._step_s(first_s)]
        short = self._add(SHORT_TOKENS, due_s=1)
        while not {long, short} <= first_s.keys():
            gaps_s.append(self._step_s(first_s))
        for number in range(next(self._names)):
            self._engine.cancel(str(number))
        self._until_idle()
        return Times(alone_s, first_s[short] - came_s, max(gaps_s), first_s[long] - came_s)

    def _add(self, tokens: int, *, due_s: float, answer_tokens: int = 1) -> str:
        number = next(self._names)
        sampling = SamplingParams(temperature=0, max_tokens=answer_tokens, ignore_eos=True, seed=0)
        self._engine.add(
            EngineRequest(
                str(number),
                (self._token,) * tokens,
                (),
                sampling,
                tenant_salt=number.to_bytes(8, "big"),
                queue_position=QueuePosition(0, due_s, number),
            )
        )
        return str(number)

    def _step_s(self, first_s: dict[str, float]) -> float:
        """Notes when requests get their first token."""
        began_s = time.perf_counter()
        outputs = self._engine.step()
        now_s = time.perf_counter()
        for output in outputs:
            first_s.setdefault(output.request_id, now_s)
        return now_s - began_s

    def _until_idle(self) -> None:
        outputs: list[EngineOutput] = []
        while self._engine.has_work:
            outputs += self._engine.step()
        assert all(output.error is None for output in outputs)


def measured(model: str, budgets: Sequence[int], rounds: int, threads: int) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        if model == "llava-160m":
            random_llava.make(path, Shape())
        else:
            make(model, path)
            path /= "multimodal"
        engines = [Engine(path, budget, threads) for budget in (*budgets, None)]
        prompt = MODELS[model]
        rows: list[list[Times]] = [[] for _ in engines]
        for number in range(rounds + 1):
            order = range(len(engines)) if number % 2 else reversed(range(len(engines)))
            for index in order:
                times = engines[index].times(prompt)
                if number:
                    rows[index].append(times)
        largest = rows[len(budgets) - 1]
        for engine, all_times in zip(engines, rows, strict=True):
            ratios = [
                Times(*(value / other for value, other in zip(own, base, strict=True)))
                for own, base in zip(all_times, largest, strict=True)
            ]
            yield Row(
                model,
                prompt,
                engine.budget,
                engine.is_measured,
                Times(*(statistics.median(values) for values in zip(*all_times, strict=True))),
                {name: quartiles(getattr(ratio, name) for ratio in ratios) for name in Times._fields},
            )


def main() -> None:
    ending.by_sigterm()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--quick", action="store_true", help="the demo model and two budgets: shows that it works")
    add_json_option(parser)
    options = parser.parse_args()
    models: list[str] = options.models
    budgets: tuple[int, ...] = BUDGETS
    rounds: int = options.rounds
    if options.quick:
        models, budgets, rounds = ["demo"], (64, 2048), 2
    said = machine.describe()
    print(
        f"{said['cpu']}, {options.threads} threads, {rounds} rounds; ratios to a budget of {max(budgets)}", flush=True
    )
    rows: list[Row] = []
    for model in models:
        print(f"{model}, prompts of {MODELS[model]} tokens")
        for row in measured(model, budgets, rounds, options.threads):
            rows.append(row)
            kind = "measured" if row.measured else "given"
            times = "  ".join(
                f"{name.removesuffix('_s')} {1e3 * value:7.1f} ms{shown(row.to_largest[name])}"
                for name, value in row.median._asdict().items()
            )
            print(f"{row.budget:6d} {kind:<9} {times}", flush=True)
    written = [asdict(row) | {"median": row.median._asdict()} for row in rows]
    write_figures(options.json, {"machine": said, "threads": options.threads, "rounds": rounds, "rows": written})


if __name__ == "__main__":
    main()
