"""Placements in closed form: the rate that they bear, and the share of requests that meet the objectives. Microseconds to milliseconds each.

The time to a first token is preparation, encoding, the pull of embeddings and prefill, each with its wait; the waits of different pools are
taken to be independent. The time between tokens is that of decode steps beside all else. ``planning.search`` simulates the best of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

from triptych.domain.stage import Role, Stage
from triptych.workload.report import Objectives

from .demand import Demand, Need
from .pools import PREPARE, Instance, PoolLoad, Rates
from .waits import within

TRANSFER = "transfer"
"""The name of pulls beside those of stages."""
_HALVINGS = 12
_HOPS = 6
"""Messages to the first token, about."""


@dataclass(frozen=True, slots=True)
class Method:
    """A way to divide stages among roles: each has one, but for those that a special role shares with a general one."""

    roles: tuple[Role, ...]
    shared: tuple[Role, Role] | None = None
    """The special and the general role. The special one takes so much of the stages of both that they are equally busy."""


METHODS = (
    Method((Role.EPD,)),
    Method((Role.E, Role.PD)),
    Method((Role.EP, Role.D)),
    Method((Role.P, Role.ED)),
    Method((Role.E, Role.P, Role.D)),
    Method((Role.E, Role.EPD), (Role.E, Role.EPD)),
    Method((Role.PD, Role.EPD), (Role.PD, Role.EPD)),
    Method((Role.E, Role.EP, Role.D), (Role.E, Role.EP)),
    Method((Role.P, Role.EP, Role.D), (Role.P, Role.EP)),
    Method((Role.E, Role.P, Role.ED), (Role.E, Role.ED)),
    Method((Role.P, Role.D, Role.ED), (Role.D, Role.ED)),
)


@dataclass(frozen=True, slots=True)
class Pool:
    """Equal instances of a role."""

    instance: Instance
    count: int


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is wanted of the requests of a demand."""

    demand: Demand
    objectives: Objectives
    attainment: float
    control_s: float
    """Time of a message between two processes."""


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
    """A placement: a method with a pool for each of its roles."""

    def __init__(self, method: Method, pools: Sequence[Pool], wanted: Wanted) -> None:
        """``pools`` are in the order of the method's roles."""
        self.method, self.pools = method, tuple(pools)
        self._wanted = wanted
        self._by_role = dict(zip(method.roles, self.pools, strict=True))

    @property
    def usd_per_hour(self) -> float | None:
        """None where a device has no price."""
        prices = [pool.instance.offer.usd_per_hour for pool in self.pools]
        if any(price is None for price in prices):
            return None
        return sum(pool.count * (price or 0.0) for pool, price in zip(self.pools, prices, strict=True))

    @property
    def devices(self) -> int:
        return sum(pool.count * pool.instance.offer.degree for pool in self.pools)

    def with_pools(self, pools: Sequence[Pool]) -> "Point":
        """The same method with other counts."""
        return Point(self.method, pools, self._wanted)

    # --- how stages are divided ---------------------------------------------------------------------------------------

    @cached_property
    def special_share(self) -> float:
        """The share of the shared stages that the special role takes."""
        if self.method.shared is None:
            return 0.0
        special, general = (self._by_role[role] for role in self.method.shared)
        shared = self._shared_stages
        alike, own = _split(special, shared)
        others_alike, others_own = _split(general, shared)
        busier = (others_alike + others_own) / general.count - own / special.count
        each = alike / special.count + others_alike / general.count
        return min(1.0, max(0.0, busier / each)) if each else 0.5

    @property
    def _shared_stages(self) -> frozenset[Stage]:
        if self.method.shared is None:
            return frozenset()
        special, general = self.method.shared
        return special.stages & general.stages

    def _served(self, role: Role, stage: Stage) -> float:
        """The share of all requests whose stage this role serves."""
        if not role.serves(stage):
            return 0.0
        if self.method.shared is None or role not in self.method.shared or stage not in self._shared_stages:
            return 1.0
        return self.special_share if role is self.method.shared[0] else 1 - self.special_share

    @cached_property
    def peak_per_s(self) -> float:
        """The rate that no queue bears, whatever the latencies: at which some devices, cores or links are always busy."""
        return 1 / max(1e-12, *(self.busy_s(role) for role in self.method.roles))

    def busy_s(self, role: Role) -> float:
        """Seconds for which a request keeps a pool busy."""
        instance, count = self._by_role[role].instance, self._by_role[role].count
        taken_s = sum(seconds * self._served(role, stage) for stage, seconds in instance.seconds.items())
        prepare_s = instance.prepare_mean_s * self._served(role, Stage.ENCODE) / instance.offer.kind.prepare_cores
        return max(taken_s / count, prepare_s / count, self._link_s(role))

    def _link_s(self, role: Role) -> float:
        """Time that the transfers of a request take of the links of one instance of a pool, in the busier direction."""
        instance, count = self._by_role[role].instance, self._by_role[role].count
        demand, kind = self._wanted.demand, instance.offer.kind
        embeddings = sum(need.share * need.embedding_nbytes for need in demand.needs)
        nbytes = 0.0
        if role.serves(Stage.ENCODE) != role.serves(Stage.PREFILL):
            nbytes = embeddings * self._served(role, Stage.ENCODE if role.serves(Stage.ENCODE) else Stage.PREFILL)
        if role.serves(Stage.PREFILL) != role.serves(Stage.DECODE):
            prompts = sum(need.share * need.prompt_tokens for need in demand.needs)
            hands = self._served(role, Stage.PREFILL if role.serves(Stage.PREFILL) else Stage.DECODE)
            nbytes = max(nbytes, prompts * instance.kv_token_nbytes * hands)
        return nbytes / kind.link.bytes_per_s / count

    # --- at a rate ----------------------------------------------------------------------------------------------------

    def judge(self, rate: float) -> Judged:
        """What becomes of requests at a rate."""
        loads: dict[Role, PoolLoad] = {}
        for role, pool in self._by_role.items():
            rates: Rates = (
                rate * self._served(role, Stage.ENCODE),
                rate * self._served(role, Stage.PREFILL),
                rate * self._served(role, Stage.DECODE),
            )
            loads[role] = pool.instance.load(pool.count, rates)
        utilization = {TRANSFER: max(rate * self._link_s(role) for role in loads)}
        for load in loads.values():
            for stage, share in load.utilization.items():
                utilization[stage] = max(utilization.get(stage, 0.0), share)
        binds = _busiest(list(loads.values()), utilization)
        if not all(load.is_bearable for load in loads.values()) or utilization[TRANSFER] >= 1:
            return Judged(rate, 0.0, utilization, binds, inf)
        met = mean_s = 0.0
        for path in self._paths(loads):
            path_met, path_s = self._along(path, 1 - utilization[TRANSFER])
            met += path.share * path_met
            mean_s += path.share * path_s
        return Judged(rate, met * self._wanted.demand.served, utilization, binds, mean_s)

    def meets(self, rate: float) -> bool:
        return self.judge(rate).attainment >= self._wanted.attainment

    def goodput(self) -> float:
        """The highest rate at which the objectives are met; 0 if they are not met even by one request alone."""
        low, high = 0.0, self.peak_per_s
        if not self.meets(1e-6 * high):
            return 0.0
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if self.meets(middle) else (low, middle)
        return low

    def alone_s(self) -> list[Mapping[str, float]]:
        """What a request of each form takes of each stage to its first token without others, and ``decode``: between two tokens.

        By the path of most requests.
        """
        loads = {role: pool.instance.load(pool.count, (1e-9, 1e-9, 1e-9)) for role, pool in self._by_role.items()}
        path = max(self._paths(loads), key=lambda path: path.share)
        return [dict(steps) | {"decode": path.stages[Stage.DECODE][1].step_s} for steps in self._steps(path, 1.0)]

    def _paths(self, loads: Mapping[Role, PoolLoad]) -> Iterator[Path]:
        if self.method.shared is None:
            yield Path(1.0, {stage: self._server(stage, loads) for stage in Stage})
            return
        special, general = self.method.shared
        for role, share in ((special, self.special_share), (general, 1 - self.special_share)):
            if share > 0:
                yield Path(
                    share,
                    {
                        stage: (self._by_role[role], loads[role])
                        if stage in self._shared_stages
                        else self._server(stage, loads)
                        for stage in Stage
                    },
                )

    def _server(self, stage: Stage, loads: Mapping[Role, PoolLoad]) -> tuple[Pool, PoolLoad]:
        role = next(role for role in self.method.roles if role.serves(stage))
        return self._by_role[role], loads[role]

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
        objectives = self._wanted.objectives
        (_, encode), (prefiller, prefill) = path.stages[Stage.ENCODE], path.stages[Stage.PREFILL]
        decoder, decode = path.stages[Stage.DECODE]
        before = encode.prepare.then(encode.encode)
        met = mean_s = 0.0
        for need, steps in zip(self._wanted.demand.needs, self._steps(path, link_share), strict=True):
            alone_s = sum(steps.values())
            mean_s += need.share * (alone_s + prefill.prefill.mean_s + (before.mean_s if need.items else 0.0))
            share = 1.0
            if objectives.ttft_s is not None:
                left_s = objectives.ttft_s - alone_s
                waits = (before, prefill.prefill) if need.items else (prefill.prefill,)
                share = within(left_s, *waits)
            if share and objectives.tpot_s is not None:
                more_s = self._handed_over_s(need, prefiller, decoder, link_share)
                share *= decoder.instance.tpot_share(decode, objectives.tpot_s, need.output_tokens - 1, more_s)
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


def _split(pool: Pool, shared: frozenset[Stage]) -> tuple[float, float]:
    """Seconds of a request in the shared stages, and in the others."""
    seconds = pool.instance.seconds
    return (
        sum(taken for stage, taken in seconds.items() if stage in shared),
        sum(taken for stage, taken in seconds.items() if stage not in shared),
    )
