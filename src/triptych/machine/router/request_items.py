"""The items of one request: who holds what of them, and when their leases and hedges are due."""

from collections.abc import Iterable, Iterator, Sequence
from math import inf

from triptych.domain.embedding import whole_key
from triptych.domain.generation import Placement
from triptych.domain.item_plan import ItemPlan
from triptych.domain.resolving import ResolvedItem
from triptych.machine.router.held_ticket import HeldTicket
from triptych.machine.router.prompt_identity import IdentifiedItem
from triptych.machine.router.request_events import After, RequestEffect, Signal
from triptych.machine.router.request_item import RequestItem
from triptych.machine.router.shared_events import EmbeddingsRead, HedgeWanted

_HEDGE_AGAIN = 0.25
"""A hedge that is not granted is wanted again after this share of the time that the item has taken so far."""


class RequestItems:
    """Part of ``machine.router.request.RequestMachine``, which alone changes it. In order of their indices."""

    def __init__(self, plans: Iterable[ItemPlan] = ()) -> None:
        self._items = [RequestItem(index, plan) for index, plan in enumerate(plans)]
        self._lease_alarm_s = inf
        """When ``LEASES_DUE`` will come."""
        self._hedge_alarm_s = inf
        """When ``HEDGES_DUE`` will come."""

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[RequestItem]:
        return iter(self._items)

    def __getitem__(self, index: int) -> RequestItem:
        return self._items[index]

    # --- what is held ------------------------------------------------------------------------------------------------

    @property
    def held(self) -> list[HeldTicket]:
        """Their places at encoders, and the leases there."""
        return [item.held for item in self._items if item.held is not None]

    @property
    def ready(self) -> bool:
        """Whether all are encoded, with no lease being renewed."""
        for item in self._items:  # noqa: SIM110 - a generator takes longer than one item
            if not item.ready:
                return False
        return True

    def held_of(self, count: int) -> list[HeldTicket]:
        """Of the first ``count``."""
        return [item.held for item in self._items[:count] if item.held is not None]

    def holder_of(self, credit: int) -> RequestItem | None:
        """The item that holds this credit, if any."""
        for item in self._items:
            if item.held is not None and item.held.grant.credit == credit:
                return item
        return None

    def call_of(self, credit: int) -> tuple[RequestItem | None, HeldTicket | None]:
        """The item that has a call with this credit, or holds what the call returned, and what that is."""
        for item in self._items:
            if (held := item.call(credit)) is not None:
                return item, held
        return None, None

    def nbytes_by_encoder(self) -> dict[str, int]:
        """Arena bytes of the embeddings, by the ids of the encoders that hold them."""
        found: dict[str, int] = {}
        for item in self._items:
            found[item.encoder_id] = found.get(item.encoder_id, 0) + item.plan.nbytes
        return found

    def release(self, reason: str) -> list[RequestEffect]:
        """Release the places and leases of all."""
        return [effect for item in self._items for effect in item.release(reason)]

    def identified(self) -> list[IdentifiedItem]:
        """All of them, once they are encoded; the shards of an item together."""
        shards: list[list[RequestItem]] = []
        for item in self._items:
            if item.plan.shard is None or item.plan.shard.first == 0:
                shards.append([])
            shards[-1].append(item)
        return [_identified(of_item) for of_item in shards]

    # --- for a reader ------------------------------------------------------------------------------------------------

    def beginning(self) -> tuple[int, int]:
        """How many items, from the first on, are encoded with tickets that have not been sent; and the tokens of the prompt
        before the next one. A sharded item counts whole.
        """
        count = tokens = 0
        for item in self._items:
            shard = item.plan.shard
            if shard is None or shard.first == 0:
                count, tokens = item.index, item.plan.start
            if not item.ready or item.held is None or item.held.unsent is None:
                break
        return count, tokens

    def placements(self, count: int | None = None) -> tuple[Placement, ...]:
        """Where the embeddings of all, or of the first ``count``, go in the prompt. The tickets are in the hands of a reader
        then.
        """
        items = self._items[:count]
        placements = tuple([item.placement for item in items])
        self._sent(items)
        return placements

    def resolved(self) -> tuple[ResolvedItem, ...]:
        """Where the embeddings are. The tickets are in the hands of a reader then."""
        resolved = tuple([item.resolved for item in self._items])
        self._sent(self._items)
        return resolved

    def _sent(self, items: Iterable[RequestItem]) -> None:
        for item in items:
            if item.held is not None:
                item.held.unsent = None

    def read(self) -> list[RequestEffect]:
        """A reader has them."""
        credits_ = tuple([held.grant.credit for held in self.held])
        return [EmbeddingsRead(credits_)] if credits_ else []

    # --- alarms ------------------------------------------------------------------------------------------------------

    def leases_due(self, now_s: float, lease_s: float) -> list[RequestEffect]:
        """Extend leases by ``lease_s``, as a request may wait for minutes for other items or at its text instance."""
        self._lease_alarm_s = inf
        due = [held for held in self.held if held.extend_s <= now_s]
        return [*(held.extend(now_s, lease_s) for held in due), *self.watch_leases(now_s)]

    def watch_leases(self, now_s: float) -> list[RequestEffect]:
        """Leases have changed."""
        due_s = min([held.extend_s for held in self.held], default=inf)
        if due_s >= self._lease_alarm_s:
            return []
        self._lease_alarm_s = due_s
        return [After(max(0.0, due_s - now_s), Signal.LEASES_DUE, "half of the leases' time has passed")]

    def hedges_due(self, request: int, now_s: float) -> list[RequestEffect]:
        """Want hedges for the items that take long; if none is granted, again later, as an encoder may be idle then."""
        self._hedge_alarm_s = inf
        effects: list[RequestEffect] = []
        for item in self._items:
            if item.may_be_hedged and item.hedge_s <= now_s:
                item.hedge_s = now_s + _HEDGE_AGAIN * item.encoding_for_s(now_s)
                effects.append(HedgeWanted(request, item.hedge_want, "it takes longer than others of its size"))
        due_s = min((item.hedge_s for item in self._items if item.may_be_hedged), default=inf)
        return [*effects, *self.watch_hedges(due_s, now_s)]

    def watch_hedges(self, due_s: float, now_s: float) -> list[RequestEffect]:
        """A hedge may be wanted at ``due_s``."""
        if due_s >= self._hedge_alarm_s:
            return []
        self._hedge_alarm_s = due_s
        return [After(max(0.0, due_s - now_s), Signal.HEDGES_DUE, "an item may take long")]

    def validate(self) -> None:
        """Raise AssertionError where an invariant does not hold."""
        for item in self._items:
            held, whose = item.held, f"item {item.index}"
            assert held is None or held.unsent is None or held.sealed is not None, f"{whose}: unsent, not sealed"  # noqa: S101
            assert held is None or held.lease_ids, f"{whose}: a credit without leases"  # noqa: S101
            assert held is None or not held.renewing or held.sealed is not None, f"{whose}: renews without a ticket"  # noqa: S101
            assert item.hedge is None or item.encoding, f"{whose}: a hedge of nothing"  # noqa: S101
            assert item.hedge is None or item.hedge.sealed is None, f"{whose}: two embeddings"  # noqa: S101


def _identified(shards: Sequence[RequestItem]) -> IdentifiedItem:
    keys = [one.held.sealed.key for one in shards if one.held is not None and one.held.sealed is not None]
    tokens = sum([one.plan.tokens for one in shards])
    return IdentifiedItem(shards[0].plan.start, tokens, keys[0] if len(keys) == 1 else whole_key(keys))
