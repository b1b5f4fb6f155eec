"""What profiles say of a pool under the mix of a window: capacity within the objectives, and how long a queue may take.

What is missing is named, never guessed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from triptych.domain.decision import PoolFacts
from triptych.domain.slo import Metric, Objective, Slo
from triptych.domain.windows import ClassWindow
from triptych.policy.capacity import ItemClass, TextLimits, encode_capacity, text_capacity
from triptych.policy.costs import Costs
from triptych.policy.scaling import item_mix, request_mix

_RARE = 0.01
"""Classes with a smaller share of the arrivals do not determine the objective."""


@dataclass(frozen=True, slots=True)
class Profiles:
    """Costs of both parts of a model, as far as there are profiles."""

    encoder: Costs | None = None
    text: Costs | None = None


def encoder_facts(
    profiles: Profiles, slo: Slo, classes: Mapping[str, ClassWindow], *, max_items: int, prepare_cores: int = 1
) -> PoolFacts:
    """Of a pool of encoders, in tokens of embeddings per second."""
    costs, mix = profiles.encoder, item_mix(classes)
    if costs is None:
        return PoolFacts(missing=("profile of the encoder",))
    if not mix:
        return PoolFacts(missing=("items in the last reports",))
    share = _share_s(profiles, slo, {name: one for name, one in classes.items() if one.items}, encode=True)
    if isinstance(share, str):
        return PoolFacts(missing=(share,))
    limit_s, alone_s = share
    capacity = encode_capacity(costs, mix, limit_s, max_items=max_items, prepare_cores=prepare_cores)
    return _facts(capacity.tokens_per_s, limit_s, alone_s, [one.value for one in capacity.warnings])


def text_facts(profiles: Profiles, slo: Slo, classes: Mapping[str, ClassWindow], *, limits: TextLimits) -> PoolFacts:
    """Of a pool of text instances, in tokens of prompts per second."""
    costs, mix = profiles.text, request_mix(classes)
    if costs is None:
        return PoolFacts(missing=("profile of the language model",))
    if not mix:
        return PoolFacts(missing=("finished requests in the last reports",))
    share = _share_s(profiles, slo, classes, encode=False)
    if isinstance(share, str):
        return PoolFacts(missing=(share,))
    limit_s, alone_s = share
    context = max(one.prompt_tokens for one in mix)
    tbt_s = min((_tbt_s(slo, name, costs, context) for name in classes), default=inf)
    capacity = text_capacity(costs, mix, ttft_slo_s=limit_s, tbt_slo_s=tbt_s, limits=limits)
    return _facts(capacity.tokens_per_s, limit_s, alone_s, [one.value for one in capacity.warnings])


def _facts(per_s: float, limit_s: float, alone_s: float, warnings: Sequence[str]) -> PoolFacts:
    missing = tuple(f"exact costs: {one}" for one in sorted(warnings))
    if per_s <= 0:
        return PoolFacts(missing=(*missing, "a size within the objectives: even an idle replica misses them"))
    return PoolFacts(per_s, max(0.0, limit_s - alone_s), missing)


def _share_s(
    profiles: Profiles, slo: Slo, classes: Mapping[str, ClassWindow], *, encode: bool
) -> tuple[float, float] | str:
    """The stage's part of the TTFT objective that leaves the least for waiting, and the stage's isolated latency, over the
    classes; or what is missing.
    """
    arrivals = sum(one.arrivals for one in classes.values())
    found: list[tuple[float, float]] = []
    for name, one in sorted(classes.items()):
        objective = slo.objective(name, Metric.TTFT)
        if objective is None or not one.arrivals or one.arrivals < _RARE * arrivals:
            continue
        encode_s, prefill_s = _encode_s(profiles.encoder, one), _prefill_s(profiles.text, one)
        share = _one_share_s(objective, encode_s, prefill_s, encode=encode)
        if share is None:
            return "profile of the language model" if encode else "profile of the encoder"
        found.append(share)
    return min(found, key=lambda one: one[0] - one[1], default="an objective for TTFT")


def _one_share_s(
    objective: Objective, encode_s: float | None, prefill_s: float | None, *, encode: bool
) -> tuple[float, float] | None:
    """A factor is of the stage's own latency; seconds are divided in proportion to both stages' latencies."""
    alone_s = encode_s if encode else prefill_s
    if alone_s is None:
        return None
    if objective.relative:
        return objective.value * alone_s, alone_s
    if encode_s is None or prefill_s is None or encode_s + prefill_s <= 0:
        return None
    return objective.value * alone_s / (encode_s + prefill_s), alone_s


def _encode_s(costs: Costs | None, one: ClassWindow) -> float | None:
    """Preparation and encoding of a mean item. The items of a request are encoded in parallel."""
    if not one.items:
        return 0.0
    if costs is None:
        return None
    (item,) = item_mix({"": one})
    return costs.encode_s(item.tokens).value + _prepare_s(costs, item)


def _prepare_s(costs: Costs, item: ItemClass) -> float:
    return costs.prepare_s(item.nbytes, item.pixels).value if item.nbytes else 0.0


def _prefill_s(costs: Costs | None, one: ClassWindow) -> float | None:
    if costs is None:
        return None
    return costs.prefill_s(max(1, round(one.prompt_tokens / one.arrivals))).value


def _tbt_s(slo: Slo, name: str, costs: Costs, context: int) -> float:
    objective = slo.objective(name, Metric.TBT)
    if objective is None:
        return inf
    return objective.value * (costs.decode_s(1, context).value if objective.relative else 1.0)
