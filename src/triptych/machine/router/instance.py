"""One instance as a router sees it: what it said of itself, what it last reported, and what was given to it since."""

from dataclasses import dataclass
from enum import StrEnum

from triptych.domain.instance import EncoderLoad, InstanceInfo, ModelInfo, TextLoad
from triptych.domain.stage import Stage
from triptych.policy.routing import EncoderView, TextView


class InstanceState(StrEnum):
    """Ready, or why it gets nothing."""

    NOT_SEEN = "not seen yet"
    NOT_REACHABLE = "not reachable"
    OTHER_ROLE = "does not serve its stage"
    OTHER_MODEL = "serves another model"
    DRAINING = "draining"
    READY = "ready"


@dataclass(slots=True)
class Instance:
    """A part of ``machine.router.cluster.ClusterMachine``, which alone changes it."""

    name: str
    stage: Stage
    """What it is asked for; of a text instance: decode."""
    info: InstanceInfo | None = None
    reachable: bool = False
    state: InstanceState = InstanceState.NOT_SEEN
    load: EncoderLoad | TextLoad | None = None
    reports: int = 0
    full_until_s: float = float("-inf")
    engine_failures: int = 0
    backoff_until_s: float = float("-inf")
    # What the router itself has there now ...
    own_tokens: int = 0
    own_items: int = 0
    own_bytes: int = 0
    # ... and how that has changed since the last report.
    new_tokens: int = 0
    new_items: int = 0
    new_bytes: int = 0

    @property
    def usable(self) -> bool:
        return self.state is InstanceState.READY

    def state_under(self, model: ModelInfo | None) -> InstanceState:
        """What its state is where ``model`` is the one that is served."""
        info = self.info
        if info is None:
            return InstanceState.NOT_SEEN
        if not self.reachable:
            return InstanceState.NOT_REACHABLE
        if not info.role.serves(self.stage):
            return InstanceState.OTHER_ROLE
        if info.model is not model and info.model != model:
            return InstanceState.OTHER_MODEL
        return InstanceState.DRAINING if self.load is not None and self.load.draining else InstanceState.READY

    def reported(self, load: EncoderLoad | TextLoad) -> None:
        self.load = load
        self.reports += 1
        self.new_tokens = self.new_items = self.new_bytes = 0

    def engine_failed(self, now_s: float, first_backoff_s: float, longest_backoff_s: float) -> None:
        if now_s < self.backoff_until_s:
            return  # one bad pass fails many requests at once
        self.backoff_until_s = now_s + min(first_backoff_s * 2 ** min(self.engine_failures, 30), longest_backoff_s)
        self.engine_failures += 1

    def worked(self) -> None:
        self.engine_failures, self.backoff_until_s = 0, float("-inf")

    def encoder_view(self, now_s: float) -> EncoderView:
        arena_bytes = self.info.arena_bytes if self.info is not None else 0
        tokens, items, available = self.own_tokens, self.own_items, arena_bytes - self.own_bytes
        if isinstance(self.load, EncoderLoad):
            # Other routers' load is in the report alone; what is under way to the encoder is in the own books alone.
            tokens = max(tokens, self.load.pending_tokens + self.new_tokens)
            items = max(items, self.load.pending_items + self.new_items)
            available = min(available, self.load.arena_available_bytes - self.new_bytes)
        return EncoderView(
            name=self.name,
            usable=self.usable,
            pending_tokens=tokens,
            pending_items=items,
            arena_bytes=arena_bytes,
            available_bytes=0 if now_s < self.full_until_s else available,
            max_items=self.info.max_items if self.info is not None else 0,
            backoff=now_s < self.backoff_until_s,
        )

    def text_view(self, now_s: float) -> TextView:
        tokens, requests = self.own_tokens, self.own_items
        if isinstance(self.load, TextLoad):
            tokens = self.load.pending_tokens + self.new_tokens
            reported = self.load.waiting_requests + self.load.running_requests
            requests = max(requests, reported + self.new_items)
        return TextView(
            self.name,
            self.usable,
            tokens,
            requests,
            backoff=now_s < self.backoff_until_s,
            instance_id=self.info.instance_id if self.info is not None else "",
        )
