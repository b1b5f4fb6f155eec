"""One system of ``benchmarks/engine.py`` in its own process: JSON lines of cases in, of figures out.

It also runs in another project's environment, so it imports only what its system needs.
"""

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

Request = tuple[list[int], int]
"""Token ids of a prompt, and the length of the answer."""
VLLM_STEP_TOKENS = 2048


class System(Protocol):
    """Continuous batching: requests join between steps."""

    def add(self, name: str, prompt: list[int], answer: int) -> None: ...

    def step(self) -> list[tuple[str, bool]]:
        """For each new token: its request, and whether it was the last."""
        ...


class Ours:
    def __init__(
        self,
        directory: Path,
        threads: int,
        most: int,
        device: str,
        dtype: str,
        *,
        eager: bool = False,
        compiled: bool = False,
        token_budget: int | None = None,
    ) -> None:
        import torch

        from triptych.domain.engine import EngineRequest
        from triptych.domain.sampling import SamplingParams
        from triptych.engine.compute import ComputeOptions
        from triptych.engine.decoder.options import EngineOptions
        from triptych.engine.decoder.text_engine import TransformersTextEngine

        self._request, self._sampling = EngineRequest, SamplingParams
        self._engine = TransformersTextEngine(
            directory / "multimodal",
            EngineOptions(
                kv_cache_bytes=(1 if device == "cpu" else 16) << 30,
                max_sequences=most,
                token_budget=token_budget,
                cross_cache_bytes=0,
                enforce_eager=eager,
                compile_passes=compiled,
            ),
            model_id="benchmark",
            max_embedding_bytes=0,
            compute=ComputeOptions(device=device, dtype=dtype, torch_threads=threads),  # type: ignore[arg-type]
        )
        assert torch.get_num_threads() == threads

    def add(self, name: str, prompt: list[int], answer: int) -> None:
        sampling = self._sampling(temperature=0, max_tokens=answer, ignore_eos=True, seed=0)
        self._engine.add(self._request(name, tuple(prompt), (), sampling))

    def step(self) -> list[tuple[str, bool]]:
        return [(output.request_id, output.finish_reason is not None) for output in self._engine.step()]


class Vllm:
    def __init__(self, directory: Path, threads: int, most: int) -> None:
        import torch

        vllm = import_module("vllm")
        self._sampling = vllm.SamplingParams
        config = json.loads((directory / "language" / "config.json").read_text())
        self._engine: Any = vllm.LLM(
            str(directory / "language"),
            dtype="float32",
            skip_tokenizer_init=True,
            max_num_seqs=most,
            max_num_batched_tokens=VLLM_STEP_TOKENS,
            max_model_len=min(2048, config["max_position_embeddings"]),
            disable_log_stats=True,
        ).llm_engine
        torch.set_num_threads(threads)
        self._told: dict[str, int] = {}

    def add(self, name: str, prompt: list[int], answer: int) -> None:
        sampling = self._sampling(temperature=0, max_tokens=answer, ignore_eos=True, detokenize=False)
        self._engine.add_request(name, {"prompt_token_ids": prompt}, sampling)

    def step(self) -> list[tuple[str, bool]]:
        events: list[tuple[str, bool]] = []
        for output in self._engine.step():
            tokens = len(output.outputs[0].token_ids)
            new = tokens - self._told.get(output.request_id, 0)
            self._told[output.request_id] = tokens
            if output.finished:
                del self._told[output.request_id]  # names are reused
            events += [(output.request_id, False)] * (new - 1) + [(output.request_id, output.finished)] * (new > 0)
        return events


class Generate:
    """``transformers``: padded batches, one after the other."""

    def __init__(self, directory: Path, threads: int, device: str, dtype: str) -> None:
        import torch
        import transformers

        torch.set_num_threads(threads)
        self._torch: Any = torch
        self._device = device
        hub: Any = transformers
        loaded = hub.AutoModelForCausalLM.from_pretrained(directory / "language", dtype=getattr(torch, dtype))
        self._model = loaded.to(device).eval()

    def batch(self, requests: list[Request]) -> None:
        longest = max(len(prompt) for prompt, _ in requests)
        ids = [[0] * (longest - len(prompt)) + prompt for prompt, _ in requests]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt, _ in requests]
        answer = max(answer for _, answer in requests)
        with self._torch.inference_mode():
            out = self._model.generate(
                self._torch.tensor(ids, device=self._device),
                attention_mask=self._torch.tensor(mask, device=self._device),
                max_new_tokens=answer,
                min_new_tokens=answer,
                do_sample=False,
                pad_token_id=0,
            )
            out.tolist()  # waits for the device


def throughput(system: System, requests: list[Request], concurrency: int) -> dict[str, float]:
    """A closed loop of ``concurrency`` requests."""
    left = [(f"r{number}", prompt, answer) for number, (prompt, answer) in enumerate(requests)][::-1]
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    running = 0
    while left or running:
        while left and running < concurrency:
            system.add(*left.pop())
            running += 1
        running -= sum(last for _, last in system.step())
    return _rates(requests, began_s, began_cpu_s)


def _rates(requests: list[Request], began_s: float, began_cpu_s: float) -> dict[str, float]:
    """Rates per second, and per second of this process's CPU time, which other load affects less."""
    tokens = sum(answer for _, answer in requests)
    took_s, took_cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    return {"tokens_per_s": tokens / took_s, "tokens_per_cpu_s": tokens / took_cpu_s}


def first_token(system: System, prompt: list[int], others: list[Request]) -> dict[str, float]:
    """Time to first token of a prompt while the others decode, and the longest gap between their tokens meanwhile."""
    for number, (other_prompt, answer) in enumerate(others):
        system.add(f"other{number}", other_prompt, answer)
    decoding: set[str] = set()
    while len(decoding) < len(others):
        decoding.update(name for name, _ in system.step())
    system.add("first", prompt, 1)
    began_s = last_s = time.perf_counter()
    began_cpu_s = time.process_time()
    ttft_s = ttft_cpu_s = gap_s = 0.0
    running = len(others) + 1
    while running:
        events = system.step()
        now_s = time.perf_counter()
        if not ttft_s and any(name == "first" for name, _ in events):
            ttft_s, ttft_cpu_s = now_s - began_s, time.process_time() - began_cpu_s
        if not ttft_s or now_s - began_s <= ttft_s:
            gap_s = max(gap_s, now_s - last_s)
        last_s = now_s
        running -= sum(last for _, last in events)
    return {"ttft_s": ttft_s, "ttft_cpu_s": ttft_cpu_s} | ({"gap_s": gap_s} if others else {})


def continuous(system: System) -> Callable[[dict[str, Any]], dict[str, float]]:
    def run(case: dict[str, Any]) -> dict[str, float]:
        if case["kind"] == "throughput":
            return throughput(system, case["requests"], case["concurrency"])
        return first_token(system, case["prompt"], case["others"])

    return run


def padded(system: Generate) -> Callable[[dict[str, Any]], dict[str, float]]:
    def run(case: dict[str, Any]) -> dict[str, float]:
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        if case["kind"] == "throughput":
            requests, size = case["requests"], case["concurrency"]
            for at in range(0, len(requests), size):
                system.batch(requests[at : at + size])
            return _rates(requests, began_s, began_cpu_s)
        if case["others"]:  # batches are static: the prompt waits for the others
            system.batch(case["others"])
        system.batch([(case["prompt"], 1)])
        return {"ttft_s": time.perf_counter() - began_s, "ttft_cpu_s": time.process_time() - began_cpu_s}

    return run


def answers(run: Callable[[dict[str, Any]], dict[str, float]]) -> Iterator[dict[str, float]]:
    yield {}
    for line in sys.stdin:
        yield run(json.loads(line))


def main() -> None:
    name, directory, threads, most = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    device, dtype = sys.argv[5:]
    told = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keep libraries' output out of the results
    if name == "generate":
        run = padded(Generate(directory, threads, device, dtype))
    elif name == "vllm":
        run = continuous(Vllm(directory, threads, most))
    else:
        variants: dict[str, dict[str, Any]] = {
            "ours": {},
            "long-steps": {"token_budget": VLLM_STEP_TOKENS},
            "eager": {"eager": True},
            "compiled": {"compiled": True},
        }
        run = continuous(Ours(directory, threads, most, device, dtype, **variants[name]))
    gc.collect()
    gc.freeze()  # as services do once they are up, and vLLM once its engine is: a collection of all that is loaded takes 0.2 s
    for answer in answers(run):
        told.write(json.dumps(answer) + "\n")
        told.flush()


if __name__ == "__main__":
    main()
