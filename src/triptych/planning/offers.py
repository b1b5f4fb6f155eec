"""Instances that there can be: roles on devices in degrees that fit, with batch limits by their costs."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from triptych.domain.stage import ModelPart, Role, Stage
from triptych.policy.capacity import Capacity, ItemClass, Load, RequestClass, TextLimits, encode_capacity, text_capacity
from triptych.policy.costs import Costs
from triptych.policy.roofline import DoesNotFit
from triptych.policy.sizing import choose_size
from triptych.runtime.plans import Budget

from .combination import Wanted
from .pools import Instance, Limits, Offer
from .space import DEGREES, MOST_DEGREES

_MOST_SEQUENCES = 512
_MOST_ITEMS = 32
_STEP_TOKENS = 2048
"""Tokens of a step, unless more sequences than that run."""
_USUAL = Limits(8, 32, _STEP_TOKENS)
"""Where no batch meets the objectives."""
_MOST_UNLIMITED = 4
"""Instances of a role on devices without a limit that are tried."""
_PATIENT_S = 3600.0
"""In place of an objective that is not set."""


class Supplier(Protocol):
    """Says what instances of one model there can be."""

    @property
    def roles(self) -> Sequence[Role]:
        """Roles that its engine has."""
        ...

    @property
    def bytes_per_pixel(self) -> float:
        """Of undecoded items."""
        ...

    def offer(self, role: Role, device: str, degree: int) -> Offer:
        """Raises DoesNotFit."""
        ...


def offers(supplier: Supplier, budget: Budget, wanted: Wanted) -> Mapping[Role, Sequence[Instance]]:
    """Instances of each role: on each kind of device, in the least degree that fits and those after it.

    Raises DoesNotFit if no device holds a role that prefills or decodes.
    """
    found: dict[Role, list[Instance]] = {role: [] for role in supplier.roles}
    fault: DoesNotFit | None = None
    known: dict[tuple[str, str, int, Role], Limits] = {}
    degrees = MOST_DEGREES if len(budget.devices) == 1 else MOST_DEGREES - 1
    for role in supplier.roles:
        for device, count in budget.devices.items():
            fitting = 0
            for degree in DEGREES:
                most = 1 if role is Role.E else degrees
                if fitting == most or (count is not None and degree > count):
                    break
                try:
                    offer = supplier.offer(role, device, degree)
                except DoesNotFit as error:
                    fault = fault or error
                    continue
                fitting += 1
                own = offer.limits or _limits(offer, wanted, known)
                found[role].append(Instance(offer, wanted.demand, own, bytes_per_pixel=supplier.bytes_per_pixel))
    if fault is not None and not any(found[role] for role in found if role is not Role.E):
        raise fault
    return {role: _worth(instances, budget) for role, instances in found.items()}


def _worth(instances: Sequence[Instance], budget: Budget) -> Sequence[Instance]:
    """Of devices without a limit those that are cheaper for a request, or faster, than any other."""
    unlimited = [instance for instance in instances if budget.devices[instance.offer.device] is None]
    if len(unlimited) <= _MOST_UNLIMITED:
        return instances

    def taken(instance: Instance) -> tuple[float, float]:
        seconds = sum(instance.seconds.values())
        return seconds * (instance.offer.usd_per_hour or instance.offer.degree), seconds

    def is_beaten(instance: Instance) -> bool:
        own = taken(instance)
        return any(
            other != own and all(better <= mine for better, mine in zip(other, own, strict=True))
            for other in map(taken, unlimited)
        )

    worth = sorted((instance for instance in unlimited if not is_beaten(instance)), key=taken)[:_MOST_UNLIMITED]
    return [instance for instance in instances if instance in worth or instance not in unlimited]


def _limits(offer: Offer, wanted: Wanted, known: dict[tuple[str, str, int, Role], Limits]) -> Limits:
    """The largest batches that still raise what an instance bears by more than 5 % for each doubling."""
    items = _USUAL.max_batch_items
    if offer.role.serves(Stage.ENCODE):
        key = "items", offer.device, offer.degree, Role.E
        if key not in known:
            known[key] = Limits(_largest(_encoding(offer, wanted), _MOST_ITEMS, items), 0, 0)
        items = known[key].max_batch_items
    sequences = _USUAL.max_sequences
    if offer.role.serves(Stage.DECODE):
        key = "sequences", offer.device, offer.degree, Role.PD if offer.role.serves(Stage.PREFILL) else Role.D
        if key not in known:
            known[key] = Limits(0, _largest(_decoding(offer, wanted, key[3]), _MOST_SEQUENCES, sequences), 0)
        sequences = known[key].max_sequences
    return Limits(items, sequences, max(_STEP_TOKENS, sequences))


def _largest(capacity_at: Callable[[int], Capacity], most: int, usual: int) -> int:
    sizing = choose_size({1: capacity_at}, most=most)
    return sizing.max_batch if sizing.capacity.per_s else usual


def _encoding(offer: Offer, wanted: Wanted) -> Callable[[int], Capacity]:
    costs = Costs(offer.kind.profiles[ModelPart.ENCODER])
    mix = [ItemClass(tokens, share=need.share) for need in wanted.demand.needs for tokens in need.item_tokens]
    slo_s = wanted.objectives.ttft_s or _PATIENT_S
    load = Load(wanted.attainment, wanted.demand.burstiness)

    def capacity_at(items: int) -> Capacity:
        if not mix:
            return Capacity(1.0, 1.0, 1, 0.0)
        return encode_capacity(costs, mix, slo_s, max_items=items, load=load)

    return capacity_at


def _decoding(offer: Offer, wanted: Wanted, role: Role) -> Callable[[int], Capacity]:
    costs = Costs(offer.kind.profiles[ModelPart.DECODER])
    needs, objectives = wanted.demand.needs, wanted.objectives
    mix = [RequestClass(need.prompt_tokens, need.output_tokens, share=need.share) for need in needs]
    load = Load(wanted.attainment, wanted.demand.burstiness)

    def capacity_at(sequences: int) -> Capacity:
        return text_capacity(
            costs,
            mix,
            ttft_slo_s=objectives.ttft_s or _PATIENT_S,
            tbt_slo_s=objectives.tpot_s or _PATIENT_S,
            limits=TextLimits(sequences, max(_STEP_TOKENS, sequences), offer.kv_tokens),
            load=load,
            role=role,
        )

    return capacity_at
