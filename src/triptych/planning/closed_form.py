"""Placements in closed form: the rate that they bear, and the share of requests that meet the objectives. Microseconds to milliseconds each.

The time to a first token is preparation, encoding, the pull of embeddings and prefill, each with its wait; the waits of different pools are
taken to be independent. The time between tokens is that of decode steps beside all else. ``planning.search`` simulates the best of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from triptych.domain.stage import Stage

from .combination import Combination, Counts, Method, Wanted
from .demand import Need
from .pools import PREPARE, Instance, PoolLoad, Rates
from .waits import within

TRANSFER = "transfer"
"""The name of pulls beside those of stages."""
_HALVINGS = 12
_ALONE = 1e-6
"""Of the rate that no queue bears: a request is as good as alone."""
_MANY = 64
"""Times as many instances of one role as of another that shares its stages: nearly all requests are its own."""
_HOPS = 6
"""Messages to the first token, about."""


@dataclass(frozen=True, slots=True)
class Pool:
    """Equal instances."""

    instance: Instance
    count: int


@dataclass(frozen=True, slots=True)
class Path:
    """The pools that a share of the requests goes by, and how loaded they are."""

    share: float
    stages: Mapping[Stage, tuple[Pool, PoolLoad]]


@dataclass(frozen=True, slots=True)
class Judged:
    """A point at one rate."""

    rate: float
    attainment: float
    utilization: Mapping[str, float]
    """What each stage takes of the time of the instances that serve it, in the largest batches, with ``prepare`` of their cores and
    ``transfer`` of their links: the highest of all pools.
    """
    binds: str
    """The stage that takes most of the busiest pool, or ``prepare`` or ``transfer`` if those are busier."""
    ttft_s: float
    """Mean over all requests."""


class Point:
    """A placement: a combination with a number of instances for each of its pools."""

    __slots__ = ("combination", "counts", "peak_per_s")

    def __init__(self, combination: Combination, counts: Counts) -> None:
        self.combination, self.counts = combination, counts
        self.peak_per_s = combination.peak_per_s(counts)
        """The rate that no queue bears, whatever the latencies."""

    @property
    def method(self) -> Method:
        return self.combination.method

    @property
    def pools(self) -> tuple[Pool, ...]:
        """In the order of the method's roles."""
        return tuple(map(Pool, self.combination.instances, self.counts))

    @property
    def usd_per_hour(self) -> float | None:
        """None where a device has no price."""
        return self.combination.usd_per_hour(self.counts)

    @property
    def devices(self) -> int:
        return self.combination.devices(self.counts)

    @property
    def special_share(self) -> float:
        """The share of the shared stages that the special role takes."""
        return self.combination.special_share(self.counts)

    # --- at a rate ----------------------------------------------------------------------------------------------------

    def judge(self, rate: float) -> Judged:
        """What becomes of requests at a rate."""
        loads: list[PoolLoad] = []
        special, served = self.special_share, self.combination.served
        for place, pool in enumerate(self.pools):
            rates: Rates = (
                rate * served(place, Stage.ENCODE, special),
                rate * served(place, Stage.PREFILL, special),
                rate * served(place, Stage.DECODE, special),
            )
            loads.append(pool.instance.load(pool.count, rates))
        utilization = {TRANSFER: rate * max(self.combination.link_s(self.counts))}
        for load in loads:
            for stage, share in load.utilization.items():
                utilization[stage] = max(utilization.get(stage, 0.0), share)
        binds = _busiest(loads, utilization)
        if not all(load.is_bearable for load in loads) or utilization[TRANSFER] >= 1:
            return Judged(rate, 0.0, utilization, binds, inf)
        met = mean_s = 0.0
        for path in self._paths(loads):
            path_met, path_s = self._along(path, 1 - utilization[TRANSFER])
            met += path.share * path_met
            mean_s += path.share * path_s
        ttft_factor, _ = self.combination.factors
        return Judged(rate, met * self._wanted.demand.served, utilization, binds, ttft_factor * mean_s)

    def meets(self, rate: float) -> bool:
        return self.judge(rate).attainment >= self._wanted.attainment

    def meets_alone(self) -> bool:
        """Whether requests meet the objectives that come one at a time."""
        return self.meets(_ALONE * self.peak_per_s)

    def goodput(self) -> float:
        """The highest rate at which the objectives are met; 0 if they are not met even by one request alone."""
        low, high = 0.0, self.peak_per_s
        if not self.meets_alone():
            return 0.0
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if self.meets(middle) else (low, middle)
        return low

    def alone_s(self) -> list[Mapping[str, float]]:
        """What a request of each form takes of each stage to its first token without others, and ``decode``: between two tokens.

        By the path of most requests.
        """
        loads = [pool.instance.load(pool.count, (1e-9, 1e-9, 1e-9)) for pool in self.pools]
        path = max(self._paths(loads), key=lambda path: path.share)
        first, between = self.combination.factors
        decode_s = between * path.stages[Stage.DECODE][1].step_s
        return [
            {name: first * seconds for name, seconds in steps.items()} | {"decode": decode_s}
            for steps in self._steps(path, 1.0)
        ]

    @property
    def _wanted(self) -> Wanted:
        return self.combination.wanted

    def _paths(self, loads: Sequence[PoolLoad]) -> Iterator[Path]:
        servers = list(zip(self.pools, loads, strict=True))
        usual = {
            stage: next(server for role, server in zip(self.method.roles, servers, strict=True) if role.serves(stage))
            for stage in Stage
        }
        if (places := self.method.shared_places) is None:
            yield Path(1.0, usual)
            return
        special_share = self.special_share
        for place, share in zip(places, (special_share, 1 - special_share), strict=True):
            if share > 0:
                yield Path(share, usual | dict.fromkeys(self.method.shared_stages, servers[place]))

    def _steps(self, path: Path, link_share: float) -> Iterator[dict[str, float]]:
        """Seconds of each form without waits."""
        (encoder, encode), (prefiller, prefill) = path.stages[Stage.ENCODE], path.stages[Stage.PREFILL]
        prepared = encoder.instance.prepared_s(encoder.count)
        encoded = encoder.instance.encoding_s(encoder.count, encode)
        first = prefiller.instance.first_token_s(prefill)
        for need, prepare_s, encode_s, prefill_s in zip(
            self._wanted.demand.needs, prepared, encoded, first, strict=True
        ):
            pull_s = 0.0
            if need.items and encoder.instance is not prefiller.instance:
                pull_s = _transfer_s(encoder, prefiller, need.embedding_nbytes, link_share)
            hops_s = (_HOPS + _HOPS * bool(need.items)) * self._wanted.control_s
            yield {
                PREPARE: prepare_s,
                Stage.ENCODE.value: encode_s,
                TRANSFER: pull_s + hops_s,
                Stage.PREFILL.value: prefill_s,
            }

    def _along(self, path: Path, link_share: float) -> tuple[float, float]:
        """The share of requests within the objectives, and their mean time to the first token."""
        objectives, (first, between) = self._wanted.objectives, self.combination.factors
        (_, encode), (prefiller, prefill) = path.stages[Stage.ENCODE], path.stages[Stage.PREFILL]
        decoder, decode = path.stages[Stage.DECODE]
        before = encode.prepare.then(encode.encode)
        met = mean_s = 0.0
        for need, steps in zip(self._wanted.demand.needs, self._steps(path, link_share), strict=True):
            alone_s = sum(steps.values())
            mean_s += need.share * (alone_s + prefill.prefill.mean_s + (before.mean_s if need.items else 0.0))
            share = 1.0
            if objectives.ttft_s is not None:
                left_s = objectives.ttft_s / first - alone_s
                waits = (before, prefill.prefill) if need.items else (prefill.prefill,)
                share = within(left_s, *waits)
            if share and objectives.tpot_s is not None:
                more_s = self._handed_over_s(need, prefiller, decoder, link_share)
                share *= decoder.instance.tpot_share(
                    decode, objectives.tpot_s / between, need.output_tokens - 1, more_s
                )
            met += need.share * share
        return met, mean_s

    def _handed_over_s(self, need: Need, prefiller: Pool, decoder: Pool, link_share: float) -> float:
        """From the first token at one instance to the start at another."""
        if prefiller.instance is decoder.instance:
            return 0.0
        nbytes = need.prompt_tokens * prefiller.instance.kv_token_nbytes
        copied_s = sum(nbytes / pool.instance.offer.kind.copied_bytes_per_s for pool in (prefiller, decoder))
        return copied_s + _transfer_s(prefiller, decoder, nbytes, link_share) + _HOPS * self._wanted.control_s


def _busiest(loads: Sequence[PoolLoad], utilization: Mapping[str, float]) -> str:
    load = max(loads, key=lambda load: load.busy)
    stages = {stage: share for stage, share in load.utilization.items() if stage != PREPARE}
    stage = max(stages, key=lambda stage: stages[stage])
    other = max((name for name in (PREPARE, TRANSFER) if name in utilization), key=lambda name: utilization[name])
    return other if utilization[other] > load.busy else stage


def _transfer_s(sender: Pool, receiver: Pool, nbytes: float, link_share: float) -> float:
    """Over the slower of both links, beside other transfers."""
    links = [pool.instance.offer.kind.link for pool in (sender, receiver)]
    rate = min(link.bytes_per_s for link in links) * max(1e-9, link_share)
    return max(link.latency_s for link in links) + nbytes / rate


def roomy(combination: Combination) -> Point:
    """One instance of each role, and for each item of a request one that encodes: where a request alone is as fast as it can be."""
    items = max(need.items for need in combination.wanted.demand.needs)
    return Point(
        combination, tuple(max(1, items) if role.serves(Stage.ENCODE) else 1 for role in combination.method.roles)
    )


def is_hopeless(combination: Combination) -> bool:
    """Whether no numbers of these instances meet the objectives, even for a request alone."""
    point = roomy(combination)
    return not (point.meets_alone() or any(other.meets_alone() for other in _with_many(point)))


def _with_many(point: Point) -> Iterator[Point]:
    """Nearly all requests go by the one, or by the other of the roles that share stages."""
    for preferred in point.method.shared_places or ():
        counts = (_MANY * count if place == preferred else count for place, count in enumerate(point.counts))
        yield Point(point.combination, tuple(counts))
