"""What one tenant that sends ten times its share costs the others: real processes, text only.

A gateway with keys, a router and a text instance whose engine sleeps as a synthetic profile says. The others send half of their shares,
as a Poisson process of streamed requests, without the one (``alone``) and beside it (``beside``; ``untold`` with policy ``tenants`` none).
TTFT is the client's: from sending a request to the first token. What is sent in the first quarter is not counted;
what fails counts with its timeout.

Two workloads: with ``long`` prompts, which are computed in chunks, an engine can turn to another request after each chunk. With
``short`` ones and few places a request waits until an answer ends, whoever it is from, and for all prompts of a step.
"""

import argparse
import asyncio
import tempfile
import time
from dataclasses import asdict, dataclass
from http import HTTPStatus
from pathlib import Path
from random import Random
from typing import Any

import httpx

from benchmarks import machine
from benchmarks.figures import add_json_option, write_figures
from triptych.cli.cluster import LocalCluster
from triptych.demo import MODEL_ID
from triptych.engine.delay import synthetic_decoder_profile, synthetic_encoder_profile
from triptych.runtime.profiles import write_profile
from triptych.services.gateway.keys import new_key
from triptych.workload.report import percentile

HOG = "hog"

_CAPACITY_SHARE = 0.9
"""Of what the engine does with all places taken, to leave its processes some time."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that are alike, and the engine that they meet."""

    name: str
    prompt_tokens: int
    answer_tokens: int
    places: int
    """Most sequences in a step."""
    budget: int
    """Most tokens in a step."""
    step_s: float
    """Of a chunk of a prompt, and of one token for all answers."""
    token_s: float
    """Of a token of a prompt."""

    @property
    def per_s(self) -> float:
        """Requests that the text instance can do."""
        chunks = -(-self.prompt_tokens // self.budget)
        prompt_s = chunks * self.step_s + self.prompt_tokens * self.token_s
        return _CAPACITY_SHARE / (prompt_s + self.answer_tokens / self.places * self.step_s)


@dataclass(frozen=True, slots=True)
class Settings:
    seconds: float = 60.0
    others: int = 3
    workloads: tuple[Workload, ...] = (
        Workload("long", 512, 8, places=64, budget=128, step_s=0.002, token_s=0.0002),
        Workload("short", 32, 8, places=16, budget=2048, step_s=0.1, token_s=0.0),
    )
    times: float = 10.0
    """What the one sends, in shares."""
    timeout_s: float = 10.0
    seed: int = 7


QUICK = Settings(seconds=6.0, workloads=Settings().workloads[:1])


@dataclass(frozen=True, slots=True)
class Row:
    """Times in milliseconds. Requests of the others, and of the one."""

    workload: str
    row: str
    others: int
    others_failed: int
    ttft_p50_ms: float
    ttft_p99_ms: float
    one: int
    one_answered: int
    one_refused: int


@dataclass(frozen=True, slots=True)
class _Reply:
    sent_s: float
    """Since the first one of all."""
    status: int
    ttft_s: float
    """0 if there was no token."""

    @property
    def answered(self) -> bool:
        return self.status == HTTPStatus.OK and self.ttft_s > 0


async def _ask(client: httpx.AsyncClient, key: str, text: str, tokens: int, timeout_s: float) -> tuple[int, float]:
    """The status and the TTFT in seconds; 0 without an answer."""
    body = {
        "model": MODEL_ID,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
    }
    headers = {"authorization": f"Bearer {key}", "x-request-timeout": f"{timeout_s:g}"}
    sent_s = time.perf_counter()
    first_s = 0.0
    async with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
        async for line in response.aiter_lines():
            if '"content":"' in line and '"role"' not in line and not first_s:
                first_s = time.perf_counter() - sent_s
            if '"error"' in line:
                return response.status_code, 0.0
        return response.status_code, first_s


async def _long_text(client: httpx.AsyncClient, key: str, tokens: int) -> str:
    """A text of so many tokens, or hardly fewer, as the prompt of a chat."""

    async def count(words: int) -> int:
        messages = [{"role": "user", "content": "q " * words}]
        asked = {"model": MODEL_ID, "messages": messages}
        found = await client.post("/tokenize", json=asked, headers={"authorization": f"Bearer {key}"})
        return int(found.raise_for_status().json()["count"])

    none, hundred = await count(0), await count(100)
    return "q " * int(100 * (tokens - none) / (hundred - none))


async def _send(
    client: httpx.AsyncClient, name: str, key: str, per_s: float, text: str, workload: Workload, settings: Settings
) -> list[_Reply]:
    rng, began_s = Random(f"{settings.seed}/{name}"), time.perf_counter()
    found: list[_Reply] = []

    async def sent(at_s: float, number: int) -> None:
        asked = await _ask(client, key, f"{number} {text}", workload.answer_tokens, settings.timeout_s)
        found.append(_Reply(at_s, *asked))

    async with asyncio.TaskGroup() as group:
        at_s, number = rng.expovariate(per_s), 0
        while at_s < settings.seconds:
            await asyncio.sleep(began_s + at_s - time.perf_counter())
            group.create_task(sent(at_s, number))
            at_s, number = at_s + rng.expovariate(per_s), number + 1
    return found


async def _row(row: str, workload: Workload, settings: Settings, directory: Path) -> Row:
    keys, lines = {}, ""
    for name in (HOG, *(f"other-{number}" for number in range(settings.others))):
        keys[name], more = new_key(name)
        lines += more
    (directory / "keys.toml").write_text(lines)
    delayed = ("--delay-profile", str(directory / "profiles"))
    engine = ("--max-sequences", str(workload.places), "--token-budget", str(workload.budget))
    options = {
        "encoder": delayed,
        "text": (*delayed, *engine),
        "router": ("--tenants", "none" if row == "untold" else "weighted"),
        "gateway": ("--keys", str(directory / "keys.toml")),
    }
    share_per_s = workload.per_s / (settings.others + 1)
    limits = httpx.Limits(max_connections=None)
    async with (
        LocalCluster(roles="E:1,PD:1", options=options) as cluster,
        httpx.AsyncClient(base_url=cluster.url, timeout=60, limits=limits, trust_env=False) as client,
        asyncio.TaskGroup() as group,
    ):
        text = await _long_text(client, keys[HOG], workload.prompt_tokens)
        sending = {}
        for name, key in keys.items():
            if name != HOG or row != "alone":
                per_s = share_per_s * (settings.times if name == HOG else 0.5)
                sending[name] = group.create_task(_send(client, name, key, per_s, text, workload, settings))
        await asyncio.wait(sending.values())
    of_hog = sending[HOG].result() if HOG in sending else []
    rest = [reply for name, task in sending.items() if name != HOG for reply in task.result()]
    settled = [reply for reply in rest if reply.sent_s >= settings.seconds / 4]
    ttfts_ms = [1000 * (reply.ttft_s if reply.answered else settings.timeout_s) for reply in settled]
    return Row(
        workload.name,
        row,
        len(settled),
        sum(not reply.answered for reply in settled),
        percentile(ttfts_ms, 50),
        percentile(ttfts_ms, 99),
        len(of_hog),
        sum(reply.answered for reply in of_hog),
        sum(reply.status == HTTPStatus.TOO_MANY_REQUESTS for reply in of_hog),
    )


def measure(settings: Settings) -> dict[str, Any]:
    rows: list[Row] = []
    ratios: dict[str, float] = {}
    for workload in settings.workloads:
        found = {row: _measured(row, workload, settings) for row in ("alone", "beside", "untold")}
        rows += found.values()
        ratios[workload.name] = found["beside"].ttft_p99_ms / found["alone"].ttft_p99_ms
        print(
            f"{workload.name}: P99 TTFT of the others beside the one {ratios[workload.name]:.2f} times that without it"
        )
    return {
        "machine": machine.describe(),
        "settings": asdict(settings),
        "rows": [asdict(row) for row in rows],
        "p99_ratios": ratios,
    }


def _measured(row: str, workload: Workload, settings: Settings) -> Row:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        profiles = directory / "profiles"
        encoder = synthetic_encoder_profile(pass_s=0.01, token_s=0.0001, load_s=0.1)
        decoder = synthetic_decoder_profile(
            step_s=workload.step_s, sequence_s=0.0, prefill_token_s=workload.token_s, load_s=0.1
        )
        write_profile(profiles / "encoder.json", encoder)
        write_profile(profiles / "decoder.json", decoder)
        found = asyncio.run(_row(row, workload, settings, directory))
    print(found, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    add_json_option(parser)
    parser.add_argument("--quick", action="store_true", help="a few seconds: shows that it works")
    parser.add_argument("--seconds", type=float, default=Settings().seconds, help="of each row")
    arguments = parser.parse_args()
    settings = QUICK if arguments.quick else Settings(seconds=arguments.seconds)
    print(settings, machine.describe())
    result = measure(settings)
    write_figures(arguments.json, result)


if __name__ == "__main__":
    main()
