"""One item of a request, or one shard of it: where it is encoded, and what was tried."""

from dataclasses import dataclass

from triptych.domain.encoding import EncodeResult
from triptych.domain.generation import Placement, Ready
from triptych.domain.item_plan import ItemPlan
from triptych.domain.timeline import ItemTimeline
from triptych.errors import EngineFailure
from triptych.machine.router.held_ticket import HeldTicket
from triptych.machine.router.request_events import Abort, RequestEffect
from triptych.machine.router.shared_events import Release
from triptych.policy.routing import Want


@dataclass(slots=True)
class RequestItem:
    """A part of ``machine.router.request.RequestMachine``, which alone changes it."""

    index: int
    """Among the request's items, shards counted each."""
    plan: ItemPlan
    held: HeldTicket | None = None
    """Its place at an encoder, and what leases on its embedding there may be."""
    served: EncodeResult | None = None
    """Of the embedding that was held last."""
    attempts: int = 0
    losses: int = 0
    """Attempts after which the item had to be encoded again."""
    refusals: int = 0
    avoid: frozenset[str] = frozenset()
    engine_failure: EngineFailure | None = None
    """An engine may fail an item once; it goes to another encoder then, or nowhere."""
    exclude: frozenset[str] = frozenset()
    encoder_id: str = ""

    @property
    def encoding(self) -> bool:
        return self.held is not None and self.held.sealed is None

    @property
    def ready(self) -> bool:
        """Encoded, and no lease on its embedding is being renewed."""
        return self.held is not None and not self.held.pending

    @property
    def want(self) -> Want:
        plan = self.plan
        return Want(self.index, plan.tokens, plan.nbytes, plan.content, self.avoid, self.exclude)

    @property
    def placement(self) -> Placement:
        """Where its embedding goes in the prompt, with a ticket that no text instance has had."""
        if self.held is None or self.held.unsent is None:
            raise AssertionError("dispatched without a ticket")
        shard = self.plan.shard
        return Placement(self.index, self.plan.start, self.held.unsent, shard is not None and shard.first > 0)

    def let_go(self, reason: str) -> list[RequestEffect]:
        """Give the item's place and leases back; nothing where it has none."""
        if self.held is None:
            return []
        held, self.held = self.held, None
        grant = held.grant
        release = Release(grant.name, grant.credit, held.lease_ids, reason)
        return [Abort(grant.credit, reason), release] if held.pending else [release]

    def timeline(self, ready: Ready | None) -> ItemTimeline:
        """``ready`` reports its pull."""
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
