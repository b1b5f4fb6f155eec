"""The state of one item, or shard, of a request."""

from dataclasses import dataclass, replace

from triptych.domain.embedding import Ticket
from triptych.domain.encoding import EncodeResult
from triptych.domain.generation import Placement, Ready
from triptych.domain.item_plan import ItemPlan
from triptych.domain.resolving import ResolvedItem
from triptych.domain.timeline import ItemTimeline
from triptych.errors import EngineFailure
from triptych.machine.router.held_ticket import HeldTicket
from triptych.machine.router.request_events import Abort, RequestEffect
from triptych.machine.router.shared_events import Release
from triptych.policy.routing import Want


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
    engine_failure: EngineFailure | None = None
    """An engine may fail an item once; then only another encoder is tried."""
    exclude: frozenset[str] = frozenset()
    encoder_id: str = ""

    @property
    def encoding(self) -> bool:
        return self.held is not None and self.held.sealed is None

    @property
    def ready(self) -> bool:
        """Encoded, with no lease being renewed."""
        return self.held is not None and not self.held.pending

    @property
    def want(self) -> Want:
        plan = self.plan
        return Want(self.index, plan.tokens, plan.nbytes, plan.content, self.avoid, self.exclude)

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
        return replace(self.held.unsent, address=self.held.grant.name)  # an instance's name is its address

    def release(self, reason: str) -> list[RequestEffect]:
        """Release the item's place and leases, if it has any."""
        if self.held is None:
            return []
        held, self.held = self.held, None
        grant = held.grant
        release = Release(grant.name, grant.credit, held.lease_ids, reason)
        return [Abort(grant.credit, reason), release] if held.pending else [release]

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
        )
