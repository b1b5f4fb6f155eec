"""Real clusters for ``fidelity.py``: started with the options that the simulator gets too, asked, and watched from outside."""

import asyncio
import os
import random
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import httpx
import psutil

from triptych.cli.bench import load, payload
from triptych.cli.bench.load import Endpoint
from triptych.cli.cluster import LocalCluster
from triptych.cli.metrics import scrape
from triptych.cli.service_options import Flags, parse, without_instance_flags
from triptych.families.model_files import ModelFiles
from triptych.tokens.tokenizer import Tokenizer
from triptych.workload.report import Record
from triptych.workload.requests import Planned

STAGES = ("prepare", "encode", "queue", "pull", "prefill")
"""Of the router's metrics, for requests that were answered."""
Engine = Literal["triptych", "vllm"]
"""Of text instances. Encoders have Triptych's own."""
VLLM_ARGS = "--max-num-seqs 16 --max-num-batched-tokens 512 --kv-cache-memory-bytes 268435456 --enforce-eager"
_SHARED = (
    *("--max-batch-items=4", "--max-batch-tokens=1024", "--arena-bytes=268435456", "--image-cache-bytes=268435456"),
    *("--kv-arena-bytes=67108864", "--prepare-threads=2"),
)
OPTIONS: Mapping[Engine, tuple[str, ...]] = {
    "triptych": ("--max-sequences=16", "--token-budget=512", "--kv-cache-bytes=268435456", *_SHARED),
    "vllm": ("--engine=vllm", f"--vllm-args={VLLM_ARGS}", *_SHARED),
}
"""What ``triptych up`` measures at its start or takes from the machine, and ``triptych simulate`` from the catalogue, is said to both."""
PREPARE_THREADS = 2
PATIENCE_S = 120.0
CLIENT, GATEWAY, ROUTER, TEXT, ENCODER, OTHERS = "client", "gateway", "router", "text", "encoder", "others"
"""Kinds of processes. The pool manager is of the last."""
PREFILL, DECODE = "prefill", "decode"
"""Text instances of these roles alone. All others are ``TEXT``."""
_KINDS = (CLIENT, GATEWAY, ROUTER, TEXT, PREFILL, DECODE, ENCODER, OTHERS)


def given_options(engine: Engine) -> Flags:
    """Of the services, for the simulator."""
    return parse(OPTIONS[engine])


@dataclass(frozen=True, slots=True)
class Watched:
    """What was used and spent since the cluster's start."""

    at_s: float
    cpu_s: Mapping[str, float]
    """By kind of process."""
    machine_s: float
    """Of all processes of the machine, also those of others."""
    stages_s: Mapping[str, float]
    """Sums over the requests that were answered."""
    requests: float
    passes: Mapping[str, float]
    """Steps of text instances and batches of encoders, by kind of process."""

    def since(self, before: "Watched") -> "Watched":
        return Watched(
            self.at_s - before.at_s,
            {kind: spent_s - before.cpu_s[kind] for kind, spent_s in self.cpu_s.items()},
            self.machine_s - before.machine_s,
            {stage: sum_s - before.stages_s[stage] for stage, sum_s in self.stages_s.items()},
            self.requests - before.requests,
            {kind: number - before.passes[kind] for kind, number in self.passes.items()},
        )

    @property
    def foreign_cores(self) -> float:
        """Cores that processes took which are neither the cluster's nor its client's."""
        return (self.machine_s - sum(self.cpu_s.values())) / self.at_s


class Live:
    """A cluster that runs, and its client."""

    def __init__(self, cluster: LocalCluster, model_id: str, only_token: int) -> None:
        """``only_token``: one that has text, of which all answers consist."""
        self._cluster = cluster
        self._style = payload.Style(model_id, ignore_eos=True, only_token=only_token)
        self._started = {name: psutil.Process(pid) for name, pid in cluster.processes.items()}

    async def send(self, requests: Sequence[Planned], seed: str) -> list[Record]:
        """Send all of these, when they are due, and return records in the order in which they end. Images and texts depend on the seed alone."""
        records: list[Record] = []
        endpoint = Endpoint(self._cluster.url, timeout_s=PATIENCE_S)
        await load.run(endpoint, requests, self._style, random.Random(seed), records.append)
        return records

    async def send_in_groups(self, requests: Sequence[Planned], seed: str, *, together: int = 1) -> list[Record]:
        """So many at a time, after a pause in which the ones before have ended. Raises RuntimeError."""
        [alone] = await self.send(requests[:1], f"{seed} alone")
        gap_s = (1 + together / 4) * max(0.05, alone.end_s)
        planned = [replace(request, arrival_s=gap_s * (number // together)) for number, request in enumerate(requests)]
        return answered(await self.send(planned, seed))

    async def capacity(self, requests: Sequence[Planned], seed: str, callers: int) -> float:
        """Requests per second of a closed loop: each caller sends its next request when its last one has been answered. Raises RuntimeError."""
        endpoint, clock, rng = (
            Endpoint(self._cluster.url, timeout_s=PATIENCE_S),
            asyncio.get_running_loop().time,
            random.Random(seed),
        )
        bodies = [payload.body(planned, self._style, rng) for planned in requests]
        left = list(zip(requests, bodies, strict=True))
        records: list[Record] = []

        async def caller(client: httpx.AsyncClient) -> None:
            while left:
                records.append(await load.ask(client, f"{endpoint.base}/chat/completions", *left.pop(), clock()))

        began_s = clock()
        async with endpoint.client() as client, asyncio.TaskGroup() as group:
            for _ in range(callers):
                group.create_task(caller(client))
        return len(answered(records)) / (clock() - began_s)

    async def watched(self) -> Watched:
        spent, passes = dict.fromkeys(_KINDS, 0.0), dict.fromkeys(_KINDS, 0.0)
        for name, process in self._started.items():
            spent[_kind(name)] += sum(cpu_s(member) for member in (process, *process.children(recursive=True)))
        spent[CLIENT] += cpu_s(psutil.Process(os.getpid()))
        async with httpx.AsyncClient() as client:
            scraped = {name: await scrape(client, url) for name, url in self._cluster.admin_urls.items()}
        read = {name: samples for name, samples in scraped.items() if samples is not None}
        if len(read) < len(scraped):
            raise RuntimeError("a process's metrics cannot be read")

        def total(name: str, **labels: str) -> float:
            return sum(samples.total(name, **labels) or 0.0 for samples in read.values())

        for name, samples in read.items():
            counted = "triptych_encoder_batch_items_count" if _kind(name) == ENCODER else "triptych_step_seconds_count"
            passes[_kind(name)] += samples.total(counted) or 0.0
        sums = {stage: total("triptych_stage_seconds_sum", stage=stage) for stage in STAGES}
        busy = psutil.cpu_times()
        return Watched(
            asyncio.get_running_loop().time(),
            spent,
            busy.user + busy.nice + busy.system + busy.irq + busy.softirq,
            sums,
            total("triptych_stage_seconds_count", stage="prefill"),
            passes,
        )


def answered(records: list[Record]) -> list[Record]:
    """Raises RuntimeError if a request failed."""
    if errors := {record.error for record in records if not record.ok}:
        raise RuntimeError(f"requests fail: {', '.join(sorted(errors))}")
    return records


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _kind(process: str) -> str:
    if process.startswith("pool"):
        return OTHERS
    named = process.rpartition("-")[0] or process
    return named if named in _KINDS else TEXT


@asynccontextmanager
async def running(model: str | Path, model_id: str, roles: str, engine: Engine) -> AsyncGenerator[Live]:
    """A cluster that has been ready, and has answered, before anything is measured."""
    *_, token = Tokenizer.load(ModelFiles.load(Path(model))).encode(" the")
    given = given_options(engine)
    options = {**given, "mounted_encoder": without_instance_flags(given["encoder"])}
    async with LocalCluster(f"{model_id}={model}", roles=roles, options=options) as cluster:
        yield Live(cluster, model_id, token)
