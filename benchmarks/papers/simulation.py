"""Clusters and loads of the papers, for ``triptych simulate``'s library. What is compared serves the same requests."""

import json
import random
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any, Self

from triptych.cli.presets import PresetName
from triptych.cli.simulate.deployment import Hardware, deployment_of
from triptych.domain.device import Device
from triptych.domain.profile import Profile
from triptych.domain.stage import ModelPart, Role
from triptych.engine.delay import synthetic_encoder_profile
from triptych.policy.costs import Costs
from triptych.runtime.catalogue import load_catalogue
from triptych.sim.machines.run import simulate as by_machines
from triptych.sim.network import LinkSpeed
from triptych.sim.outcome import Outcome
from triptych.sim.run import HOPS, Simulate
from triptych.sim.scenario import Deployment, InstanceKind
from triptych.workload.report import Objectives, Record, percentile
from triptych.workload.requests import Distribution, Mix, Plan, Planned, Size, synthetic
from triptych.workload.search import Bracket, RateSearch

_PATIENCE_S = 3600.0
"""How long clients wait: none of the papers says that requests are given up."""
_MESSAGE_S = 0.0003
"""A message between two processes, and the start of a pull."""
_ROUTER = ("--deadlines=admit", "--max-concurrent-requests=100000", "--max-waiting-requests=100000")
_ENCODER = ("--arena-bytes=17179869184", "--max-waiting-items=100000", "--max-prepared-bytes=1099511627776")
_TEXT = (
    "--image-cache-bytes=17179869184", "--kv-arena-bytes=17179869184", "--max-concurrent-requests=100000",
    "--max-waiting-requests=100000", "--max-embedding-bytes=17179869184", "--kv-bytes-per-step=17179869184",
)  # fmt: skip
"""Bounds that none of the papers' loads is to reach."""


def cluster(
    config: Mapping[str, Any],
    roles: str,
    device: str,
    *,
    preset: PresetName | None = None,
    degree: str = "1",
    router: Sequence[str] = (),
    encoder: Sequence[str] = (),
    text: Sequence[str] = (),
    most: Mapping[Role, int] | None = None,
    cores: int = 16,
    switches: bool = False,
    over_network: bool = False,
    manager: Sequence[str] | None = None,
) -> Deployment:
    """Instances of a model, whose costs are computed for the device; they meet over the links within a host unless ``over_network``.

    ``most`` sequences are in a step, by role; ``cores`` prepare items for each instance. With options of the pool ``manager`` it scales them.
    The other options are those of ``triptych simulate`` and the services.
    """
    given = {
        "router": (*_ROUTER, *router),
        "encoder": (*_ENCODER, *encoder),
        "text": (*_TEXT, *text),
        "pool_manager": tuple(manager or ()),
        "gateway": (),
    }
    with TemporaryDirectory() as directory:
        path = Path(directory) / "config.json"
        path.write_text(json.dumps(config))
        made = deployment_of(
            model=str(path),
            roles=roles,
            preset=preset,
            autoscale=manager is not None,
            switch_roles=switches,
            hardware=Hardware(device, degree, "float16", None, None, cores, _MESSAGE_S),
            given=given,
            faults=(),
        ).deployment
    texts = {
        pool: settings.model_copy(update={"engine": replace(settings.engine, max_sequences=(most or {})[pool.role])})
        if pool.role in (most or {})
        else settings
        for pool, settings in made.texts.items()
    }
    made = replace(made, texts=texts)
    if over_network:
        return made

    def near(kind: InstanceKind) -> InstanceKind:
        rate = load_catalogue().device(kind.device).device_nbytes_per_s * kind.devices
        return replace(kind, link=LinkSpeed(rate, _MESSAGE_S), copied_bytes_per_s=rate)

    return replace(made, kinds={role: near(kind) for role, kind in made.kinds.items()})


def with_encoder(deployment: Deployment, token_s: float) -> Deployment:
    """Encoders that are busy for ``token_s`` with each token of an item, preparation included."""
    encoder = synthetic_encoder_profile(pass_s=0.0, token_s=token_s, load_s=1.0)
    return _with_profiles(deployment, lambda part, profile, _: encoder if part is ModelPart.ENCODER else profile)


def with_preparation(deployment: Deployment, item_s: float) -> Deployment:
    """Items that take ``item_s`` of one core to decode and preprocess, whatever their size."""
    return _with_profiles(
        deployment,
        lambda _, profile, __: replace(profile, prepare=tuple(row._replace(seconds=item_s) for row in profile.prepare)),
    )


def starting_in(deployment: Deployment, start_s: float) -> Deployment:
    """Instances that serve so long after they are ordered."""
    return _with_profiles(
        deployment, lambda _, profile, __: replace(profile, measured=replace(profile.measured, start_s=start_s))
    )


def eager(deployment: Deployment, layers: int) -> Deployment:
    """A decoder of so many layers whose kernels are started one by one, in decode steps as in those with prompts."""

    def changed(part: ModelPart, profile: Profile, device: Device) -> Profile:
        del part
        reached = device.efficiency

        def seconds(recorded_s: float, sequences: int) -> float:
            return max(recorded_s, reached.pass_s + sequences * reached.sequence_s + layers * reached.layer_s)

        return replace(
            profile,
            prefill=tuple(row._replace(seconds=seconds(row.seconds, 1)) for row in profile.prefill),
            decode=tuple(row._replace(seconds=seconds(row.seconds, row.batch)) for row in profile.decode),
        )

    return _with_profiles(deployment, changed)


def _with_profiles(deployment: Deployment, changed: Callable[[ModelPart, Profile, Device], Profile]) -> Deployment:
    def own(kind: InstanceKind) -> InstanceKind:
        device = load_catalogue().device(kind.device)
        return replace(kind, profiles={part: changed(part, profile, device) for part, profile in kind.profiles.items()})

    return replace(deployment, kinds={role: own(kind) for role, kind in deployment.kinds.items()})


def costs(deployment: Deployment, part: ModelPart) -> Costs:
    """Of a part of the model, at the first role that has it."""
    return Costs(next(kind.profiles[part] for kind in deployment.kinds.values() if part in kind.profiles))


def mix(*, images: str, size: Size, text_tokens: str, output_tokens: str) -> Mix:
    """A workload: numbers with weights, as ``triptych bench`` has them."""
    return Mix(Distribution.parse(images), Distribution.parse(text_tokens), Distribution.parse(output_tokens), size)


def plan(load: Mix, rate: float, requests: int, seed: int) -> Plan:
    """About that many requests of a Poisson process. Those of one seed are the same at all rates."""
    return synthetic(load, rate=rate, duration_s=requests / rate, burstiness=1.0, rng=random.Random(seed))


def at_once(load: Mix, requests: int, seed: int) -> Plan:
    """Requests that are all there from the beginning."""
    rng = random.Random(seed)
    return Plan([load.request(1e-6 * number, rng) for number in range(requests)], 1.0)


@dataclass(frozen=True, slots=True)
class Served:
    """The requests of a run that count, and how busy instances were."""

    records: Sequence[Record]
    ended_s: float
    gaps_s: Sequence[Sequence[float]] = ()
    """Between the tokens of each answer, where that was asked for."""

    def of(self, wanted: Callable[[Planned], bool]) -> "Served":
        return replace(self, records=[record for record in self.records if wanted(record.planned)], gaps_s=())

    @property
    def ttfts_s(self) -> list[float]:
        return [record.ttft_s for record in self.records if record.ttft_s is not None]

    @property
    def tpots_s(self) -> list[float]:
        return [record.tpot_s for record in self.records if record.tpot_s is not None]

    @property
    def ttft_s(self) -> float:
        return mean(self.ttfts_s)

    @property
    def tpot_s(self) -> float:
        return mean(self.tpots_s)

    @property
    def latency_s(self) -> float:
        return mean(record.end_s for record in self.records)

    @property
    def tokens_per_s(self) -> float:
        return sum(record.tokens for record in self.records) / self.ended_s

    @property
    def requests_per_s(self) -> float:
        return len(self.records) / self.ended_s

    def ttft_at(self, q: float) -> float:
        return percentile(self.ttfts_s, q)

    def tpot_at(self, q: float) -> float:
        return percentile(self.tpots_s, q)

    def attained(self, ttft_s: float, tpot_s: float) -> float:
        """Share of the requests that meet both objectives."""
        objectives = Objectives(ttft_s, tpot_s)
        return mean(objectives.met(record) for record in self.records)

    def attained_by_gaps(self, ttft_s: float, gap_s: float) -> float:
        """Share of the requests with a first token in time, and nine of ten gaps between tokens within ``gap_s`` (HydraInfer 2.3)."""
        return mean(
            record.ttft_s is not None
            and record.ttft_s <= ttft_s
            and sum(gap > gap_s for gap in gaps_s) <= 0.1 * len(gaps_s)
            for record, gaps_s in zip(self.records, self.gaps_s, strict=True)
        )


def serve(
    deployment: Deployment,
    requests: Plan,
    *,
    warm_up: float = 0.0,
    simulate: Simulate = by_machines,
    keeps_gaps: bool = False,
) -> Served:
    """Serve the requests; the first, a share of ``warm_up``, do not count. Raises AssertionError if one is refused."""
    outcome = simulate(deployment, requests, timeout_s=_PATIENCE_S, keeps_spans=keeps_gaps)
    assert not any(record.error for record in outcome.records), {record.error for record in outcome.records}
    if keeps_gaps:
        return Served(outcome.records, outcome.ended_s, _gaps_s(outcome, 2 * (HOPS + 1) * deployment.control_s))
    counted = [record for record in outcome.records if record.planned.arrival_s >= warm_up * requests.duration_s]
    return Served(counted, outcome.ended_s)


def _gaps_s(outcome: Outcome, messages_s: float) -> list[Sequence[float]]:
    """Between the tokens of each answer: a step of its instance makes one. ``messages_s`` pass at most from there to the client."""
    ends_s: dict[str, list[float]] = {}
    for span in outcome.spans:
        if span.work == "step":
            ends_s.setdefault(span.instance, []).append(span.end_s)
    found: list[Sequence[float]] = []
    for record, timeline in zip(outcome.records, outcome.timelines, strict=True):
        assert timeline is not None
        assert record.ttft_s is not None
        steps_s = ends_s[timeline.text_instance]
        arrived_s = record.planned.arrival_s
        last = bisect_right(steps_s, arrived_s + record.end_s)
        decoded_s = steps_s[max(0, last - record.tokens + 1) : last]
        first_s = arrived_s + record.ttft_s - messages_s
        found.append([after - before for before, after in pairwise((min(first_s, *decoded_s), *decoded_s))])
    return found


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a figure: that it lies between ``least`` and ``most``, which are the same if it was found."""

    least: float
    most: float
    unbounded: str = field(default="unknown", compare=False)
    """In words, if it may be any."""

    @classmethod
    def found(cls, figure: float) -> Self:
        return cls(figure, figure)

    @property
    def figure(self) -> float | None:
        return self.least if self.least == self.most else None

    @property
    def instead(self) -> str:
        """In words, if it was not found."""
        if self.figure is not None:
            return ""
        if self.most == inf:
            return f"at least {self.least:.3g}" if self.least else self.unbounded
        return f"{self.least:.3g} to {self.most:.3g}" if self.least else f"at most {self.most:.3g}"


@dataclass(frozen=True, slots=True)
class Goodput(Known):
    """The highest rate that a system bears, requests/s. It was not found if all rates that were tried are borne, or none."""

    def __str__(self) -> str:
        if self.figure is not None:
            return f"{self.figure:.3g}"
        return f"more than {self.least:.3g}" if self.most == inf else f"less than {self.most:.3g}"

    @property
    def instead(self) -> str:
        if self.figure is not None:
            return ""
        return f"{self} requests/s, the {'most' if self.most == inf else 'least'} tried"

    def over(self, other: "Goodput") -> Known:
        """The ratio to another's."""
        most = self.most / other.least if other.least else inf
        return Known(self.least / other.most, most, f"both bear {self.instead}")


def goodput(is_good: Callable[[float], bool], least: float, highest: float, precision: float = 0.04) -> Goodput:
    """The highest rate that is good, to within ``precision``."""
    search = RateSearch(Bracket(least, highest), precision)
    while (rate := search.next_rate) is not None:
        search.tried(rate, is_good=is_good(rate))
    if search.good is None:
        return Goodput(0.0, least)
    return Goodput(search.good, inf) if search.too_high is None else Goodput.found(search.good)


def goodput_by_line(tried: Sequence[tuple[float, float]], bound: float) -> Goodput:
    """The rate up to which a figure is within ``bound``, of rising rates with that figure; between two rates by a line."""
    if tried[0][1] > bound:
        return Goodput(0.0, tried[0][0])
    for (rate, figure), (higher, larger) in pairwise(tried):
        if larger > bound:
            return Goodput.found(rate + (higher - rate) * (bound - figure) / (larger - figure))
    return Goodput(tried[-1][0], inf)
