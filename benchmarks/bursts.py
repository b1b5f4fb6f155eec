"""A burst of requests at a local cluster of real processes, whose engines sleep as a synthetic profile predicts.

Used by the benchmark, the tests and the demonstration of autoscaling. Two cores add no capacity, so nothing here computes:
every delay is a sleep, and the same workload replayed twice asks for the same delays.
"""

import asyncio
import csv
import math
import random
import statistics
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from triptych.cli.bench import load
from triptych.cli.bench.load import Endpoint
from triptych.cli.bench.payload import Style
from triptych.cli.cluster import LocalCluster
from triptych.domain.pool import MemberCondition
from triptych.domain.stage import Role
from triptych.engine.delay import synthetic_profiles
from triptych.errors import TriptychError
from triptych.policy.capacity import ItemClass, encode_capacity
from triptych.policy.costs import Costs
from triptych.rpc.stubs import PoolManagerStub
from triptych.runtime.profiles import write_profile
from triptych.runtime.tasks import TaskScope
from triptych.testing.delay_models import Attention, write_delay_model
from triptych.workload import traces
from triptych.workload.report import LATE_S, NOT_SENT, Record, percentile
from triptych.workload.requests import Distribution, Mix, Planned, Size, WorkloadError, synthetic

IMAGE = Size(56, 56)
"""Each image of the models here takes the same tokens, whatever its size, so images are as small as possible."""
SLO_FACTOR = 5.0
"""Of the isolated latency, as in ModServe section 5.1."""
DEVICES = {Role.E: 1, Role.PD: 4, Role.EPD: 4}
"""Of an instance: the text engine is spread over four, as in ModServe section 5.1, and an encoder needs one."""
FIRST_S = 30.0
"""From here on, after a burst began, requests are to meet the objective."""
_STEADY_CLIENT, _BURST_CLIENT = 5, 1
"""Clients of the trace: one that asks all day long, and one that asks for five hours and is silent otherwise."""
_BURST_FROM_S, _BURST_TO_S = 4_200.0, 22_800.0
"""When the second one asks, in seconds of the trace."""
_CALIBRATION = 12
_CALIBRATION_GAP_S = 1.0
_IMAGE_TOKENS = 576
_BESIDE_PER_S = 0.8
_BESIDE = "beside"


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests, and when the burst is: all in seconds since the first second."""

    requests: tuple[Planned, ...]
    begins_s: float
    ends_s: float
    duration_s: float
    source: str

    def until(self, end_s: float) -> "Workload":
        """The part of the workload before ``end_s``."""
        kept = tuple(request for request in self.requests if request.arrival_s < end_s)
        return replace(self, requests=kept, ends_s=min(self.ends_s, end_s), duration_s=min(self.duration_s, end_s))

    def rate(self, from_s: float, to_s: float) -> float:
        """Requests per second."""
        return sum(from_s <= request.arrival_s < to_s for request in self.requests) / (to_s - from_s)

    @property
    def burst_per_s(self) -> float:
        return self.rate(self.begins_s, self.ends_s)


@dataclass(frozen=True, slots=True)
class Shape:
    """The form of a burst, in seconds, and requests per second in it."""

    before_s: float = 12.0
    burst_s: float = 54.0
    after_s: float = 42.0
    burst_per_s: float = 6.5


def from_trace(directory: Path, shape: Shape, seed: int) -> Workload:
    """Two clients of a ServeGen workload, compressed in time so that the burst takes as long as ``shape`` says.

    The number of requests per second is scaled to the burst's; the shapes of arrivals, the ratio of the two clients,
    lengths of texts and of answers are the trace's. Raises WorkloadError.
    """
    factor = (_BURST_TO_S - _BURST_FROM_S) / shape.burst_s
    start_s = _BURST_FROM_S - factor * shape.before_s
    if start_s < 0:
        raise WorkloadError(
            f"the trace has no {shape.before_s:g} s before the burst, if that takes {shape.burst_s:g} s"
        )
    length_s = factor * (shape.before_s + shape.burst_s + shape.after_s)
    with tempfile.TemporaryDirectory() as chosen:
        for number in (_STEADY_CLIENT, _BURST_CLIENT):
            for kind in ("trace.csv", "dataset.json"):
                (Path(chosen) / f"chunk-{number}-{kind}").symlink_to(directory.resolve() / f"chunk-{number}-{kind}")
        recorded = _recorded_rate(Path(chosen), start_s, start_s + length_s)
        in_burst = _recorded_rate(Path(chosen), _BURST_FROM_S, _BURST_TO_S)
        span = traces.Span(start_s, length_s, recorded / in_burst * shape.burst_per_s / factor)
        plan = traces.load(Path(chosen), span, IMAGE, random.Random(seed))
    compressed = tuple(
        replace(request, arrival_s=request.arrival_s / factor) for request in plan.requests if request.images
    )
    return Workload(
        compressed,
        shape.before_s,
        shape.before_s + shape.burst_s,
        shape.before_s + shape.burst_s + shape.after_s,
        f"clients {_STEADY_CLIENT} and {_BURST_CLIENT} of {directory.name}, time compressed {factor:.0f} times",
    )


def _recorded_rate(directory: Path, from_s: float, to_s: float) -> float:
    """Mean requests per second of all clients of a directory."""
    requests = 0.0
    for trace in directory.glob("chunk-*-trace.csv"):
        with trace.open(newline="") as file:
            rows = [(float(row[0]), float(row[1])) for row in csv.reader(file) if row]
        step_s = rows[1][0] - rows[0][0]
        requests += sum(rate * max(0.0, min(at_s + step_s, to_s) - max(at_s, from_s)) for at_s, rate in rows)
    return requests / (to_s - from_s)


def poisson_burst(shape: Shape, seed: int) -> Workload:
    """The same form with Poisson arrivals, and lengths like those of the trace's two clients."""
    rng = random.Random(seed)
    mix = Mix(
        Distribution.parse("1"),
        Distribution.parse("41"),
        Distribution.parse("4:0.7,16:0.3"),
        IMAGE,
    )
    requests: list[Planned] = []
    at_s = 0.0
    for length_s, rate in ((shape.before_s, 0.1), (shape.burst_s, 1.0), (shape.after_s, 0.1)):
        plan = synthetic(mix, rate=rate * shape.burst_per_s, duration_s=length_s, burstiness=1.0, rng=rng)
        requests += [replace(request, arrival_s=at_s + request.arrival_s) for request in plan.requests]
        at_s += length_s
    return Workload(
        tuple(requests), shape.before_s, shape.before_s + shape.burst_s, at_s, "synthetic: Poisson arrivals"
    )


# --- what is served ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Delays:
    """Of the synthetic profile."""

    image_s: float = 0.4
    prompt_token_s: float = 0.00015
    step_s: float = 0.005
    load_s: float = 5.0


@dataclass(frozen=True, slots=True)
class Served:
    """A model directory without weights, and profiles of its parts."""

    attention: Attention
    model: Path
    profiles: Path
    encoder_per_s: float
    """Images per second that one encoder bears within the objective, by its profile."""

    @classmethod
    def written(cls, directory: Path, attention: Attention, delays: Delays = Delays()) -> "Served":  # frozen
        model = write_delay_model(directory / attention.value, attention)
        encoder, decoder = synthetic_profiles(
            model,
            image_s=delays.image_s,
            side_px=IMAGE.width,
            prompt_token_s=delays.prompt_token_s,
            step_s=delays.step_s,
            load_s=delays.load_s,
        )
        profiles = directory / f"{attention.value}-profiles"
        profiles.mkdir()
        write_profile(profiles / "encoder.json", encoder)
        write_profile(profiles / "decoder.json", decoder)
        capacity = encode_capacity(Costs(encoder), [ItemClass(_IMAGE_TOKENS)], SLO_FACTOR * delays.image_s, max_items=1)
        return cls(attention, model, profiles, capacity.per_s)

    @property
    def options(self) -> dict[str, tuple[str, ...]]:
        """Flags of the instances. A larger batch would not be faster, by this profile."""
        small = ("--max-batch-items", "1", "--arena-bytes", str(64 << 20))
        delayed = ("--delay-profile", str(self.profiles))
        return {
            "encoder": (*delayed, *small),
            "text": (*delayed, "--image-cache-bytes", str(64 << 20)),
        }


@dataclass(frozen=True, slots=True)
class System:
    """What a workload is replayed at."""

    name: str
    roles: str = "E:1,PD:1"
    autoscale: bool = True
    until_s: float = math.inf
    """The workload is cut off here."""
    beside: bool = False
    """A second model, under the same manager and gateway, gets a steady load."""


# --- one run -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sample:
    """The pools at one time, by role."""

    at_s: float
    ready: Mapping[Role, int]
    """Instances that get work."""
    there: Mapping[Role, int]
    """Processes, with those that start or drain: what is paid for."""
    beside: Mapping[Role, int]
    """Instances of the other model, by role."""


@dataclass(slots=True)
class Outcome:
    """Of one workload at one system."""

    system: System
    workload: Workload
    isolated_s: float
    """Median TTFT of requests sent one by one before."""
    records: list[Record] = field(default_factory=list)
    beside: list[Record] = field(default_factory=list)
    """Of the other model."""
    samples: list[Sample] = field(default_factory=list)

    @property
    def slo_s(self) -> float:
        return SLO_FACTOR * self.isolated_s

    def attainment(self, from_s: float, to_s: float) -> float | None:
        """Share of the requests due between these times that got their first token within the objective; those that
        failed did not. None if there are none.
        """
        due = [record for record in self.records if from_s <= record.planned.arrival_s < to_s]
        met = [record for record in due if record.ok and record.ttft_s is not None and record.ttft_s <= self.slo_s]
        return len(met) / len(due) if due else None

    @property
    def phases(self) -> dict[str, tuple[float, float]]:
        """From and until when."""
        begins_s, ends_s, end_s = self.workload.begins_s, self.workload.ends_s, self.workload.duration_s
        return {
            "before the burst": (0.0, begins_s),
            f"its first {FIRST_S:g} s": (begins_s, begins_s + FIRST_S),
            f"from {FIRST_S:g} s on": (begins_s + FIRST_S, ends_s),
            "after it": (ends_s, end_s),
        }

    @property
    def settled(self) -> float | None:
        """Attainment of all requests that are due from 30 s after the burst began."""
        return self.attainment(self.workload.begins_s + FIRST_S, math.inf)

    @property
    def failed(self) -> dict[str, int]:
        return dict(Counter(record.error for record in self.records if not record.ok))

    @property
    def instance_s(self) -> float:
        """Seconds that instances existed, while the workload lasted."""
        return self._existed_s(dict.fromkeys(DEVICES, 1))

    @property
    def device_s(self) -> float:
        """The same for their devices."""
        return self._existed_s(DEVICES)

    def _existed_s(self, weights: Mapping[Role, int]) -> float:
        return sum(
            sum(weights[role] * count for role, count in sample.there.items()) * (following.at_s - sample.at_s)
            for sample, following in pairwise(self.samples)
        )

    @property
    def late_s(self) -> float:
        """P99 of how late the load generator sent."""
        return percentile([record.sent_late_s for record in self.records], 99)

    @property
    def kept_up(self) -> bool:
        return self.late_s <= LATE_S and NOT_SENT not in self.failed

    def largest(self, role: Role) -> int:
        return max(sample.ready.get(role, 0) for sample in self.samples)

    def sizes(self, role: Role) -> list[int]:
        """Of ready instances, per second."""
        return [sample.ready.get(role, 0) for sample in self.samples]


async def replayed(
    served: Served,
    system: System,
    workload: Workload,
    *,
    manager_options: Sequence[str] = (),
    log_dir: Path | None = None,
    patience_s: float = 45.0,
    seen: Callable[[Sample, Outcome], None] = lambda *_: None,
) -> Outcome:
    """Start the system, measure isolated latencies, and replay the workload. ``seen`` gets each second's sample.

    Requests without an answer after ``patience_s`` are given up, and count as failed.
    """
    workload = workload.until(system.until_s)
    router = ("--slo", f"ttft={SLO_FACTOR:g}x,tbt={SLO_FACTOR:g}x", "--isolated-samples", str(_CALIBRATION - 2))
    manager = ("--profiles", str(served.profiles), *manager_options)
    options = {**served.options, "router": router, "pool_manager": manager}
    options["mounted_encoder"] = ("--max-batch-items", "1", "--arena-bytes", str(64 << 20))
    models = [f"burst={served.model}", *([f"{_BESIDE}={served.model}"] if system.beside else [])]
    async with LocalCluster(
        models,
        roles=system.roles,
        autoscale=system.autoscale,
        options=options,
        log_dir=log_dir,
    ) as cluster:
        endpoint = Endpoint(cluster.url, timeout_s=patience_s)
        outcome = Outcome(system, workload, await _isolated_s(endpoint))
        stub = PoolManagerStub(cluster.manager_target)
        try:
            async with TaskScope("burst", limit=2) as scope:
                scope.spawn(_watch(cluster, stub, outcome, seen), name="watch")
                began_s = asyncio.get_running_loop().time()
                await asyncio.gather(*_loads(endpoint, outcome))
                await asyncio.sleep(workload.duration_s - (asyncio.get_running_loop().time() - began_s))
        finally:
            await stub.close()
    outcome.records.sort(key=lambda record: record.planned.arrival_s)
    return outcome


def _loads(endpoint: Endpoint, outcome: Outcome) -> Iterator[Awaitable[None]]:
    requests, end_s = outcome.workload.requests, outcome.workload.duration_s
    yield load.run(endpoint, requests, Style("burst"), random.Random("bodies"), outcome.records.append)
    if outcome.system.beside:
        steady = [Planned(number / _BESIDE_PER_S, 41, (IMAGE,), 4) for number in range(int(_BESIDE_PER_S * end_s))]
        yield load.run(endpoint, steady, Style(_BESIDE), random.Random("beside"), outcome.beside.append)


async def _isolated_s(endpoint: Endpoint) -> float:
    """One request after the other."""
    records: list[Record] = []
    alone = [Planned(_CALIBRATION_GAP_S * number, 41, (IMAGE,), 4) for number in range(_CALIBRATION)]
    await load.run(endpoint, alone, Style("burst"), random.Random("isolated"), records.append)
    taken = [record.ttft_s for record in records if record.ok and record.ttft_s is not None]
    if len(taken) < _CALIBRATION:
        raise RuntimeError(f"requests fail without load: {Counter(record.error for record in records)}")
    return statistics.median(taken)


async def _watch(
    cluster: LocalCluster, manager: PoolManagerStub, outcome: Outcome, seen: Callable[[Sample, Outcome], None]
) -> None:
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    ready: Mapping[Role, int] = {}
    while True:
        with suppress(TriptychError):
            ready = {
                pool.role: sum(
                    member.condition is MemberCondition.ACTIVE and not member.suspected for member in pool.members
                )
                for pool in (await manager.status()).pools
                if pool.role is not None and pool.model != _BESIDE
            }
        names = list(cluster.processes)
        there = _roles(name for name in names if not name.startswith(_BESIDE))
        beside = _roles(name for name in names if name.startswith(_BESIDE))
        outcome.samples.append(Sample(loop.time() - began_s, ready, there, beside))
        seen(outcome.samples[-1], outcome)
        await asyncio.sleep(1.0 - (loop.time() - began_s) % 1.0)


def _roles(names: Iterable[str]) -> Counter[Role]:
    """By the names of processes."""
    kinds = {"encoder": Role.E, "text": Role.PD, "hybrid": Role.EPD}
    return Counter(kinds[kind] for name in names if (kind := name.split("-")[-2:][0]) in kinds)
