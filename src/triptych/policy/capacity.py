"""How much load one replica bears within its objectives (MC in ModServe section 4.2), for the mix of the last window.

The paper takes MC from the profile as a constant. It depends on the mix, so here a queueing model over the profile's costs
(Kingman's formula with an exponential tail) gives it for any mix. Load levels measured by the profile only lower it:
the model knows no overheads outside the engine.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import ceil, inf, log

from triptych.domain.stage import Role, Stage
from triptych.policy.costs import Costs, CostWarning, Estimate

_HALVINGS = 30


@dataclass(frozen=True, slots=True)
class ItemClass:
    """Items of one kind. ``share`` is their part of all items, in any unit."""

    tokens: int
    nbytes: int = 0
    pixels: int = 0
    """0, with ``nbytes`` 0, if its preparation costs nothing."""
    share: float = 1.0
    slo_s: float | None = None
    """Objective of this kind; None for the one of all kinds."""


@dataclass(frozen=True, slots=True)
class RequestClass:
    """Requests of one kind, as a text instance sees them. ``share`` is their part of all requests, in any unit."""

    prompt_tokens: int
    """Positions of the prompt; of decoder-only models with those of items."""
    output_tokens: int
    """Expected length of the answer."""
    cached_tokens: int = 0
    """Part of the prompt that is found in the prefix cache."""
    share: float = 1.0
    ttft_slo_s: float | None = None
    """Objective of this kind; None for the one of all kinds."""


@dataclass(frozen=True, slots=True)
class Load:
    """Load that arrives, and how closely objectives must be met."""

    quantile: float = 0.99
    """The share of latencies that must be within the objective."""
    burstiness: float = 1.0
    """Squared coefficient of variation of the gaps between arrivals: 1 for Poisson."""


@dataclass(frozen=True, slots=True)
class TextLimits:
    """The limits of a text engine that bound its batches."""

    max_sequences: int
    token_budget: int
    kv_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Capacity:
    """The highest load that one replica bears; 0 if it misses its objectives even without load."""

    per_s: float
    """Items or requests per second."""
    tokens_per_s: float
    """Tokens of these items or prompts; of answers where only answers are decoded."""
    batch: int
    """Batch size at that load."""
    latency_s: float
    """Predicted quantile of the latency at that load; if it is 0, of the latency without load."""
    gap_s: float = 0.0
    """Predicted mean time between tokens, likewise."""
    busy_per_s: float = 0.0
    """Tokens per second of a replica that is never idle, whatever the latencies: how fast it works off a queue."""
    warnings: frozenset[CostWarning] = frozenset()


def encode_capacity(
    costs: Costs,
    mix: Sequence[ItemClass],
    slo_s: float,
    *,
    max_items: int,
    prepare_cores: int = 1,
    load: Load = Load(),  # frozen
) -> Capacity:
    """The highest load of an encoder at which its items are prepared and encoded within their objectives, or ``slo_s``.

    An item waits for one of ``prepare_cores`` and is prepared; then it waits for a pass and is encoded in a batch of
    equal items, of the best power of two up to ``max_items``. Raises ValueError for an empty mix.
    """
    found = _modelled_encode(costs, mix, slo_s, max_items, prepare_cores, load)
    levels = costs.load_levels(Stage.ENCODE, max_items)
    if levels:
        level_slo_s = _nearest(levels[0].tokens, {item_class.tokens: item_class.slo_s for item_class in mix}, slo_s)
        alone = _modelled_encode(costs, [ItemClass(levels[0].tokens)], level_slo_s, max_items, 1, load)
        found = _lowered(found, alone, costs.measured_load(Stage.ENCODE, level_slo_s, max_items))
    return found


def text_capacity(
    costs: Costs,
    mix: Sequence[RequestClass],
    *,
    ttft_slo_s: float,
    tbt_slo_s: float,
    limits: TextLimits,
    load: Load = Load(),  # frozen
    role: Role = Role.PD,
) -> Capacity:
    """The highest load of a text instance, by what its ``role`` prefills and decodes, at which first tokens come within their objectives, or ``ttft_slo_s``, of a
    request's arrival there, and tokens follow at a mean distance within ``tbt_slo_s``.

    A prompt is prefilled in chunks of the token budget, each in one step with a decode of all running sequences. As many
    sequences run as arrive while one is answered (Little's law). An instance that does not decode has no running sequences; one
    that does not prefill gets keys and values. Load levels are those of one that does both. Raises ValueError for an empty mix.
    """
    found = _modelled_text(costs, mix, ttft_slo_s, tbt_slo_s, limits, load, role)
    for stage in (Stage.PREFILL, Stage.DECODE):
        levels = costs.load_levels(stage, limits.max_sequences)
        if levels and role.serves(stage):
            level_slo_s = _nearest(
                levels[0].tokens,
                {request_class.prompt_tokens: request_class.ttft_slo_s for request_class in mix},
                ttft_slo_s,
            )
            alone = [RequestClass(levels[0].tokens, levels[0].output_tokens)]
            modelled = _modelled_text(costs, alone, level_slo_s, tbt_slo_s, limits, load, Role.PD)
            slo_s = level_slo_s if stage is Stage.PREFILL else tbt_slo_s
            found = _lowered(found, modelled, costs.measured_load(stage, slo_s, limits.max_sequences))
    return found


def _nearest(tokens: int, slos_s: Mapping[int, float | None], otherwise_s: float) -> float:
    """The objective of the kind whose size is nearest to the one that was measured under load."""
    slo_s = slos_s[min(slos_s, key=lambda size: abs(log(max(1, size) / tokens)))]
    return otherwise_s if slo_s is None else slo_s


def _lowered(found: Capacity, modelled: Capacity, measured: Estimate) -> Capacity:
    """``found``, in the proportion by which a measured load is below the modelled one."""
    if modelled.tokens_per_s <= measured.value:
        return found
    share = measured.value / modelled.tokens_per_s
    return replace(
        found,
        per_s=share * found.per_s,
        tokens_per_s=share * found.tokens_per_s,
        busy_per_s=share * found.busy_per_s,
        warnings=found.warnings | measured.warnings,
    )


def _modelled_encode(
    costs: Costs, mix: Sequence[ItemClass], slo_s: float, max_items: int, prepare_cores: int, load: Load
) -> Capacity:
    shares = _shares([item_class.share for item_class in mix])
    tokens = _mean(shares, [item_class.tokens for item_class in mix])
    prepared = [
        costs.prepare_s(item_class.nbytes, item_class.pixels) if item_class.nbytes else Estimate(0.0)
        for item_class in mix
    ]
    prepare_s = [estimate.value for estimate in prepared]
    preparing = _Queue(shares, prepare_s, load, servers=prepare_cores)
    best: Capacity | None = None
    items = 1
    while items <= max_items:
        encoded = [costs.encode_s(item_class.tokens, items) for item_class in mix]
        encode_s = [estimate.value for estimate in encoded]
        encoding = _Queue(shares, encode_s, load, customers=items)
        services_s = [sum(both) for both in zip(prepare_s, encode_s, strict=True)]
        late_s = _late_s(shares, services_s, [item_class.slo_s for item_class in mix], slo_s, load)

        def wait_s(per_s: float, encoding: _Queue = encoding) -> float:
            return preparing.wait_s(per_s) + encoding.wait_s(per_s)

        per_s = _highest(wait_s, -late_s, min(preparing.peak_per_s, encoding.peak_per_s))
        if best is None or per_s > best.per_s:
            warnings = costs.warnings.union(*(estimate.warnings for estimate in (*prepared, *encoded)))
            latency_s = _quantile(shares, services_s, load.quantile) + wait_s(per_s)
            peak_per_s = min(preparing.peak_per_s, encoding.peak_per_s)
            best = Capacity(per_s, tokens * per_s, items, latency_s, busy_per_s=tokens * peak_per_s, warnings=warnings)
        items *= 2
    if best is None:
        raise ValueError(f"max_items is {max_items}, must be at least 1")
    return best


def _modelled_text(
    costs: Costs,
    mix: Sequence[RequestClass],
    ttft_slo_s: float,
    tbt_slo_s: float,
    limits: TextLimits,
    load: Load,
    role: Role,
) -> Capacity:
    model = _TextModel(costs, mix, limits, load, role)

    def late_s(per_s: float) -> float:
        batch = model.running(per_s)
        return inf if batch is None or model.gap_s(per_s, batch) > tbt_slo_s else model.late_s(per_s, batch, ttft_slo_s)

    per_s = _highest(late_s, 0.0, model.peak_per_s)
    batch = model.running(per_s) or 0.0
    return Capacity(
        per_s,
        model.tokens * per_s,
        max(1, ceil(batch)),
        model.ttft_s(per_s, batch),
        model.gap_s(per_s, batch),
        model.tokens * model.peak_per_s,
        model.warnings,
    )


class _TextModel:
    """Steps of a text instance under a load of requests per second."""

    def __init__(self, costs: Costs, mix: Sequence[RequestClass], limits: TextLimits, load: Load, role: Role) -> None:
        prefills, decodes = role.serves(Stage.PREFILL), role.serves(Stage.DECODE)
        self._load = load
        self._shares = _shares([request_class.share for request_class in mix])
        self._slos_s = [request_class.ttft_slo_s for request_class in mix]
        new = [max(1, request_class.prompt_tokens - request_class.cached_tokens) for request_class in mix]
        prefilled = [
            costs.prefill_s(tokens, min(request_class.cached_tokens, request_class.prompt_tokens))
            if prefills
            else Estimate(0.0)
            for tokens, request_class in zip(new, mix, strict=True)
        ]
        self._prefill_s = [estimate.value for estimate in prefilled]
        self._chunks = [ceil(tokens / limits.token_budget) if prefills else 0 for tokens in new]
        self._prefill_mean_s = _mean(self._shares, self._prefill_s)
        prompt_tokens = _mean(self._shares, [request_class.prompt_tokens for request_class in mix])
        self.tokens = (
            prompt_tokens if prefills else _mean(self._shares, [request_class.output_tokens for request_class in mix])
        )
        """Of a request, in the unit of its load."""
        decoded = [max(0, request_class.output_tokens - 1) if decodes else 0 for request_class in mix]
        """Tokens after the first, which prefill makes."""
        self._decoded = _mean(self._shares, decoded)
        held = [
            (request_class.prompt_tokens + request_class.output_tokens / 2) * many
            for request_class, many in zip(mix, decoded, strict=True)
        ]
        self._context = _mean(self._shares, held) / self._decoded if self._decoded else prompt_tokens
        self._most = float(limits.max_sequences)
        if limits.kv_tokens is not None:
            self._most = min(self._most, limits.kv_tokens // max(1.0, self._context))
        decode = costs.decode_s(max(1.0, self._most), self._context)
        self.warnings = costs.warnings.union(*(estimate.warnings for estimate in prefilled))
        if self._decoded:
            self.warnings |= decode.warnings
        measured = CostWarning.NOT_MEASURED not in decode.warnings
        self._step_s = costs.decode_line(self._context).at if measured else _no_time

    @property
    def peak_per_s(self) -> float:
        busy_s = self._prefill_mean_s + self._decoded * self._step_s(self._most) / max(1.0, self._most)
        return 1 / busy_s if busy_s > 0 else inf

    def running(self, per_s: float) -> float | None:
        """The mean number of decoding sequences, by Little's law; None if they become more and more."""
        left = 1 - per_s * self._prefill_mean_s
        if left <= 0 or (self._decoded and self._most < 1):
            return None
        if not self._decoded or per_s == 0:
            return 0.0

        def keeps_up(batch: float) -> bool:
            return batch * left >= per_s * self._decoded * self._step_s(batch)

        if not keeps_up(self._most):
            return None
        low, high = 0.0, self._most
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if keeps_up(middle) else (middle, high)
        return high

    def gap_s(self, per_s: float, batch: float) -> float:
        """The mean time between two tokens of a sequence, with the prefills in between."""
        return self._step_s(batch) / (1 - per_s * self._prefill_mean_s) if self._decoded else 0.0

    def ttft_s(self, per_s: float, batch: float) -> float:
        """The quantile of the time to the first token."""
        services_s = self._services_s(batch)
        return _quantile(self._shares, services_s, self._load.quantile) + self._wait_s(per_s, services_s)

    def late_s(self, per_s: float, batch: float, slo_s: float) -> float:
        """The quantile of the time by which first tokens come after their objectives; negative if they come earlier."""
        services_s = self._services_s(batch)
        return _late_s(self._shares, services_s, self._slos_s, slo_s, self._load) + self._wait_s(per_s, services_s)

    def _services_s(self, batch: float) -> list[float]:
        beside_s = self._step_s(batch) * min(1.0, batch) if self._decoded else 0.0
        return [seconds + chunks * beside_s for seconds, chunks in zip(self._prefill_s, self._chunks, strict=True)]

    def _wait_s(self, per_s: float, services_s: Sequence[float]) -> float:
        return _Queue(self._shares, services_s, self._load).wait_s(per_s)


class _Queue:
    """A queue with general service times, before ``servers`` servers that take up to ``customers`` at once."""

    def __init__(
        self, shares: Sequence[float], services_s: Sequence[float], load: Load, *, servers: int = 1, customers: int = 1
    ) -> None:
        self._load = load
        self._service_s = _mean(shares, services_s) / servers
        square = _mean(shares, [seconds * seconds for seconds in services_s]) / servers**2
        spread = square / self._service_s**2 - 1 if self._service_s else 0.0
        self._variation = max(0.0, load.burstiness + spread) / 2
        self._customers = customers

    @property
    def peak_per_s(self) -> float:
        return self._customers / self._service_s if self._service_s else inf

    def wait_s(self, per_s: float) -> float:
        """The quantile of the waiting time at a load of ``per_s`` customers per second; infinite from the peak on."""
        if not self._service_s:
            return 0.0
        utilization = per_s / self.peak_per_s
        if utilization >= 1:
            return inf
        missed = 1 - self._load.quantile
        if utilization <= missed:
            return 0.0
        return self._variation * self._service_s / (1 - utilization) * log(utilization / missed)


def _highest(latency_s: Callable[[float], float], slo_s: float, peak_per_s: float) -> float:
    """The highest load below the peak at which the latency is within the objective; 0 if there is none."""
    low, high = 0.0, peak_per_s
    if high == inf:
        raise ValueError("nothing in this mix costs time: the profile lacks its tables")
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if latency_s(middle) <= slo_s else (low, middle)
    return low if low > 0 and latency_s(low) <= slo_s else 0.0


def _no_time(batch: float) -> float:
    del batch
    return 0.0


def _shares(weights: Sequence[float]) -> list[float]:
    whole = sum(weights)
    if whole <= 0 or min(weights) < 0:
        raise ValueError("the mix is empty")
    return [weight / whole for weight in weights]


def _mean(shares: Sequence[float], values: Sequence[float]) -> float:
    return sum(share * value for share, value in zip(shares, values, strict=True))


def _late_s(
    shares: Sequence[float],
    services_s: Sequence[float],
    slos_s: Sequence[float | None],
    slo_s: float,
    load: Load,
) -> float:
    """The quantile of the time by which services alone exceed their objectives; negative if there is time to wait."""
    limits_s = [slo_s if own_s is None else own_s for own_s in slos_s]
    late_s = [service_s - limit_s for service_s, limit_s in zip(services_s, limits_s, strict=True)]
    return _quantile(shares, late_s, load.quantile)


def _quantile(shares: Sequence[float], values: Sequence[float], quantile: float) -> float:
    """The smallest value that at least this share does not exceed."""
    ordered = sorted(zip(values, shares, strict=True))
    reached = accumulate(share for _, share in ordered)
    within = (value for (value, _), share in zip(ordered, reached, strict=True) if share >= quantile - 1e-9)
    return next(within, ordered[-1][0])
