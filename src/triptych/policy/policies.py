"""The router's policies as one value, each chosen by its name. docs/adding_a_policy.md shows how to add one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Annotated, Any, Protocol, Self, get_type_hints

from triptych.domain.item_plan import ItemPlan
from triptych.domain.queue_position import QueuePosition
from triptych.plugins import plugin, plugin_names
from triptych.policy.admission import ServerBounds, admit_anyway, check_capacity, check_wait
from triptych.policy.dispatching import Dispatch, prefix
from triptych.policy.fairness import Fairness, by_weight
from triptych.policy.kv_transfer import TransferRule, always, by_need
from triptych.policy.lending import Lending, idle
from triptych.policy.placement.policy import PLACEMENTS, PlacementPolicy
from triptych.policy.placement.pool import Pool
from triptych.policy.prefixes import Prefixes, by_cost
from triptych.policy.prefixes import always as always_pulled
from triptych.policy.queueing import by_deadline, by_slo, first_come
from triptych.policy.sharding import ShardLimits, in_shards, never


class Sharding(Protocol):
    """Splits items for the encoders of a pool. The shards of an item are adjacent."""

    def __call__(self, items: Sequence[ItemPlan], pool: Pool, limits: ShardLimits) -> tuple[ItemPlan, ...]: ...


class Ordering(Protocol):
    """The position of a request in every queue: for encoders here, and of its calls at the instances.

    ``due_s`` is when its first token is due by the TTFT objective of its class. ``needs_s`` is what it takes from here to
    its first token with the system to itself. Without them the objective or the latency is unknown.
    """

    def __call__(
        self,
        *,
        priority: int,
        deadline_s: float,
        arrived_s: float,
        arrival: int,
        due_s: float = inf,
        needs_s: float = 0.0,
    ) -> QueuePosition: ...


class Admission(Protocol):
    """Raises Overloaded if one more request is too many. ``own_requests`` are those of its tenant, if there are others."""

    def __call__(
        self, *, requests: int, media_bytes: int, new_media_bytes: int, bounds: ServerBounds, own_requests: int = 0
    ) -> None: ...


class Deadlines(Protocol):
    """Raises Overloaded if a prepared request cannot be answered within ``left_s``: it would wait for ``wait_s`` and then
    take ``service_s``. Of the time that it has, ``promised_s`` is promised to others.
    """

    def __call__(self, *, left_s: float, wait_s: float, service_s: float, promised_s: float = 0.0) -> None: ...


SHARDINGS: Mapping[str, Sharding] = {"earliest-end": in_shards, "never": never}
ORDERINGS: Mapping[str, Ordering] = {"slo": by_slo, "deadline": by_deadline, "first-come": first_come}
ADMISSIONS: Mapping[str, Admission] = {"bounded": check_capacity}
TENANTS: Mapping[str, Fairness | None] = {"weighted": by_weight, "none": None}
DEADLINES: Mapping[str, Deadlines] = {"refuse": check_wait, "admit": admit_anyway}
DISPATCHES: Mapping[str, Dispatch | None] = {"complete": None, "prefix": prefix}
KV_TRANSFERS: Mapping[str, TransferRule | None] = {"never": None, "by-need": by_need, "always": always}
PREFIXES: Mapping[str, Prefixes | None] = {"never": None, "by-cost": by_cost, "always": always_pulled}
LENDINGS: Mapping[str, Lending | None] = {"always": None, "idle": idle}


@dataclass(frozen=True, slots=True)
class ChosenFrom:
    """The policies of one kind, by name."""

    table: Mapping[str, object]

    def get(self, kind: str, name: str) -> object:
        """The policy of this name, here or in a plug-in. Raises ValueError for a name that there is not."""
        if name in self.table:
            return self.table[name]
        group = f"triptych.policies.{kind}"
        policy = plugin(group, name)
        if policy is None:
            raise ValueError(
                f"{kind} is {name!r}, which is none of {', '.join(sorted({*self.table, *plugin_names(group)}))}"
            )
        if not (isinstance(policy, PlacementPolicy) if self.table is PLACEMENTS else callable(policy)):
            raise ValueError(f"{kind} {name!r} of a plug-in is no policy of this kind, but {policy!r}")
        return policy


@dataclass(frozen=True, slots=True)
class PolicyNames:
    """The policies of a router, as its settings name them."""

    encoder_routing: Annotated[str, ChosenFrom(PLACEMENTS)] = "least-loaded"
    """Policy that chooses an encoder for each item: least-loaded, least-requests, power-of-two, predicted (the earliest predicted
    end, by profiles or measured times) or round-robin. An encoder that already has the item's embedding is preferred unless its load is
    much higher; with least-loaded and predicted, content decides between equals, and where other routers send much to the encoders, between two
    of the less loaded half."""
    text_routing: Annotated[str, ChosenFrom(PLACEMENTS)] = "least-loaded"
    """Policy that chooses a text instance for each request: least-loaded, least-requests, power-of-two, predicted or round-robin. Where other
    routers send much to them, least-loaded and predicted choose as power-of-two does: between two random ones of the less loaded half."""
    sharding: Annotated[str, ChosenFrom(SHARDINGS)] = "earliest-end"
    """Rule of which items are split over several encoders: earliest-end (if the last shard then ends clearly sooner), or never."""
    ordering: Annotated[str, ChosenFrom(ORDERINGS)] = "slo"
    """Order of the requests of one priority in every queue: slo (by arrival and the TTFT objective of the request's class, or
    its deadline if that is earlier; what is lost already goes last), deadline, or first-come. None is overtaken by one that
    came 30 s later."""
    admission: Annotated[str, ChosenFrom(ADMISSIONS)] = "bounded"
    """When to refuse a request as overload: bounded (by the number of requests and the bytes of their media)."""
    deadlines: Annotated[str, ChosenFrom(DEADLINES)] = "refuse"
    """What to do with a request that cannot be answered before its deadline because of those that wait already: refuse (by the
    predicted wait, with the time after which it could be met), or admit."""
    tenants: Annotated[str, ChosenFrom(TENANTS)] = "weighted"
    """How tenants (the gateway's API keys) share encoders and text instances: weighted (what one sends beyond its share counts as
    having come later), or none (they are not told apart)."""
    dispatch: Annotated[str, ChosenFrom(DISPATCHES)] = "complete"
    """When a request goes to a text instance: complete (once all items are encoded), or prefix (the prefix of its prompt, up to
    the first item that is missing, is computed meanwhile by one that has no other prompt to compute)."""
    kv_transfer: Annotated[str, ChosenFrom(KV_TRANSFERS)] = "never"
    """When an instance that prefills and decodes hands an answer over to another one after the prefill: never, by-need (a long answer,
    where another one has clearly less to decode) or always. Instances that only prefill always do."""
    lending: Annotated[str, ChosenFrom(LENDINGS)] = "always"
    """When an instance that encodes and prefills gets text requests, beside others that do not encode: always (as these), or idle (while
    it has nothing to encode and too many wait elsewhere: lend_above). Those have encode_first set."""
    prefixes: Annotated[str, ChosenFrom(PREFIXES)] = "never"
    """When an instance pulls the prefix of a prompt from others that have computed it, instead of computing it: never, by-cost (at least
    512 positions, if profiles do not say that computing is faster) or always. Those others have kv_prefixes set."""

    def __post_init__(self) -> None:
        Policies.named(self)


@dataclass(frozen=True, slots=True)
class Policies:
    """The router's policies."""

    encoder_routing: PlacementPolicy
    """Chooses the encoder of an item."""
    text_routing: PlacementPolicy
    """Chooses the text instance of a request."""
    sharding: Sharding
    ordering: Ordering
    admission: Admission
    deadlines: Deadlines
    tenants: Fairness | None
    """None: they are not told apart."""
    dispatch: Dispatch | None
    """None: a request is sent once all of its items are encoded."""
    kv_transfer: TransferRule | None
    """None: only instances that must transfer do."""
    lending: Lending | None
    """None: instances that encode get text requests as all others do."""
    prefixes: Prefixes | None
    """None: each instance computes what it does not have."""

    @property
    def predict(self) -> bool:
        """Whether one of them needs predicted seconds."""
        return self.encoder_routing.predicts or self.text_routing.predicts

    @classmethod
    def named(cls, names: PolicyNames) -> Self:
        """Raises ValueError for a name that there is not."""
        chosen: dict[str, Any] = {}
        for kind, hint in get_type_hints(PolicyNames, include_extras=True).items():
            chosen[kind] = hint.__metadata__[0].get(kind, getattr(names, kind))
        return cls(**chosen)
