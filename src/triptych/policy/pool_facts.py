"""Facts of a pool, as profiles say under the mix of a window: capacity within the objectives, and how long a queue may take.

What is missing is named, never guessed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, inf
from typing import NamedTuple

from triptych.domain.decision import PoolFacts
from triptych.domain.slo import ChargedStage, Isolated, Metric, Slo
from triptych.domain.stage import Role, Stage
from triptych.domain.windows import ClassWindow
from triptych.policy.capacity import Capacity, ItemClass, TextLimits, encode_capacity, text_capacity
from triptych.policy.costs import Costs
from triptych.policy.scaling import answer_tokens, encode_tokens, item_mix, prompt_tokens, request_mix
from triptych.policy.sizing import BatchChange, DegreeChange, Sizing, better_batch, better_degree, choose_size

_NO_ENCODER, _NO_TEXT = "profile of the encoder", "profile of the language model"
_RARE = 0.01
"""Classes with a smaller share of the arrivals do not determine the objective."""
_LEAST_SHARE = 0.02
"""Of what an instance does that serves one request after the other. Less is no capacity to count instances by: a row of the profile
was measured beside other work, or the objectives leave no time to wait at all.
"""


@dataclass(frozen=True, slots=True)
class Profiles:
    """Costs of both parts of a model, as far as there are profiles."""

    encoder: Costs | None = None
    text: Costs | None = None


@dataclass(frozen=True, slots=True)
class EncoderLimits:
    """The limits of an encoder that bound its batches."""

    max_items: int
    prepare_cores: int = 1


def encoder_facts(
    profiles: Profiles, slo: Slo, classes: Mapping[str, ClassWindow], *, limits: EncoderLimits
) -> PoolFacts:
    """Of a pool of encoders, in tokens of embeddings per second."""
    return _facts(_encoder(profiles, slo, classes, limits))


def text_facts(
    profiles: Profiles, slo: Slo, classes: Mapping[str, ClassWindow], *, limits: TextLimits, role: Role = Role.PD
) -> PoolFacts:
    """Of a pool of text instances, in tokens of prompts per second; of answers if the ``role`` only goes on with answers."""
    return _facts(_text(profiles, slo, classes, limits, role))


def hybrid_facts(
    profiles: Profiles,
    slo: Slo,
    classes: Mapping[str, ClassWindow],
    *,
    encoder: EncoderLimits,
    text: TextLimits,
    role: Role = Role.EPD,
) -> PoolFacts:
    """Of a pool of instances that encode, and prefill or decode or both, on one device, in the tokens of ``text_facts``.

    Each kind of work takes a share of the device. With r tokens to encode per token of prompts (or answers), and the capacities
    c_e (tokens of embeddings, encoding alone) and c_t (tokens of prompts, without encoding), a load of c tokens of prompts fills
    it when c / c_t + r c / c_e = 1: so c = 1 / (1 / c_t + r / c_e).
    """
    texts = text_facts(profiles, slo, classes, limits=text, role=role)
    if not any(window.items for window in classes.values()):
        return texts
    items = encoder_facts(profiles, slo, classes, limits=encoder)
    missing = tuple(dict.fromkeys(items.missing + texts.missing))
    stages = (ChargedStage.ENCODE, ChargedStage.PREFILL) if role.serves(Stage.PREFILL) else (ChargedStage.ENCODE,)
    shares = _shares_s(profiles, slo, classes, stages)
    if isinstance(shares, str) or items.capacity_per_s is None or texts.capacity_per_s is None:
        return PoolFacts(missing=missing)
    tokens = prompt_tokens if role.serves(Stage.PREFILL) else answer_tokens
    ratio = encode_tokens(classes) / max(1.0, tokens(classes))
    per_s = 1 / (1 / texts.capacity_per_s + ratio / items.capacity_per_s)
    return PoolFacts(per_s, _wait_s(shares, classes), missing=missing)


def isolated(profiles: Profiles, window: ClassWindow, *, encoders: int = 1) -> Isolated | None:
    """The latencies of a request with the system to itself, from a window with nothing but it; None if they are unknown.

    Its items are spread over ``encoders``, each of which encodes its part in one pass. What no profile has is 0: preparation
    at the router, and the pull.
    """
    items = ceil(window.items / max(1, encoders))
    encode_s, prefill_s = _encode_s(profiles.encoder, window, items), _prefill_s(profiles.text, window)
    if profiles.text is None or encode_s is None or prefill_s is None:
        return None
    return Isolated(0.0, encode_s, prefill_s, profiles.text.decode_s(1, window.prompt_tokens).value)


def encoder_sizing(
    by_degree: Mapping[int, Profiles],
    slo: Slo,
    classes: Mapping[str, ClassWindow],
    *,
    limits: EncoderLimits,
    most: int,
) -> Sizing | None:
    """The batch, up to ``most``, and the tensor-parallel degree that are best for encoders, among the degrees with profiles;
    None where no capacity is known.
    """
    return _sizing(_by_degree(_encoder_at, by_degree, slo, classes, limits), most)


def text_sizing(
    by_degree: Mapping[int, Profiles], slo: Slo, classes: Mapping[str, ClassWindow], *, limits: TextLimits, most: int
) -> Sizing | None:
    """As ``encoder_sizing``, for text instances: the batch is that of a decode step."""
    return _sizing(_by_degree(_text_at, by_degree, slo, classes, limits), most)


def better_encoder_batch(
    profiles: Profiles, slo: Slo, classes: Mapping[str, ClassWindow], *, limits: EncoderLimits, most: int
) -> BatchChange | None:
    """The largest batch of encoders that run, if another one is better; None also where no capacity is known."""
    return _better(partial(_encoder_at, profiles, slo, classes, limits), limits.max_items, most)


def better_text_batch(
    profiles: Profiles, slo: Slo, classes: Mapping[str, ClassWindow], *, limits: TextLimits, most: int, role: Role
) -> BatchChange | None:
    """As ``better_encoder_batch``, for text instances."""
    return _better(partial(_text_at, profiles, slo, classes, limits, role=role), limits.max_sequences, most)


def better_encoder_degree(
    by_degree: Mapping[int, Profiles],
    slo: Slo,
    classes: Mapping[str, ClassWindow],
    *,
    limits: EncoderLimits,
    now: int,
    most: int,
) -> DegreeChange | None:
    """The tensor-parallel degree of encoders, if another one with a profile is better than that of ``now``."""
    return better_degree(_known(_by_degree(_encoder_at, by_degree, slo, classes, limits)), now, most=most)


def better_text_degree(
    by_degree: Mapping[int, Profiles],
    slo: Slo,
    classes: Mapping[str, ClassWindow],
    *,
    limits: TextLimits,
    now: int,
    most: int,
) -> DegreeChange | None:
    """As ``better_encoder_degree``, for text instances of role PD."""
    return better_degree(_known(_by_degree(_text_at, by_degree, slo, classes, limits)), now, most=most)


def _better(at: "_At", now: int, most: int) -> BatchChange | None:
    return better_batch(partial(_capacity, at), now, most=most) if isinstance(at(1), _Found) else None


class _Found(NamedTuple):
    capacity: Capacity
    wait_s: float | None
    """The longest wait within the objectives; None where no first token is waited for."""
    serial_per_s: float
    """Tokens per second of an instance that serves one item or request after the other, without objectives."""


_At = Callable[[int], _Found | str]
"""By the largest batch."""


def _by_degree(at: Callable[..., _Found | str], by_degree: Mapping[int, Profiles], *given: object) -> Mapping[int, _At]:
    return {degree: partial(at, profiles, *given) for degree, profiles in by_degree.items()}


def _encoder_at(
    profiles: Profiles, slo: Slo, classes: Mapping[str, ClassWindow], limits: EncoderLimits, batch: int
) -> _Found | str:
    return _encoder(profiles, slo, classes, replace(limits, max_items=batch))


def _text_at(
    profiles: Profiles,
    slo: Slo,
    classes: Mapping[str, ClassWindow],
    limits: TextLimits,
    batch: int,
    *,
    role: Role = Role.PD,
) -> _Found | str:
    return _text(profiles, slo, classes, replace(limits, max_sequences=batch), role)


def _known(found: Mapping[int, _At]) -> Mapping[int, Callable[[int], Capacity]]:
    """Capacities of the degrees of which something is known."""
    return {degree: partial(_capacity, at) for degree, at in found.items() if isinstance(at(1), _Found)}


def _sizing(found: Mapping[int, _At], most: int) -> Sizing | None:
    known = _known(found)
    return choose_size(known, most=most) if known else None


def _capacity(at: _At, batch: int) -> Capacity:
    result = at(batch)
    return result.capacity if isinstance(result, _Found) else Capacity(0.0, 0.0, batch, inf)


def _encoder(profiles: Profiles, slo: Slo, classes: Mapping[str, ClassWindow], limits: EncoderLimits) -> _Found | str:
    """Or what is missing."""
    costs, mix = profiles.encoder, item_mix(classes)
    if costs is None:
        return _NO_ENCODER
    if not mix:
        return "items in the last reports"
    with_items = {name: window for name, window in sorted(classes.items()) if window.items}
    shares = _shares_s(profiles, slo, with_items, (ChargedStage.ENCODE,))
    if isinstance(shares, str):
        return shares
    limited = [
        replace(item_class, slo_s=shares.get(name, _FREE).limit_s)
        for name, item_class in zip(with_items, mix, strict=True)
    ]
    capacity = encode_capacity(costs, limited, inf, max_items=limits.max_items, prepare_cores=limits.prepare_cores)
    return _Found(
        capacity,
        _wait_s(shares, with_items),
        _serial_per_s(
            [
                (
                    item_class.share,
                    item_class.tokens,
                    costs.encode_s(item_class.tokens).value + _prepare_s(costs, item_class),
                )
                for item_class in mix
            ]
        ),
    )


def _text(
    profiles: Profiles, slo: Slo, classes: Mapping[str, ClassWindow], limits: TextLimits, role: Role
) -> _Found | str:
    """Or what is missing."""
    costs, mix = profiles.text, request_mix(classes)
    prefills, decodes = role.serves(Stage.PREFILL), role.serves(Stage.DECODE)
    if costs is None:
        return _NO_TEXT
    if not mix:
        return "finished requests in the last reports"
    arrived = {name: window for name, window in sorted(classes.items()) if window.arrivals}
    shares = _shares_s(profiles, slo, arrived, (ChargedStage.PREFILL,)) if prefills else {}
    if isinstance(shares, str):
        return shares
    limited = [
        replace(request_class, ttft_slo_s=shares.get(name, _FREE).limit_s)
        for name, request_class in zip(arrived, mix, strict=True)
    ]
    context = max(request_class.prompt_tokens for request_class in mix)
    tbt_s = min((_tbt_s(slo, name, costs, context) for name in arrived), default=inf)
    if not prefills and tbt_s == inf:
        return "an objective for TBT"
    capacity = text_capacity(costs, limited, ttft_slo_s=inf, tbt_slo_s=tbt_s, limits=limits, role=role)
    served: list[tuple[float, int, float]] = []
    for request_class in mix:
        prefill_s = costs.prefill_s(request_class.prompt_tokens).value if prefills else 0.0
        decode_s = (
            max(0, request_class.output_tokens - 1) * costs.decode_s(1, request_class.prompt_tokens).value
            if decodes
            else 0.0
        )
        served.append(
            (
                request_class.share,
                request_class.prompt_tokens if prefills else request_class.output_tokens,
                prefill_s + decode_s,
            )
        )
    return _Found(capacity, _wait_s(shares, arrived) if prefills else None, _serial_per_s(served))


def _serial_per_s(served: Sequence[tuple[float, int, float]]) -> float:
    """From share, tokens and seconds of each kind."""
    seconds = sum(share * alone_s for share, _, alone_s in served)
    return sum(share * tokens for share, tokens, _ in served) / seconds if seconds > 0 else 0.0


def _facts(found: _Found | str) -> PoolFacts:
    if isinstance(found, str):
        return PoolFacts(missing=(found,))
    missing = tuple(f"exact costs: {text}" for text in sorted(text.value for text in found.capacity.warnings))
    if found.capacity.tokens_per_s <= 0:
        return PoolFacts(missing=(*missing, "a size within the objectives: even an idle replica misses them"))
    per_s = found.capacity.tokens_per_s
    if per_s < _LEAST_SHARE * found.serial_per_s:
        text = f"{per_s:.3g} tokens/s of an instance by its profile, {found.serial_per_s:.3g} without objectives"
        return PoolFacts(missing=(*missing, f"a plausible capacity: {text}"))
    return PoolFacts(per_s, found.wait_s, found.capacity.batch, missing, busy_per_s=found.capacity.busy_per_s)


class _Share(NamedTuple):
    """Of some stages of a class."""

    limit_s: float
    """The stages' part of the TTFT objective."""
    alone_s: float
    """The stages' isolated latency."""


_FREE = _Share(inf, 0.0)


def _shares_s(
    profiles: Profiles, slo: Slo, classes: Mapping[str, ClassWindow], stages: Sequence[ChargedStage]
) -> dict[str, _Share] | str:
    """The stages' share in each class with a TTFT objective; or what is missing."""
    found: dict[str, _Share] = {}
    for name, window in classes.items():
        objective = slo.objective(name, Metric.TTFT)
        if objective is None or not window.arrivals:
            continue
        alone: dict[ChargedStage, float] = {}
        if (encode_s := _encode_s(profiles.encoder, window)) is not None:
            alone[ChargedStage.ENCODE] = encode_s
        if (prefill_s := _prefill_s(profiles.text, window)) is not None:
            alone[ChargedStage.PREFILL] = prefill_s
        # Seconds are divided in proportion to both stages' latencies; a factor is of the stages' own.
        divided = stages if objective.relative else (ChargedStage.ENCODE, ChargedStage.PREFILL)
        if unknown := [stage for stage in divided if stage not in alone]:
            return _NO_ENCODER if ChargedStage.ENCODE in unknown else _NO_TEXT
        alone_s, whole_s = sum(alone[stage] for stage in stages), sum(alone[stage] for stage in divided)
        if whole_s > 0:
            limit_s = objective.value * (whole_s if objective.relative else 1.0)
            found[name] = _Share(limit_s * alone_s / whole_s, alone_s)
    return found or "an objective for TTFT"


def _wait_s(shares: Mapping[str, _Share], classes: Mapping[str, ClassWindow]) -> float:
    """The longest wait within the objectives of all classes but rare ones."""
    arrivals = sum(window.arrivals for window in classes.values())
    common = [share for name, share in shares.items() if classes[name].arrivals >= _RARE * arrivals]
    return max(0.0, min((share.limit_s - share.alone_s for share in common), default=inf))


def _encode_s(costs: Costs | None, window: ClassWindow, items: int = 1) -> float | None:
    """Preparation of a mean item, as there is a core for each, and one pass over so many of them."""
    if not window.items:
        return 0.0
    if costs is None:
        return None
    (item,) = item_mix({"": window})
    return costs.encode_s(item.tokens, items).value + _prepare_s(costs, item)


def _prepare_s(costs: Costs, item: ItemClass) -> float:
    return costs.prepare_s(item.nbytes, item.pixels).value if item.nbytes else 0.0


def _prefill_s(costs: Costs | None, window: ClassWindow) -> float | None:
    if costs is None:
        return None
    return costs.prefill_s(max(1, round(window.prompt_tokens / window.arrivals))).value


def _tbt_s(slo: Slo, name: str, costs: Costs, context: int) -> float:
    objective = slo.objective(name, Metric.TBT)
    if objective is None:
        return inf
    return objective.value * (costs.decode_s(1, context).value if objective.relative else 1.0)
