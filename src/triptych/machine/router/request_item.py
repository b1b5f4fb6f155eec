"""The state of one item, or shard, of a request."""

from dataclasses import dataclass, replace
from math import inf

from triptych.domain.embedding import Ticket, embedding_tokens
from triptych.domain.encoding import EncodeResult
from triptych.domain.generation import Placement, Ready
from triptych.domain.item_plan import ItemPlan
from triptych.domain.resolving import ResolvedItem
from triptych.domain.timeline import ItemTimeline
from triptych.errors import InternalError
from triptych.machine.router.held_ticket import HeldTicket
from triptych.machine.router.request_events import Abort, Encode, RequestEffect
from triptych.machine.router.shared_events import Overtaken, Release
from triptych.policy.placement.wants import Want
from triptych.policy.queueing import Turn


@dataclass(slots=True)
class RequestItem:
    """Part of ``machine.router.request.RequestMachine``, which alone changes it."""

    index: int
    """Its index, counting shards."""
    plan: ItemPlan
    held: HeldTicket | None = None
    """Its place at an encoder, and the leases it may hold there."""
    served: EncodeResult | None = None
    """The result for the embedding held last."""
    attempts: int = 0
    losses: int = 0
    """Attempts whose embedding was lost or failed."""
    refusals: int = 0
    avoid: frozenset[str] = frozenset()
    engine_failure: InternalError | None = None
    """An encoder may fail on an item once; then only another one is tried."""
    exclude: frozenset[str] = frozenset()
    encoder_id: str = ""
    hedge: HeldTicket | None = None
    """What a second call for it will hold, beside the one that ``held`` waits for. The first answer wins."""
    hedge_s: float = inf
    """When to want that call."""
    hedges: int = 0
    hedge_won: bool = False

    @property
    def encoding(self) -> bool:
        return self.held is not None and self.held.sealed is None

    @property
    def ready(self) -> bool:
        """Encoded, with no lease being renewed."""
        held = self.held
        return held is not None and held.sealed is not None and not held.renewing

    @property
    def want(self) -> Want:
        plan = self.plan
        info = plan.info
        return Want(
            self.index,
            embedding_tokens(plan.tensors),
            plan.nbytes,
            plan.content,
            self.avoid,
            self.exclude,
            info.nbytes,
            info.samples_or_pixels,
        )

    @property
    def placement(self) -> Placement:
        """Where its embedding goes in the prompt, with an unsent ticket."""
        shard = self.plan.shard
        return Placement(self.index, self.plan.start, self._ticket, shard is not None and shard.first > 0)

    @property
    def resolved(self) -> ResolvedItem:
        """Where its embedding is, with an unsent ticket."""
        return ResolvedItem(self._ticket, cached=self.served is not None and self.served.cached, grid=self.plan.grid)

    @property
    def _ticket(self) -> Ticket:
        """An unsent ticket, with the address where the reader will connect."""
        if self.held is None or self.held.unsent is None:
            raise AssertionError("sent without a ticket")
        return self.held.unsent.at(self.held.grant.name)  # an instance's name is its address

    @property
    def may_be_hedged(self) -> bool:
        """Whether one call for it is running."""
        return self.held is not None and self.held.sealed is None and self.hedge is None

    @property
    def hedge_want(self) -> Want:
        """Another encoder than the one at work."""
        want = self.want
        return want if self.held is None else replace(want, exclude=want.exclude | {self.held.grant.name})

    def encoding_for_s(self, now_s: float) -> float:
        """How long its call has been running."""
        return 0.0 if self.held is None else now_s - self.held.requested_s

    def call(self, credit: int) -> HeldTicket | None:
        """What this credit holds, or will hold."""
        if self.held is not None and self.held.grant.credit == credit:
            return self.held
        return self.hedge if self.hedge is not None and self.hedge.grant.credit == credit else None

    def encode(self, held: HeldTicket, turn: Turn) -> Encode:
        """The call that will fill ``held``, with its position in the encoder's queue."""
        return Encode(
            credit=held.grant.credit,
            name=held.grant.name,
            index=self.index,
            plan=self.plan,
            reader_lease=held.reader_lease,
            router_lease=held.router_lease,
            lease_s=held.lease_s,
            turn=turn,
            reason=held.grant.reason,
        )

    def won_by(self, winner: HeldTicket) -> list[RequestEffect]:
        """Its call was answered: the other one, if there are two, is cancelled."""
        if self.held is None or self.hedge is None:
            return []
        self.hedge_won = winner is self.hedge
        loser = self.held if self.hedge_won else self.hedge
        self.held, self.hedge = winner, None
        overtaken: list[RequestEffect] = [Overtaken(loser.grant.credit)] if self.hedge_won else []
        return overtaken + _give_back(loser, "another encoder was faster")

    def go_on_without(self, failed: HeldTicket, reason: str) -> list[RequestEffect]:
        """One of two calls has failed: the other one goes on."""
        if failed is self.held:
            self.held = self.hedge
        self.hedge = None
        return _give_back(failed, reason)

    def release(self, reason: str) -> list[RequestEffect]:
        """Release the item's places and leases, if it has any."""
        if self.held is None:
            return []
        effects = _give_back(self.held, reason)
        if self.hedge is not None:
            effects += _give_back(self.hedge, reason)
        self.held = self.hedge = None
        return effects

    def timeline(self, ready: Ready | None) -> ItemTimeline:
        """``ready`` contains its pull report."""
        pull = next((pull for pull in ready.pulls if pull.item == self.index), None) if ready else None
        plan, served = self.plan, self.served
        return ItemTimeline(
            item=plan.item,
            shard=str(plan.shard or ""),
            modality=plan.info.modality.value,
            width=plan.info.width,
            height=plan.info.height,
            tokens=plan.tokens,
            encoder=self.encoder_id,
            encode_attempts=self.attempts,
            encoder_cached=served.cached if served else False,
            queue_s=served.queue_s if served else 0.0,
            encode_s=served.encode_s if served else 0.0,
            pull_backend=pull.backend if pull else "",
            pull_bytes=pull.nbytes if pull else 0,
            pull_s=pull.duration_s if pull else 0.0,
            text_cached=pull.cached if pull else False,
            hedges=self.hedges,
            hedge_won=self.hedge_won,
        )


def _give_back(held: HeldTicket, reason: str) -> list[RequestEffect]:
    grant = held.grant
    release = Release(grant.name, grant.credit, held.lease_ids, reason)
    return [Abort(grant.credit, reason), release] if held.pending else [release]
