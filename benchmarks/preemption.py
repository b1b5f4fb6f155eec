"""Preempted sequences of the text engine: copied to host memory and back, and recomputed; and states that are kept for prefixes.

Lengths: the time to copy a sequence out of the KV cache and back, beside the CPU time to compute it, by its length; alone,
the fastest of some repetitions of each, which take turns.

Pressure: the same requests in KV memory for half of them, with copies and without, in turn; both give the same answers.
Half of the requests come later and have priority, so that they take the memory of what is preempted. CPU time, the least
of some repetitions.

States: a random decoder of 40 million parameters with linear attention in three of four layers. CPU time to the first token of prompts
with the same beginning and ``QUESTION_TOKENS`` of their own: the first computes all, the second leaves a state where it parts from the
first, and later ones go on from there. The fastest of some repetitions, each with another beginning.

One thread; ratios are within the run.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import ending, machine
from benchmarks.engine import make, make_llava, transformers
from benchmarks.figures import add_json_option, write_figures
from triptych.domain.engine import EngineRequest
from triptych.domain.queue_position import QueuePosition
from triptych.domain.sampling import SamplingParams
from triptych.engine.compute import ComputeOptions
from triptych.engine.decoder.options import EngineOptions
from triptych.engine.decoder.setup import KvOptions
from triptych.engine.decoder.text_engine import TransformersTextEngine

LAYOUTS = {"contiguous": KvOptions(16, contiguous=True), "scattered": KvOptions(16, contiguous=False)}
LENGTHS = (16, 64, 256, 900)
PROMPTS = (64, 256, 700)
REQUESTS = 12
ANSWER_TOKENS = 160
STEP_TOKENS = 2048
"""Above each prompt, and the same in all engines: by default an engine measures its own."""
SHARED_TOKENS = (256, 1024, 3072)
QUESTION_TOKENS = 96
"""More than a border apart, so that no prompt ends at the last border that all share."""
PARTS = ("preempted", "states")
Answers = dict[str, list[int]]


@dataclass(frozen=True, slots=True)
class Length:
    model: str
    layout: str
    tokens: int
    nbytes: int
    copied_ms: float
    """Out and back."""
    computed_ms: float


@dataclass(frozen=True, slots=True)
class Pressure:
    model: str
    prompt_tokens: int
    preemptions: int
    copied_back: int
    restored_tokens: int
    copied_s: float
    recomputed_s: float


@dataclass(frozen=True, slots=True)
class Shared:
    """Times to the first token, ms."""

    shared_tokens: int
    state_nbytes: int
    first_ms: float
    second_ms: float
    later_ms: float


class Prompts:
    """Random prompts, none of which comes twice."""

    def __init__(self, vocabulary: int) -> None:
        self._rng = random.Random(0)
        self._vocabulary = vocabulary

    def of(self, tokens: int) -> tuple[int, ...]:
        return tuple(self._rng.choices(range(8, self._vocabulary), k=tokens))


def engine_of(
    directory: Path, kv: KvOptions, *, kv_bytes: int = 256 << 20, copied_bytes: int | None = 0
) -> TransformersTextEngine:
    return TransformersTextEngine(
        directory / "multimodal",
        EngineOptions(
            kv_cache_bytes=kv_bytes, preempted_kv_bytes=copied_bytes, max_sequences=REQUESTS, token_budget=STEP_TOKENS
        ),
        model_id="benchmark",
        max_embedding_bytes=0,
        compute=ComputeOptions(),
        kv=kv,
    )


def request(name: str, prompt: tuple[int, ...], answer_tokens: int, queue_position: QueuePosition) -> EngineRequest:
    return EngineRequest(
        name,
        prompt,
        (),
        SamplingParams(temperature=0, max_tokens=answer_tokens, ignore_eos=True, seed=0),
        queue_position=queue_position,
    )


def lengths(model: str, directory: Path, prompts: Prompts, rounds: int) -> Iterator[Length]:
    for layout, kv in LAYOUTS.items():
        engine = engine_of(directory, kv)
        mover = engine._mover  # noqa: SLF001 - by itself, the engine copies only what it preempts
        assert mover is not None
        for tokens in LENGTHS:
            copied_s: list[float] = []
            computed_s: list[float] = []
            for _ in range(rounds):
                copied_s.append(mover.round_trip_s(tokens))
                engine.add(request("one", prompts.of(tokens), 1, QueuePosition(0, 0.0, 0)))
                began_s = time.process_time()
                step(engine, {})
                computed_s.append(time.process_time() - began_s)
            nbytes = tokens * mover.cache.kind.position_nbytes
            yield Length(model, layout, tokens, nbytes, 1e3 * min(copied_s), 1e3 * min(computed_s))


def step(engine: TransformersTextEngine, answers: Answers) -> None:
    for output in engine.step():
        assert output.error is None
        answers.setdefault(output.request_id, []).extend(output.token_ids)


def pressure(model: str, directory: Path, prompts: Prompts, rounds: int) -> Iterator[Pressure]:
    kv = LAYOUTS["contiguous"]
    slot_nbytes = (256 << 20) // engine_of(directory, kv).kv_tokens
    for tokens in PROMPTS:
        requests = [
            request(str(at), prompts.of(tokens), ANSWER_TOKENS, QueuePosition(int(at < REQUESTS // 2), 0.0, at))
            for at in range(REQUESTS)
        ]
        kv_bytes = REQUESTS // 2 * (tokens + ANSWER_TOKENS // 4) * slot_nbytes
        copied_s: list[float] = []
        recomputed_s: list[float] = []
        for _ in range(rounds):
            engine = engine_of(directory, kv, kv_bytes=kv_bytes, copied_bytes=None)
            took_s, answers = answered(engine, requests)
            copied_s.append(took_s)
            recomputing = engine_of(directory, kv, kv_bytes=kv_bytes)
            took_s, expected = answered(recomputing, requests)
            recomputed_s.append(took_s)
            assert answers == expected
            assert engine.preemptions == recomputing.preemptions
        copies = engine.kv_copies
        yield Pressure(
            model, tokens, engine.preemptions, copies.back, copies.back_tokens, min(copied_s), min(recomputed_s)
        )


def answered(engine: TransformersTextEngine, requests: Sequence[EngineRequest]) -> tuple[float, Answers]:
    """CPU seconds and answers. The second half of the requests comes when an eighth of all tokens is there."""
    answers: Answers = {}
    began_s = time.process_time()
    for request in requests[: REQUESTS // 2]:
        engine.add(request)
    while sum(map(len, answers.values())) < REQUESTS * ANSWER_TOKENS // 8:
        step(engine, answers)
    for request in requests[REQUESTS // 2 :]:
        engine.add(request)
    while engine.has_work:
        step(engine, answers)
    return time.process_time() - began_s, answers


def states(directory: Path, rounds: int) -> Iterator[Shared]:
    text = transformers.Qwen3_5TextConfig(
        vocab_size=16_000,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=8,
        linear_num_value_heads=8,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        max_position_embeddings=4096,
    )
    make_llava(text, directory / "multimodal")
    prompts, engine = Prompts(text.vocab_size), engine_of(directory, KvOptions(), copied_bytes=None)
    assert engine.kv is not None
    for tokens in SHARED_TOKENS:
        took: list[list[float]] = []
        for _ in range(rounds):
            shared, times = prompts.of(tokens), []
            for cached in (0, 0, tokens, tokens):
                prompt = shared + prompts.of(QUESTION_TOKENS)
                engine.add(request("one", prompt, 1, QueuePosition(0, 0.0, 0)))
                began_s, before = time.process_time(), engine.prefix_hits_tokens
                while engine.has_work:
                    step(engine, {})
                times.append(time.process_time() - began_s)
                assert engine.prefix_hits_tokens - before == cached
            took.append(times)
        first, second, *later = (1e3 * min(times) for times in zip(*took, strict=True))
        nbytes = sum(segment.nbytes for segment in engine.kv.kind.segments(0, tokens))
        yield Shared(tokens, nbytes, first, second, min(later))


def main() -> None:
    ending.by_sigterm()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=["demo", "qwen2.5-50m"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--quick", action="store_true", help="only show that it works")
    add_json_option(parser)
    args = parser.parse_args()
    models, rounds = (["demo"], 1) if args.quick else (args.models, args.rounds)
    if "preempted" not in args.parts:
        models = []
    said = machine.describe()
    print(said)
    by_length: list[Length] = []
    under_pressure: list[Pressure] = []
    for model in models:
        with tempfile.TemporaryDirectory() as directory:
            prompts = Prompts(make(model, Path(directory)))
            for length in lengths(model, Path(directory), prompts, 3 * rounds):
                by_length.append(length)
                print(
                    f"{length.model:12} {length.layout:10} {length.tokens:5} tokens, {length.nbytes / 2**20:6.2f} MiB: copied in "
                    f"{length.copied_ms:7.3f} ms, computed in {length.computed_ms:8.2f}: {length.computed_ms / length.copied_ms:5.0f} times"
                )
            for many in pressure(model, Path(directory), prompts, rounds):
                under_pressure.append(many)
                print(
                    f"{many.model:12} prompts of {many.prompt_tokens}: {many.preemptions} preempted, "
                    f"{many.copied_back} copied back, {many.restored_tokens} tokens not recomputed; "
                    f"{many.copied_s:.2f} s, recomputed {many.recomputed_s:.2f}: {many.copied_s / many.recomputed_s:.2f}"
                )
    kept: list[Shared] = []
    if "states" in args.parts:
        with tempfile.TemporaryDirectory() as directory:
            for many_share in states(Path(directory), rounds):
                kept.append(many_share)
                print(
                    f"{many_share.shared_tokens:5} shared tokens, a state of {many_share.state_nbytes / 2**20:5.2f} MiB: first token in "
                    f"{many_share.first_ms:7.1f} ms, second prompt {many_share.second_ms:7.1f}, later ones {many_share.later_ms:7.1f}"
                )
    told = {"machine": said, "requests": REQUESTS, "answer_tokens": ANSWER_TOKENS, "rounds": rounds}
    told |= {
        "lengths": [asdict(length) for length in by_length],
        "pressure": [asdict(figures) for figures in under_pressure],
        "states": [asdict(figures) for figures in kept],
    }
    write_figures(args.json, told)


if __name__ == "__main__":
    main()
