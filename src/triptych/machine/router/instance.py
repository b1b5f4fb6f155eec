"""One instance as seen by a router: its description, its last load report, and the credits granted since."""

from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import inf
from typing import NamedTuple

from triptych.domain.instance import InstanceInfo, InstanceLimits, InstanceLoad, ModelInfo, StageLoad
from triptych.domain.lora import LoadedLora
from triptych.domain.membership import Member
from triptych.domain.stage import Role, Stage
from triptych.machine.router.health import BackoffReason, Health
from triptych.machine.router.others_work import OthersWork
from triptych.policy.backlog import Backlog
from triptych.policy.kv_transfer import KvRoom
from triptych.policy.placement.pool import Candidate, Pool, TextLoad, TextTraits

_NO_LORAS = frozenset[str]()

Stages = tuple[Stage, ...]
"""The stages that every instance of a pool serves."""


class InstanceState(StrEnum):
    """Ready, or why it gets no work."""

    NOT_SEEN = "not seen yet"
    NOT_REACHABLE = "not reachable"
    OTHER_MEMBER = "is not the member that is expected there"
    SAME_PROCESS = "is the same process as another member"
    OTHER_MODEL = "serves another model"
    LEAVING = "leaving"
    DRAINING = "draining"
    READY = "ready"


@dataclass(slots=True)
class StageCredits:
    """One stage of an instance: its reported load, the router's credits there, and its health."""

    load: StageLoad | None = None
    # The router's own work there now ...
    own_tokens: int = 0
    own_pending: int = 0
    own_bytes: int = 0
    # ... and all work there, as last reported, with what this router has given and ended since.
    known_tokens: int = 0
    known_pending: int = 0
    known_bytes: int = 0
    full_until_s: float = -inf
    """End of the time after it refused for lack of memory, although its credits said otherwise."""
    health: Health = field(default_factory=Health)

    # Only the report includes other routers' load; only the router's own counts include calls still on their way.

    @property
    def tokens(self) -> int:
        return max(self.own_tokens, self.known_tokens)

    @property
    def pending(self) -> int:
        return max(self.own_pending, self.known_pending)

    def not_reported(self) -> None:
        """Nothing is reported: only the router's own work is known."""
        self.load = None
        self.known_tokens = self.known_pending = self.known_bytes = 0


@dataclass(slots=True)
class Instance:
    """Part of ``machine.router.cluster.ClusterMachine``, which alone changes it."""

    member: Member
    info: InstanceInfo | None = None
    reachable: bool = False
    lost_s: float = -inf
    """When it was last found not to be."""
    leaving: bool = False
    draining: bool = False
    duplicate: bool = False
    """Another member, under another address, is the same process and is used instead."""
    state: InstanceState = InstanceState.NOT_SEEN
    reported_stages: frozenset[Stage] | None = None
    """The stages of its last load report, if it switches; None before."""
    limits: InstanceLimits | None = None
    """Limits of its batches by its last load report; None if it does not say."""
    loras: tuple[LoadedLora, ...] = ()
    """LoRA adapters that it takes requests or items for, by its last load report."""
    reports: int = 0
    credits: int = 0
    """Credits not yet returned."""
    stages: dict[Stage, StageCredits] = field(default_factory=lambda: {stage: StageCredits() for stage in Stage})
    own_kv_tokens: int = 0
    """KV memory that the router's answers take there, with what is expected of them ..."""
    new_kv_tokens: int = 0
    """... and of those given since the last report."""
    own_prepare_us: int = 0
    """Predicted preprocessing of the router's items there, on one core."""
    others: tuple[tuple[Stages, OthersWork], ...] = ()
    """What other routers send to each of its pools, which its reports tell."""
    changed_in: tuple[set[str], ...] = ()
    """Where it notes its name when it changes: what its pools keep of it no longer holds."""
    noted: bool = False
    """Whether it has done so since it was put into a pool last."""

    @property
    def name(self) -> str:
        return self.member.address

    @property
    def role(self) -> Role | None:
        """The role in which it serves now; None until it has been seen."""
        return Role.of(self.served) if self.served else None

    @property
    def served(self) -> frozenset[Stage]:
        """The stages that it serves now; none until it has been seen."""
        if self.info is None:
            return frozenset()
        return self.info.role.stages if self.reported_stages is None else self.reported_stages

    @property
    def limited_info(self) -> InstanceInfo | None:
        """The description with the limits that its batches have now."""
        if self.info is None or self.limits is None:
            return self.info
        return replace(self.info, parts=tuple(map(self.limits.of, self.info.parts)))

    @property
    def process(self) -> tuple[str, int] | None:
        """Id and epoch of the process, if it could be used there."""
        if self.info is None or not self.reachable or self.leaving or not self.member.agrees_with(self.info):
            return None
        return self.info.instance_id, self.info.epoch

    @property
    def usable(self) -> bool:
        return self.state is InstanceState.READY

    def has_lora(self, digest: str) -> bool:
        """Whether it takes requests with this adapter; an empty digest stands for none."""
        return not digest or any(lora.digest == digest for lora in self.loras)

    def serves(self, stages: Stages) -> bool:
        return self.info is not None and self.served.issuperset(stages)

    def state_under(self, model: ModelInfo | None) -> InstanceState:
        """State of the instance if ``model`` is the served one."""
        info = self.info
        if info is None:
            return InstanceState.NOT_SEEN
        reasons = (
            (not self.reachable, InstanceState.NOT_REACHABLE),
            (not self.member.agrees_with(info), InstanceState.OTHER_MEMBER),
            (self.duplicate, InstanceState.SAME_PROCESS),
            (info.model is not model and info.model != model, InstanceState.OTHER_MODEL),
            (self.leaving, InstanceState.LEAVING),
            (self.draining, InstanceState.DRAINING),
        )
        return next((state for holds, state in reasons if holds), InstanceState.READY)

    def review(self, model: ModelInfo | None) -> None:
        self.state = self.state_under(model)
        self._changed()

    def seen(self, info: InstanceInfo) -> bool:
        """Store the description. Returns whether the process has restarted."""
        restarted = self.info is not None and self.info.epoch != info.epoch
        if restarted:
            self.draining, self.reported_stages, self.limits, self.loras = False, None, None, ()
            for stage_credits in self.stages.values():
                stage_credits.not_reported()
                stage_credits.full_until_s, stage_credits.health = -inf, Health()
        self.info, self.reachable = info, True
        return restarted

    def reported(self, load: InstanceLoad, expected_tokens: int | None = None) -> bool:
        """Store a load report. Returns whether the instance began or stopped draining, has switched, or has other limits or
        adapters.

        ``expected_tokens`` are those that it is expected to decode; they count instead of the most that it may.
        """
        changed, self.draining = self.draining is not load.draining, load.draining
        for stages, others in self.others:
            reported = own = 0
            for stage in stages:
                if (stage_load := load.stages.get(stage)) is not None:
                    reported += stage_load.pending
                own += self.stages[stage].own_pending
            others.observe(reported, own)
        if self.info is not None and self.info.switchable is not None and self.served != load.stages.keys():
            self.reported_stages, changed = frozenset(load.stages), True
        if load.limits is not None and load.limits.limits != self.limits:
            self.limits, changed = load.limits.limits, True
        if load.loras != self.loras:
            self.loras, changed = load.loras, True
        self.reports += 1
        self.new_kv_tokens = 0
        for stage, stage_credits in self.stages.items():
            if (stage_load := load.stages.get(stage)) is not None:
                stage_credits.load = stage_load
                stage_credits.known_tokens = stage_load.pending_tokens
                stage_credits.known_pending = stage_load.pending
                stage_credits.known_bytes = stage_load.leased_bytes
            elif stage_credits.load is None or self.reported_stages is not None:  # it never says, or has closed it
                stage_credits.not_reported()
        if expected_tokens is not None and Stage.DECODE in load.stages:
            self.stages[Stage.DECODE].known_tokens = expected_tokens
        self._changed()
        return changed

    def _changed(self) -> None:
        if not self.noted:
            self.noted = True
            for names in self.changed_in:
                names.add(self.member.address)

    # --- credits -----------------------------------------------------------------------------------------------------

    def give(self, stage: Stage, tokens: int, nbytes: int, output_tokens: int = 0, kv_tokens: int = 0) -> None:
        """Grant a credit: work for a stage, arena bytes, tokens to decode after it, and KV memory."""
        stage_credits = self.stages[stage]
        self.credits += 1
        self.own_kv_tokens += kv_tokens
        self.new_kv_tokens += kv_tokens
        stage_credits.own_tokens += tokens
        stage_credits.own_pending += 1
        stage_credits.own_bytes += nbytes
        stage_credits.known_tokens += tokens
        stage_credits.known_pending += 1
        stage_credits.known_bytes += nbytes
        if output_tokens:
            decode = self.stages[Stage.DECODE]
            decode.own_tokens += output_tokens
            decode.known_tokens += output_tokens
        self._changed()

    def work_done(self, stage: Stage, tokens: int, report: int) -> None:
        """Note that some of a credit's work is done. ``report`` is the number of reports when it was granted."""
        stage_credits = self.stages[stage]
        stage_credits.own_tokens -= tokens
        if self._is_known(stage, report):
            stage_credits.known_tokens -= tokens
        self._changed()

    def work_ended(self, stage: Stage, tokens: int, report: int, output_tokens: int = 0) -> None:
        """End the rest of a credit's work. Its bytes stay taken."""
        stage_credits, known = self.stages[stage], self._is_known(stage, report)
        stage_credits.own_tokens -= tokens
        stage_credits.own_pending -= 1
        if known:
            stage_credits.known_tokens -= tokens
            stage_credits.known_pending -= 1
        if output_tokens:
            decode = self.stages[Stage.DECODE]
            decode.own_tokens -= output_tokens
            if known:
                decode.known_tokens -= output_tokens
        self._changed()

    def _is_known(self, stage: Stage, report: int) -> bool:
        """Whether it is known what the load since then still counts of a credit's work."""
        # Reported load of prefill and decode shrinks bit by bit.
        return stage is Stage.ENCODE or report == self.reports

    def prepares(self, prepare_s: float) -> None:
        """A credit adds so much preprocessing; or with a negative number ends it."""
        self.own_prepare_us += round(1e6 * prepare_s)

    def take_back(self, stage: Stage, nbytes: int, kv_tokens: int, report: int) -> None:
        """``report`` is the number of reports when the credit was granted."""
        stage_credits = self.stages[stage]
        self.credits -= 1
        self.own_kv_tokens -= kv_tokens
        if report == self.reports:
            self.new_kv_tokens -= kv_tokens
        stage_credits.own_bytes -= nbytes
        stage_credits.known_bytes -= nbytes
        self._changed()

    @property
    def calls(self) -> int:
        """Credits whose work has not ended."""
        return sum([stage.own_pending for stage in self.stages.values()])

    # --- failures ----------------------------------------------------------------------------------------------------

    def refused_memory(self, until_s: float) -> None:
        self.stages[Stage.ENCODE].full_until_s = until_s
        self._changed()

    def failed(self, stage: Stage, reason: BackoffReason, most: int, now_s: float) -> bool:
        """Count a failure. Returns whether a backoff is due: after ``most`` in a row."""
        return self.stages[stage].health.failed(reason, most, now_s)

    def back_off(self, stage: Stage, reason: BackoffReason, now_s: float, *, first_s: float, longest_s: float) -> float:
        """Start a backoff. Returns its length in seconds."""
        length_s = self.stages[stage].health.back_off(reason, now_s, first_s=first_s, longest_s=longest_s)
        self._changed()
        return length_s

    def worked(self, stage: Stage, *reasons: BackoffReason) -> None:
        """Note that something has succeeded which would fail under any of these."""
        health = self.stages[stage].health
        if (health.failures or health.reason is not None) and health.worked(*reasons):
            self._changed()

    def pending_tokens(self, stage: Stage) -> int:
        """Of the work given to it for this stage."""
        return self.stages[stage].tokens

    def pending(self, stage: Stage) -> int:
        """Items or requests given to it for this stage."""
        return self.stages[stage].pending

    @property
    def requests(self) -> int:
        """Requests that wait or run at a text instance."""
        stages = (self.stages[Stage.PREFILL], self.stages[Stage.DECODE])
        return max(sum(stage.own_pending for stage in stages), sum(stage.known_pending for stage in stages))

    @property
    def kv_room(self) -> int:
        """Tokens of further answers that its KV memory has room for, as far as is known."""
        load = self.stages[Stage.DECODE].load
        return KvRoom(
            0 if self.info is None else self.info.kv_tokens,
            self.own_kv_tokens,
            None if load is None else load.free_tokens,
            self.new_kv_tokens,
            idle=not self.own_kv_tokens and load is not None and not load.pending,
        ).room

    def prepare_s(self, items: int) -> float:
        """Predicted preprocessing of all items that an encoder has. Other routers' items count as much as this one's."""
        own = self.stages[Stage.ENCODE].own_pending
        return self.own_prepare_us / 1e6 * items / own if own else 0.0

    def probe(self, stage: Stage, credit: int, now_s: float) -> None:
        """A credit is about to be granted: on probation it is the only one."""
        health = self.stages[stage].health
        if health.on_probation(now_s):
            health.probes.add(credit)
            self._changed()

    def probe_ended(self, stage: Stage, credit: int) -> None:
        health = self.stages[stage].health
        if credit in health.probes:
            health.probes.remove(credit)
            self._changed()

    def may_be_tried_s(self, stage: Stage) -> tuple[float, float]:
        """When each of its backoffs ends or ended."""
        stage_credits = self.stages[stage]
        return stage_credits.full_until_s, stage_credits.health.until_s

    # --- for policies ------------------------------------------------------------------------------------------------

    def row(self, stages: Stages) -> Candidate:
        """What policies see of it, but for what ``put`` puts there."""
        info, arena_bytes, max_items = self.info, 0, 0
        loras = frozenset([lora.digest for lora in self.loras]) if self.loras else _NO_LORAS
        text = TextTraits(loras=loras)
        if info is not None and stages[0] is Stage.ENCODE:
            arena_bytes, max_items = info.arena_bytes, info.max_items
        elif info is not None:
            prefill_only = not self.serves((Stage.DECODE,))
            traits = (info.continues, info.prefills_early, info.transfers_kv, info.kv_kind)
            text = TextTraits(prefill_only, *traits, loras)
        instance_id = "" if info is None else info.instance_id
        return Candidate(self.name, self.usable, 0, 0, arena_bytes, 0, max_items, instance_id=instance_id, text=text)

    def put(self, pool: Pool, place: int, stages: Stages, now_s: float, backlog: Backlog | None = None) -> float:
        """Put there what changes with its load and health. Returns until when that holds if nothing happens to it."""
        self.noted = False
        own_tokens = own_pending = own_nbytes = tokens = pending = nbytes = 0
        full, backoff, probation, until_s = _WELL
        for stage in stages:
            known = self.stages[stage]
            own_tokens += known.own_tokens
            own_pending += known.own_pending
            own_nbytes += known.own_bytes
            tokens += known.known_tokens
            pending += known.known_pending
            nbytes += known.known_bytes
            if known.health.reason is not None or now_s < known.full_until_s:
                full, backoff, probation, until_s = self._standing(stages, now_s)
        available = 0 if full else pool.arena_bytes[place] - max(own_nbytes, nbytes)
        pool.put(place, max(own_tokens, tokens), max(own_pending, pending), available, backoff, probation, backlog)
        return until_s

    @property
    def text_load(self) -> TextLoad:
        """Work that it has to do as a text instance."""
        return TextLoad(self.pending_tokens(Stage.PREFILL), self.pending_tokens(Stage.DECODE), self.kv_room)

    def _standing(self, stages: Stages, now_s: float) -> "_Standing":
        full = backoff = probation = False
        until_s = inf
        for stage in stages:
            stage_credits = self.stages[stage]
            if now_s < stage_credits.full_until_s:
                full, until_s = True, min(until_s, stage_credits.full_until_s)
            if stage_credits.health.in_backoff(now_s):
                backoff, until_s = True, min(until_s, stage_credits.health.until_s)
            elif stage_credits.health.on_probation(now_s):
                probation, backoff = True, backoff or bool(stage_credits.health.probes)
        return _Standing(full, backoff, probation, until_s)


class _Standing(NamedTuple):
    """Obstacles that keep work from an instance, and until when that holds if nothing happens to it."""

    full: bool = False
    """Whether the arena is full."""
    backoff: bool = False
    """Or a probe runs."""
    probation: bool = False
    until_s: float = inf


_WELL = _Standing()
