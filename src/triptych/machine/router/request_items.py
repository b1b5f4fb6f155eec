"""The items of one request: the attempts at each, and when their leases and hedges are due."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from triptych.domain.embedding import LeaseId, Ticket, embedding_tokens, whole_key
from triptych.domain.encoding import EncodeResult
from triptych.domain.generation import Placement, Ready
from triptych.domain.item_plan import ItemPlan
from triptych.domain.queue_position import QueuePosition
from triptych.domain.resolving import ResolvedItem
from triptych.domain.timeline import ItemTimeline
from triptych.errors import InternalError, TransferFailed, TriptychError
from triptych.machine.router.attempts import MOST_EXCUSED, Attempt, Ending
from triptych.machine.router.leases import AttemptLeases
from triptych.machine.router.prompt_identity import IdentifiedItem
from triptych.machine.router.request_events import After, AttemptKind, Encode, RequestEffect, Signal
from triptych.machine.router.shared_events import EmbeddingGone, EmbeddingsRead, Grant, HedgeWanted, Overtaken
from triptych.policy.placement.wants import Want

_HEDGE_AGAIN = 0.25
"""A hedge that is not granted is wanted again after this share of the time that the item has taken so far."""
_NONE = frozenset[str]()


@dataclass(slots=True)
class RequestItem:
    """An item, or shard, and the attempts at it. Part of ``machine.router.request.RequestMachine``, which alone changes it."""

    index: int
    """Index of the item, counting shards."""
    plan: ItemPlan
    attempts: list[Attempt] = field(default_factory=list)
    held: Attempt | None = None
    """The attempt that has its place and leases."""
    hedge: Attempt | None = None
    """A second one that runs beside ``held``. The first answer wins."""
    served: Attempt | None = None
    """The attempt that encoded it last."""
    hedge_s: float = inf
    """When to want a hedge."""

    # --- state -------------------------------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """Whether it is encoded, with no lease being renewed."""
        held = self.held
        return held is not None and held.leases is not None and not held.leases.is_pending

    @property
    def reader_until_s(self) -> float:
        """When its reader's lease ends, as far as is known."""
        return 0.0 if self.held is None or self.held.leases is None else self.held.leases.reader_until_s

    @property
    def may_be_hedged(self) -> bool:
        """Whether one call for it is running."""
        return self.held is not None and self.held.result is None and self.hedge is None

    def _ended(self, how: Ending) -> int:
        return sum([attempt.ended is how for attempt in self.attempts])

    @property
    def losses(self) -> int:
        """Attempts whose embedding was lost, or that failed with no other beside them."""
        return self._ended(Ending.FAILED)

    @property
    def refusals(self) -> int:
        return self._ended(Ending.REFUSED)

    @property
    def engine_failure(self) -> InternalError | None:
        """An encoder's failure on it. That may happen once; then only another one is tried."""
        for attempt in reversed(self.attempts):
            if isinstance(attempt.error, InternalError):
                return attempt.error
        return None

    # --- steps -------------------------------------------------------------------------------------------------------

    @property
    def want(self) -> Want:
        """The place that is wanted at an encoder."""
        plan, avoid, exclude = self.plan, _NONE, _NONE
        if attempts := self.attempts:
            avoid = frozenset([attempt.grant.name for attempt in attempts if attempt.is_blamed])
            exclude = frozenset(
                [attempt.grant.name for attempt in attempts if isinstance(attempt.error, InternalError)]
            )
        return Want(
            self.index,
            embedding_tokens(plan.tensors),
            plan.nbytes,
            plan.content,
            avoid,
            exclude,
            plan.info.nbytes,
            plan.info.samples_or_pixels,
            plan.info.lora,
        )

    @property
    def hedge_want(self) -> Want:
        """The place that is wanted at another encoder than the one at work."""
        want, held = self.want, self.held
        return want if held is None else replace(want, exclude=want.exclude | {held.grant.name})

    def begin(
        self,
        grant: Grant,
        queue_position: QueuePosition,
        new_lease: Callable[[], LeaseId],
        now_s: float,
        lease_s: float,
    ) -> Encode:
        """Start an attempt, with its position in the encoder's queue."""
        leases = AttemptLeases.requested(grant, new_lease, now_s, lease_s)
        attempt = Attempt(AttemptKind.ENCODE, grant, now_s, leases)
        self.attempts.append(attempt)
        if grant.hedges:
            self.hedge = attempt
        else:
            self.held = attempt
        return Encode(
            credit=grant.credit,
            name=grant.name,
            index=self.index,
            plan=self.plan,
            reader_lease=leases.readers[0],
            router_lease=leases.lease_ids[0],
            lease_s=lease_s,
            queue_position=queue_position,
            reason=grant.reason,
        )

    def answered(self, winner: Attempt, result: EncodeResult, now_s: float) -> list[RequestEffect]:
        """Keep the result. The other call, if there is one, is cancelled."""
        self.served, winner.result = winner, result
        if self.hedge is None:
            return []
        loser = self.held if winner is self.hedge else self.hedge
        if loser is None:
            raise AssertionError("a hedge of nothing")
        overtaken: list[RequestEffect] = [Overtaken(loser.grant.credit)] if winner is self.hedge else []
        return overtaken + self._end(loser, Ending.OVERTAKEN, now_s, "another encoder was faster")

    def refuse(self, attempt: Attempt, error: TriptychError, now_s: float) -> list[RequestEffect]:
        """End an attempt that its encoder has no room for now."""
        return self._end(attempt, Ending.REFUSED, now_s, error.message, error)

    def lose(
        self, attempt: Attempt, error: TriptychError, now_s: float, *, drains: bool = False
    ) -> list[RequestEffect]:
        """End an attempt that failed, or whose embedding is lost: it is wrong, could not be pulled, or is not there any more.

        While another call for the item runs, nothing is lost. One whose encoder ``drains`` is excused.
        """
        was_there = attempt.result is not None or (attempt.leases is not None and bool(attempt.leases.tickets))
        pulled = isinstance(error, TransferFailed) and self.index in error.items
        is_unusable = was_there and (pulled or isinstance(error, InternalError))
        how = Ending.FAILED if self.hedge is None else Ending.DROPPED
        if drains and how is Ending.FAILED and self._ended(Ending.EXCUSED) < MOST_EXCUSED:
            how = Ending.EXCUSED
        return [EmbeddingGone(attempt.grant.credit, is_unusable), *self._end(attempt, how, now_s, error.message, error)]

    def release(self, reason: str, now_s: float) -> list[RequestEffect]:
        """Release the item's places and leases, if it has any."""
        effects: list[RequestEffect] = []
        while self.held is not None:
            effects += self._end(self.held, Ending.RELEASED, now_s, reason)
        return effects

    def _end(
        self, attempt: Attempt, how: Ending, now_s: float, reason: str, error: TriptychError | None = None
    ) -> list[RequestEffect]:
        attempt.end(how, now_s, error)
        if attempt is self.held:
            self.held = self.hedge
        self.hedge = None
        return attempt.release(reason)

    # --- for a reader ------------------------------------------------------------------------------------------------

    @property
    def _ticket(self) -> Ticket:
        """An unsent ticket, with the address where the reader will connect."""
        leases = None if self.held is None else self.held.leases
        if leases is None or leases.is_pending or leases.is_sent:
            raise AssertionError("sent without a ticket")
        return leases.tickets[0].at(leases.grant.name)  # an instance's name is its address

    @property
    def placement(self) -> Placement:
        """The place of its embedding in the prompt, with an unsent ticket."""
        shard = self.plan.shard
        return Placement(self.index, self.plan.start, self._ticket, shard is not None and shard.first > 0)

    @property
    def resolved(self) -> ResolvedItem:
        """The place of its embedding at an encoder, with an unsent ticket."""
        served = self.served
        is_cached = served is not None and served.result is not None and served.result.cached
        return ResolvedItem(self._ticket, cached=is_cached, grid=self.plan.grid)

    def timeline(self, ready: Ready | None) -> ItemTimeline:
        """The timeline of the item. ``ready`` contains its pull report."""
        pull = next((pull for pull in ready.pulls if pull.item == self.index), None) if ready else None
        plan, served = self.plan, self.served
        result = served.result if served else None
        hedges, hedge_won = 0, False
        if len(self.attempts) > 1:
            others = [attempt for attempt in self.attempts if not attempt.grant.hedges]
            hedges, hedge_won = len(self.attempts) - len(others), others[-1].ended is Ending.OVERTAKEN
        return ItemTimeline(
            item=plan.item,
            shard=str(plan.shard or ""),
            modality=plan.info.modality.value,
            width=plan.info.width,
            height=plan.info.height,
            tokens=plan.tokens,
            encoder=served.grant.instance_id if served else "",
            encode_attempts=len(self.attempts) - hedges,
            encoder_cached=result.cached if result else False,
            queue_s=result.queue_s if result else 0.0,
            encode_s=result.encode_s if result else 0.0,
            pull_backend=pull.backend if pull else "",
            pull_bytes=pull.nbytes if pull else 0,
            pull_s=pull.duration_s if pull else 0.0,
            text_cached=pull.cached if pull else False,
            hedges=hedges,
            hedge_won=hedge_won,
        )


class RequestItems:
    """The items of a request, in order of their indices. Part of ``machine.router.request.RequestMachine``, which alone changes it."""

    def __init__(self) -> None:
        self.all: list[RequestItem] = []
        """For reading."""
        self._lease_alarm_s = inf
        """When ``LEASES_DUE`` will come."""
        self._hedge_alarm_s = inf
        """When ``HEDGES_DUE`` will come."""

    def add(self, plans: Iterable[ItemPlan]) -> None:
        """Add items, which are to be encoded."""
        for index, plan in enumerate(plans, len(self.all)):
            self.all.append(RequestItem(index, plan))

    # --- what is held ------------------------------------------------------------------------------------------------

    @property
    def leases(self) -> list[AttemptLeases]:
        """The leases that are held at encoders, or requested."""
        return [held.leases for item in self.all if (held := item.held) is not None and held.leases is not None]

    def leases_of(self, count: int) -> list[AttemptLeases]:
        """The leases of the first ``count`` items."""
        return [held.leases for item in self.all[:count] if (held := item.held) is not None and held.leases is not None]

    @property
    def are_ready(self) -> bool:
        """Whether all are encoded, with no lease being renewed."""
        for item in self.all:  # noqa: SIM110 - a generator takes longer than one item
            if not item.is_ready:
                return False
        return True

    def attempt_of(self, credit: int) -> Attempt | None:
        """The attempt at an item that has this credit; None once that has ended."""
        for item in self.all:
            if item.held is not None and item.held.grant.credit == credit:
                return item.held
            if item.hedge is not None and item.hedge.grant.credit == credit:
                return item.hedge
        return None

    def of(self, attempt: Attempt) -> RequestItem:
        """The item that an attempt is at."""
        if attempt.grant.item is None:
            raise AssertionError("no attempt at an item")
        return self.all[attempt.grant.item]

    @property
    def slowest_encoder(self) -> str:
        """Id of the encoder that took longest for an item, its queue included; empty without one."""
        longest_s, slowest = -inf, ""
        for item in self.all:
            if (served := item.served) is not None and (result := served.result) is not None:
                took_s = result.queue_s + result.encode_s
                if took_s > longest_s:
                    longest_s, slowest = took_s, served.grant.instance_id
        return slowest

    def nbytes_by_encoder(self) -> dict[str, int]:
        """Arena bytes of the embeddings, by the ids of the encoders that hold them."""
        found: dict[str, int] = {}
        for item in self.all:
            encoder_id = "" if (served := item.served) is None else served.grant.instance_id
            found[encoder_id] = found.get(encoder_id, 0) + item.plan.nbytes
        return found

    def release(self, reason: str, now_s: float) -> list[RequestEffect]:
        """Release the places and leases of all."""
        effects: list[RequestEffect] = []
        for item in self.all:
            if item.held is not None:
                effects += item.release(reason, now_s)
        return effects

    def identified(self) -> list[IdentifiedItem]:
        """The encoded items; the shards of an item are one."""
        shards: list[list[RequestItem]] = []
        for item in self.all:
            if item.plan.shard is None or item.plan.shard.first == 0:
                shards.append([])
            shards[-1].append(item)
        return [_identified(of_item) for of_item in shards]

    # --- for a reader ------------------------------------------------------------------------------------------------

    def beginning(self) -> tuple[int, int]:
        """Count the items, from the first on, that are encoded with tickets not yet sent; and the tokens before the next one.

        A sharded item counts whole.
        """
        count = tokens = 0
        for item in self.all:
            shard, leases = item.plan.shard, None if item.held is None else item.held.leases
            if shard is None or shard.first == 0:
                count, tokens = item.index, item.plan.start
            if leases is None or leases.is_pending or leases.is_sent:
                break
        return count, tokens

    def placements(self, count: int | None = None) -> tuple[Placement, ...]:
        """The places in the prompt of all embeddings, or of the first ``count``. The tickets are in the hands of a reader then."""
        items = self.all[:count]
        placements = tuple([item.placement for item in items])
        _sent(items)
        return placements

    def resolved(self) -> tuple[ResolvedItem, ...]:
        """The places of the embeddings at encoders. The tickets are in the hands of a reader then."""
        resolved = tuple([item.resolved for item in self.all])
        _sent(self.all)
        return resolved

    def read(self) -> list[RequestEffect]:
        """Note that a reader has them."""
        credits_ = tuple([leases.grant.credit for leases in self.leases])
        return [EmbeddingsRead(credits_)] if credits_ else []

    # --- alarms ------------------------------------------------------------------------------------------------------

    def leases_due(self, now_s: float, lease_s: float) -> list[RequestEffect]:
        """Extend leases by ``lease_s``, as a request may wait for minutes for other items or at its text instance."""
        self._lease_alarm_s = inf
        due = [leases for leases in self.leases if leases.extend_s <= now_s]
        return [*(leases.extend(now_s, lease_s) for leases in due), *self.watch_leases(now_s)]

    def watch_leases(self, now_s: float) -> list[RequestEffect]:
        """Set the alarm anew, as leases have changed."""
        due_s = min([leases.extend_s for leases in self.leases], default=inf)
        if due_s >= self._lease_alarm_s:
            return []
        self._lease_alarm_s = due_s
        return [After(max(0.0, due_s - now_s), Signal.LEASES_DUE, "half of the leases' time has passed")]

    def hedges_due(self, request: int, now_s: float) -> list[RequestEffect]:
        """Want hedges for the items that take long; if none is granted, again later, as an encoder may be idle then."""
        self._hedge_alarm_s = inf
        effects: list[RequestEffect] = []
        due_s = inf
        for item in self.all:
            if not item.may_be_hedged:
                continue
            if item.hedge_s <= now_s:
                took_s = 0.0 if item.held is None else now_s - item.held.started_s
                item.hedge_s = now_s + _HEDGE_AGAIN * took_s
                effects.append(HedgeWanted(request, item.hedge_want, "it takes longer than others of its size"))
            due_s = min(due_s, item.hedge_s)
        return [*effects, *self.watch_hedges(due_s, now_s)]

    def watch_hedges(self, due_s: float, now_s: float) -> list[RequestEffect]:
        """Set the alarm, as a hedge may be wanted at ``due_s``."""
        if due_s >= self._hedge_alarm_s:
            return []
        self._hedge_alarm_s = due_s
        return [After(max(0.0, due_s - now_s), Signal.HEDGES_DUE, "an item may take long")]

    def validate(self) -> None:
        """Raise AssertionError where an invariant does not hold."""
        for item in self.all:
            whose, running = (
                f"item {item.index}",
                [attempt for attempt in (item.held, item.hedge) if attempt is not None],
            )
            assert running == [attempt for attempt in item.attempts if attempt.ended is None], f"{whose}: lost track"
            assert item.hedge is None or not any(attempt.result for attempt in running), f"{whose}: a hedge of nothing"
            for attempt in item.attempts:
                assert (attempt.leases is None) == (attempt.ended is not None), f"{whose}: an attempt without leases"
                if attempt.leases is not None:
                    attempt.leases.validate()


def _sent(items: Iterable[RequestItem]) -> None:
    for item in items:
        if item.held is not None and item.held.leases is not None:
            item.held.leases.is_sent = True


def _identified(shards: Sequence[RequestItem]) -> IdentifiedItem:
    held = [shard.held.leases for shard in shards if shard.held is not None]
    keys = [leases.tickets[0].key for leases in held if leases is not None and leases.tickets]
    tokens = sum([shard.plan.tokens for shard in shards])
    return IdentifiedItem(shards[0].plan.start, tokens, keys[0] if len(keys) == 1 else whole_key(keys))
