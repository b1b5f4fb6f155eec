"""Cost and gain of disaggregating a small model on one machine: the cluster against ``transformers`` in one process.

Side by side in one run, same model, same weights, same images (each unique, so that no cache helps), greedy, float32,
equal forced output lengths, one torch thread per process:

- ``monolith``: one ``generate`` call after another in one process, without any server around it. It does not pay
  for HTTP, gRPC or processes, so it is expected to win at one request at a time.
- ``1 encoder`` and ``2 encoders``: the cluster over REST with streaming, requests in a closed loop.

The demo model is tiny: this measures the system around a model. Ratios are within the run; absolute times depend on
the machine and its other load.
"""

import argparse
import asyncio
import random
import statistics
import time
from base64 import b64encode
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import torch
import transformers
from PIL import Image
from transformers.generation.streamers import BaseStreamer

from benchmarks import ending, machine
from benchmarks.figures import add_json_option, write_figures
from triptych.cli.cluster import LocalCluster
from triptych.demo import MODEL_DIR, MODEL_ID

DIGITS = sorted((Path(__file__).parents[1] / "examples" / "digits").glob("*.png"))
QUESTION = "Read the digits in order."
OUTPUT_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Case:
    images: int
    concurrency: int
    requests: int


@dataclass(frozen=True, slots=True)
class Result:
    system: str
    images: int
    concurrency: int
    requests: int
    ttft_p50_ms: float
    ttft_p99_ms: float
    requests_per_s: float


Ask = Callable[[list[bytes]], Awaitable[float]]
"""Sends one request; returns its time to first token, in seconds."""


def unique_image(rng: random.Random) -> bytes:
    """A digit with noise in one corner: unique, and as hard to encode as any."""
    image = Image.open(rng.choice(DIGITS)).convert("RGB")
    for _ in range(4):
        image.putpixel((rng.randrange(8), rng.randrange(8)), tuple(rng.randbytes(3)))
    out = BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


async def measure(system: str, ask: Ask, case: Case, seed: int) -> Result:
    """Run a case in a closed loop with ``case.concurrency`` callers."""
    rng = random.Random(seed)
    pending = [[unique_image(rng) for _ in range(case.images)] for _ in range(case.requests)]
    times: list[float] = []

    async def caller() -> None:
        while pending:
            times.append(await ask(pending.pop()))

    began_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(case.concurrency):
            group.create_task(caller())
    took_s = time.perf_counter() - began_s
    return Result(
        system=system,
        images=case.images,
        concurrency=case.concurrency,
        requests=case.requests,
        ttft_p50_ms=1e3 * statistics.median(times),
        ttft_p99_ms=1e3 * sorted(times)[min(len(times) - 1, int(0.99 * len(times)))],
        requests_per_s=case.requests / took_s,
    )


def monolith() -> Ask:
    """``transformers`` in this process, one request at a time: the model is not reentrant."""
    torch.set_num_threads(1)
    hub: Any = transformers  # typed only in part
    model = hub.LlavaForConditionalGeneration.from_pretrained(MODEL_DIR, dtype=torch.float32).eval()
    processor = hub.AutoProcessor.from_pretrained(MODEL_DIR)
    turn = asyncio.Lock()

    class FirstToken(BaseStreamer):
        """``generate`` passes the prompt first, then each token."""

        def __init__(self) -> None:
            self.at_s: list[float] = []

        def put(self, _: object) -> None:
            self.at_s.append(time.perf_counter())

        def end(self) -> None:
            pass

    def generate(images: list[bytes]) -> float:
        content = [{"type": "image"}] * len(images) + [{"type": "text", "text": QUESTION}]
        prompt = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        opened = [Image.open(BytesIO(data)) for data in images] or None
        inputs = processor(text=prompt, images=opened, return_tensors="pt")
        streamer = FirstToken()
        with torch.inference_mode():
            model.generate(
                **inputs,
                max_new_tokens=OUTPUT_TOKENS,
                min_new_tokens=OUTPUT_TOKENS,
                do_sample=False,
                streamer=streamer,
            )
        return streamer.at_s[1]

    async def ask(images: list[bytes]) -> float:
        began_s = time.perf_counter()
        async with turn:
            return await asyncio.to_thread(generate, images) - began_s

    return ask


def over_rest(client: httpx.AsyncClient, url: str) -> Ask:
    async def ask(images: list[bytes]) -> float:
        urls = ["data:image/png;base64," + b64encode(data).decode() for data in images]
        content: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        body = {
            "model": MODEL_ID,
            "messages": [{"role": "user", "content": [*content, {"type": "text", "text": QUESTION}]}],
            "temperature": 0,
            "max_tokens": OUTPUT_TOKENS,
            "ignore_eos": True,
            "stream": True,
        }
        began_s = time.perf_counter()
        first_s = None
        async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if first_s is None and '"content":"' in line and '"content":""' not in line:
                    first_s = time.perf_counter()
                if line.startswith('data: {"error"'):
                    raise RuntimeError(line)
        if first_s is None:
            raise RuntimeError("an answer without a token")
        return first_s - began_s

    return ask


async def run(cases: Sequence[Case], rounds: int) -> list[Result]:
    """All systems alternate within each round, so that a slow phase of the machine affects all."""
    results: list[Result] = []
    async with (
        httpx.AsyncClient(timeout=120, trust_env=False) as client,
        LocalCluster(roles="E:1,PD:1") as one_encoder,
        LocalCluster(roles="E:2,PD:1") as two_encoders,
    ):
        systems = {
            "monolith": monolith(),
            "1 encoder": over_rest(client, one_encoder.url),
            "2 encoders": over_rest(client, two_encoders.url),
        }
        for name, ask in systems.items():
            await measure(name, ask, Case(2, 2, 8), seed=0)
        for number in range(1, rounds + 1):
            for case in cases:
                for name, ask in systems.items():
                    results.append(await measure(name, ask, case, seed=number))
    return results


def report(results: list[Result]) -> list[dict[str, Any]]:
    """Medians over the rounds, with the ratio to the same run's monolith."""
    rows: list[dict[str, Any]] = []
    groups: dict[tuple[int, int, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result.images, result.concurrency, result.system), []).append(result)
    for (images, concurrency, _), group in groups.items():
        base = groups[images, concurrency, "monolith"]
        ttft, rate = (
            statistics.median(getattr(result, name) for result in group) for name in ("ttft_p50_ms", "requests_per_s")
        )
        base_ttft, base_rate = (
            statistics.median(getattr(result, name) for result in base) for name in ("ttft_p50_ms", "requests_per_s")
        )
        rows.append(
            {
                **asdict(group[0]),
                "ttft_p50_ms": round(ttft, 2),
                "ttft_p99_ms": round(statistics.median(result.ttft_p99_ms for result in group), 2),
                "requests_per_s": round(rate, 2),
                "ttft_ratio": round(ttft / base_ttft, 2),
                "rate_ratio": round(rate / base_rate, 2),
            }
        )
    return rows


def main() -> None:
    ending.by_sigterm()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json_option(parser)
    parser.add_argument("--requests", type=int, default=48, help="per case")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one case of two requests: shows that it works")
    options = parser.parse_args()
    cases = [Case(images, concurrency, options.requests) for images in (0, 1, 4, 8) for concurrency in (1, 8)]
    if options.quick:
        options.requests, options.rounds, cases = 2, 1, [Case(1, 1, 2)]
    on = machine.describe()
    print("; ".join(f"{key} {value}" for key, value in on.items()))
    print(f"{options.requests} requests per case, {options.rounds} rounds, {OUTPUT_TOKENS} output tokens")
    rows = report(asyncio.run(run(cases, options.rounds)))
    print(
        f"{'images':>6} {'conc.':>5} {'system':>11} {'TTFT p50':>9} {'p99':>8} {'req/s':>7} {'TTFT x':>7} {'rate x':>7}"
    )
    for row in rows:
        print(
            f"{row['images']:>6} {row['concurrency']:>5} {row['system']:>11} {row['ttft_p50_ms']:>7} ms "
            f"{row['ttft_p99_ms']:>5} ms {row['requests_per_s']:>7} {row['ttft_ratio']:>7} {row['rate_ratio']:>7}"
        )
    settings = {"requests": options.requests, "rounds": options.rounds, "output_tokens": OUTPUT_TOKENS}
    write_figures(options.json, {"machine": on, "settings": settings, "rows": rows})


if __name__ == "__main__":
    main()
