"""Pools of equal instances in closed form: what a demand takes of them, how long it waits, and when it is too much.

Costs are those of simulations (``policy.costs``). An encoder makes its batches as large as
the load asks for, up to its limit. Stages that share devices take turns.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, erf, inf, sqrt

from triptych.domain.stage import ModelPart, Role, Stage
from triptych.policy.costs import Costs
from triptych.sim.engines import EncoderTimes
from triptych.sim.scenario import InstanceKind

from .demand import Demand
from .steps import Stepping, Steps
from .waits import ENDLESS, NO_WAIT, Wait, moments, wait

_BUSY_ALONE, _BUSY_BESIDE = 0.7, 0.3
"""Share of the time for which an encoder is busy before its passes become larger: alone, and beside a text engine."""
IDLE = Stepping(0.0, 0.0, 0.0, 0.0)
"""Of an instance without a text engine, or without requests."""
PREPARE = "prepare"
"""The name of preparation beside those of stages."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Settings of instances that bound their batches."""

    max_batch_items: int
    max_sequences: int
    token_budget: int


@dataclass(frozen=True, slots=True)
class Offer:
    """Instances of a role that there can be."""

    role: Role
    kind: InstanceKind
    kv_tokens: int | None
    """Tokens that KV memory holds; None for encoders."""
    usd_per_hour: float | None
    """Of all devices of one instance."""
    limits: Limits | None = None
    """Batch limits, if they are set; None if they are to be chosen."""

    @property
    def device(self) -> str:
        return self.kind.device

    @property
    def degree(self) -> int:
        return self.kind.devices


Rates = tuple[float, float, float]
"""Requests per second of a pool by stage: that have items to encode here (counted with those that have none), that are prefilled, and
that are decoded."""


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """A pool under a load."""

    utilization: Mapping[str, float]
    """Share of the time of its cores and devices that each stage takes at least, in the largest batches. Above 1 it is overloaded."""
    prepare: Wait = NO_WAIT
    encode: Wait = NO_WAIT
    prefill: Wait = NO_WAIT
    batch_items: float = 1.0
    """Items of a pass of the encoder."""
    stepping: Stepping | None = IDLE
    """Steps of an instance; None if they do not keep up."""
    held_up_s2_per_s: float = 0.0
    """Variance of the time for which prompts and items hold up answers, for each second."""

    @property
    def step_s(self) -> float:
        """Mean time between two tokens; infinite if steps do not keep up."""
        return inf if self.stepping is None else self.stepping.step_s

    @property
    def busy(self) -> float:
        """Of its devices, all stages together."""
        return sum(share for stage, share in self.utilization.items() if stage != PREPARE)

    @property
    def is_bearable(self) -> bool:
        return max(self.busy, self.utilization.get(PREPARE, 0.0)) < 1 and self.stepping is not None


class Instance:
    """One instance of an offer under a demand."""

    def __init__(self, offer: Offer, demand: Demand, limits: Limits, *, bytes_per_pixel: float) -> None:
        self.offer, self.limits = offer, limits
        self.needs = demand.needs
        self._demand = demand
        role, kind = offer.role, offer.kind
        self._shares = [need.share for need in demand.needs]
        self._prepare_s: Sequence[float] = [0.0] * len(demand.needs)
        """Of all items of a request, on one core."""
        self._encoder: Costs | None = None
        if role.serves(Stage.ENCODE):
            self._encoder = Costs(kind.profiles[ModelPart.ENCODER])
            times = EncoderTimes(self._encoder, bytes_per_pixel)
            self._prepare_s = [sum(map(times.prepare_s, need.item_pixels)) for need in demand.needs]
        self._passes_s: dict[float, float] = {}
        self._items = sum(need.share * need.items for need in demand.needs)
        """Of a request, mean."""
        tokens = sum(need.share * sum(need.item_tokens) for need in demand.needs)
        self._item_tokens = tokens / self._items if self._items else 0.0
        self._has_text = ModelPart.DECODER in kind.profiles
        if self._has_text:
            decoder = Costs(kind.profiles[ModelPart.DECODER])
            self.kv_token_nbytes = decoder.profile.measured.kv_token_nbytes
            self._steps = Steps(
                decoder,
                demand.needs,
                role,
                max_sequences=limits.max_sequences,
                budget=limits.token_budget,
                kv_tokens=offer.kv_tokens,
            )
            prompt_tokens = sum(need.share * need.prompt_tokens for need in demand.needs)
            one_way_s = prompt_tokens * self.kv_token_nbytes / kind.copied_bytes_per_s
            self._copy_s = one_way_s if self.hands_over else 0.0
            """Time that keys and values take which are copied between the devices and the host."""

    @property
    def hands_over(self) -> bool:
        """Whether keys and values go from here to another instance, or come from one."""
        role = self.offer.role
        return role.serves(Stage.PREFILL) != role.serves(Stage.DECODE)

    # --- what a request takes, at least -------------------------------------------------------------------------------

    @cached_property
    def seconds(self) -> Mapping[Stage, float]:
        """Time of the devices that each stage takes of a request, in the largest batches."""
        taken: dict[Stage, float] = {}
        if self.offer.role.serves(Stage.ENCODE):
            most = self.limits.max_batch_items
            taken[Stage.ENCODE] = self._items * self._pass_s(most) / most
        if self.offer.role.serves(Stage.PREFILL):
            copy_s = 0.0 if self.offer.role.serves(Stage.DECODE) else self._copy_s
            taken[Stage.PREFILL] = self._steps.prefill_s + copy_s
        if self.offer.role.serves(Stage.DECODE):
            copy_s = 0.0 if self.offer.role.serves(Stage.PREFILL) else self._copy_s
            taken[Stage.DECODE] = self._steps.decode_s + copy_s
        return taken

    @cached_property
    def prepare_mean_s(self) -> float:
        """Time of one core that a request takes."""
        return moments(self._shares, self._prepare_s)[0]

    def _pass_s(self, items: float) -> float:
        """A pass over so many items of the mean size."""
        if not self._item_tokens or self._encoder is None:
            return 0.0
        if (took_s := self._passes_s.get(items)) is None:
            took_s = self._passes_s[items] = self._encoder.encode_s(self._item_tokens, items).value
        return took_s

    # --- under a load -------------------------------------------------------------------------------------------------

    def load(self, count: int, rates: Rates) -> PoolLoad:
        """So many of them that share a load. A pool that cannot bear it has waits without end."""
        encode_per_s, prefill_per_s, decode_per_s = rates
        by_stage = {Stage.ENCODE: encode_per_s, Stage.PREFILL: prefill_per_s, Stage.DECODE: decode_per_s}
        utilization = {stage.value: by_stage[stage] * seconds / count for stage, seconds in self.seconds.items()}
        cores = count * self.offer.kind.prepare_cores
        if encode_per_s and self._items:
            utilization[PREPARE] = encode_per_s * self.prepare_mean_s / cores
        if not PoolLoad(utilization).is_bearable:
            return PoolLoad(utilization, ENDLESS, ENDLESS, ENDLESS, stepping=None)
        encode_busy, batch = self._encoded(count, encode_per_s)
        stepping, held_up, prefill_busy = IDLE, 0.0, 0.0
        if self._has_text:
            prefill_busy = prefill_per_s / count * self.seconds.get(Stage.PREFILL, 0.0)
            one_way = prefill_per_s if self.offer.role.serves(Stage.PREFILL) else decode_per_s
            left = 1 - encode_busy - one_way / count * self._copy_s
            found = self._steps.stepping(prefill_per_s / count, decode_per_s / count, left)
            if found is None:
                return PoolLoad(utilization, ENDLESS, ENDLESS, ENDLESS, stepping=None)
            stepping = found
            held_up = prefill_per_s / count * self._steps.prefill_s**2 + encode_busy * self._pass_s(batch)
        return PoolLoad(
            utilization,
            prepare=self._prepare_wait(cores, encode_per_s),
            encode=self._encode_wait(count, encode_per_s, encode_busy, batch, prefill_busy, stepping),
            prefill=self._prefill_wait(count, prefill_per_s, stepping, encode_busy, batch),
            batch_items=batch,
            stepping=stepping,
            held_up_s2_per_s=held_up,
        )

    def _encoded(self, count: int, per_s: float) -> tuple[float, float]:
        """Share of the time for which a device encodes, and items of a pass: as few as keep up well with the load."""
        if not per_s or not self._items:
            return 0.0, 1.0
        items_per_s, batch = per_s * self._items / count, 1.0
        busy = _BUSY_BESIDE if self._has_text else _BUSY_ALONE
        while batch < self.limits.max_batch_items and items_per_s * self._pass_s(batch) > busy * batch:
            batch = min(2 * batch, self.limits.max_batch_items)
        return items_per_s * self._pass_s(batch) / batch, batch

    def _prepare_wait(self, cores: int, per_s: float) -> Wait:
        spread = [
            seconds / min(cores, max(1, need.items))
            for seconds, need in zip(self._prepare_s, self._demand.needs, strict=True)
        ]
        return self._spread_wait(per_s, spread, cores, cores)

    def _encode_wait(
        self, count: int, per_s: float, busy: float, batch: float, prefill_busy: float, stepping: Stepping
    ) -> Wait:
        """For the pass in progress, and for the items before in passes as large as can be, beside what else the devices do."""
        if not per_s or not self._items:
            return NO_WAIT
        most = self.limits.max_batch_items
        token_s = self._pass_s(most) / most / self._item_tokens / (1 - prefill_busy)
        spread = [token_s * sum(need.item_tokens) / min(count, max(1, need.items)) for need in self._demand.needs]
        queued = self._spread_wait(per_s, spread, count, count)
        decoding = min(1.0, stepping.running)
        rest_s = busy * self._pass_s(batch) / 2
        share = min(1.0, max(queued.share, busy, decoding))
        return Wait(share, max(queued.mean_s, rest_s) + decoding * stepping.step_s / 2)

    def _spread_wait(self, per_s: float, spread: Sequence[float], servers: int, most: int) -> Wait:
        """The wait of requests whose items are spread over servers. ``spread``: the time of each form, in parallel."""
        if not per_s:
            return NO_WAIT
        mean, square = moments(self._shares, spread)
        ways = sum(need.share * min(most, max(1, need.items)) for need in self._demand.needs if need.items)
        with_items = sum(need.share for need in self._demand.needs if need.items)
        own = servers * with_items / ways if ways else float(servers)
        return wait(per_s, mean, square, servers=max(1.0, own), burstiness=self._demand.burstiness)

    def _prefill_wait(self, count: int, per_s: float, stepping: Stepping, encode_busy: float, batch: float) -> Wait:
        """For the step in progress, and the prompts before, beside the encoder of the same devices."""
        if not per_s or not self.offer.role.serves(Stage.PREFILL):
            return NO_WAIT
        left = 1 - encode_busy
        mean, square = moments(self._shares, [seconds / left for seconds in self._steps.queued(stepping)])
        queued = wait(per_s, mean, square, servers=count, burstiness=self._demand.burstiness)
        busy = min(1.0, max(stepping.running, per_s / count * stepping.step_s / max(1.0, stepping.prompts)))
        rest_s = busy * stepping.step_s / 2 + min(1.0, encode_busy) * self._pass_s(batch) / 2
        return Wait(max(queued.share, busy, min(1.0, encode_busy)), max(queued.mean_s, rest_s))

    # --- one request --------------------------------------------------------------------------------------------------

    def prepared_s(self, count: int) -> list[float]:
        """Preparation of the items of each form on all cores."""
        cores = count * self.offer.kind.prepare_cores
        return [
            seconds / need.items * ceil(need.items / cores) if need.items else 0.0
            for seconds, need in zip(self._prepare_s, self._demand.needs, strict=True)
        ]

    def encoding_s(self, count: int, load: PoolLoad) -> list[float]:
        """Passes of the items of each form from their beginning to their end, spread over the pool."""
        most = self.limits.max_batch_items
        stepping = load.stepping or IDLE
        beside_s = self._steps.time_s(stepping.running, 0) * min(1.0, stepping.running) if stepping.running else 0.0
        times = []
        for need in self._demand.needs:
            if not need.items:
                times.append(0.0)
                continue
            own = ceil(need.items / count)
            passes, items = ceil(own / most), max(min(own, most), load.batch_items)
            tokens = sum(need.item_tokens) / need.items
            size = tokens / self._item_tokens if self._item_tokens else 1.0
            times.append(passes * (self._pass_s(items) * size + beside_s))
        return times

    def first_token_s(self, load: PoolLoad) -> Sequence[float]:
        """Prefill of each form from its beginning to its first token, beside decodes."""
        return [self._steps.first_token_s(need, load.stepping or IDLE) for need in self._demand.needs]

    def tpot_share(self, load: PoolLoad, limit_s: float, tokens: int, more_s: float) -> float:
        """The share of answers with so many tokens after the first whose mean time between tokens is within the limit.

        ``more_s``: what goes on after the first token before they come, once for each answer.
        """
        if load.stepping is None:
            return 0.0
        if not tokens:
            return 1.0
        gap_s = load.stepping.step_s
        mean_s = gap_s + more_s / tokens
        variance = load.stepping.deviation_s**2 + load.held_up_s2_per_s * gap_s / tokens
        if not variance:
            return 1.0 if mean_s <= limit_s else 0.0
        return (1 + erf((limit_s - mean_s) / sqrt(2 * variance))) / 2
