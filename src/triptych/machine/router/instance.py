"""One instance as seen by a router: its description, its last load report, and the credits granted since."""

from dataclasses import dataclass, field
from enum import StrEnum
from math import inf

from triptych.domain.instance import InstanceInfo, InstanceLoad, ModelInfo, StageLoad
from triptych.domain.membership import Member
from triptych.domain.stage import Role, Stage
from triptych.policy.routing import Candidate

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
    """One stage of an instance: its reported load, the router's credits there, and its backoff."""

    load: StageLoad | None = None
    # The router's own work there now ...
    own_tokens: int = 0
    own_pending: int = 0
    own_bytes: int = 0
    # ... and its change since the last report.
    new_tokens: int = 0
    new_pending: int = 0
    new_bytes: int = 0
    full_until_s: float = -inf
    """It refused for lack of memory, although its credits said otherwise."""
    engine_failures: int = 0
    backoff_until_s: float = -inf


@dataclass(slots=True)
class Instance:
    """Part of ``machine.router.cluster.ClusterMachine``, which alone changes it."""

    member: Member
    info: InstanceInfo | None = None
    reachable: bool = False
    leaving: bool = False
    draining: bool = False
    duplicate: bool = False
    """Another member, under another address, is the same process and is used instead."""
    state: InstanceState = InstanceState.NOT_SEEN
    reports: int = 0
    credits: int = 0
    """Credits not yet returned."""
    stages: dict[Stage, StageCredits] = field(default_factory=lambda: {stage: StageCredits() for stage in Stage})
    _candidates: dict[Stages, tuple[Candidate, float]] = field(default_factory=dict)
    """Cached candidate per pool, and the time until which it is valid."""

    @property
    def name(self) -> str:
        return self.member.address

    @property
    def role(self) -> Role | None:
        """None until it has been seen."""
        return None if self.info is None else self.info.role

    @property
    def process(self) -> tuple[str, int] | None:
        """Which process it is, if it could be used there."""
        if self.info is None or not self.reachable or self.leaving or not self.member.agrees_with(self.info):
            return None
        return self.info.instance_id, self.info.epoch

    @property
    def usable(self) -> bool:
        return self.state is InstanceState.READY

    def serves(self, stages: Stages) -> bool:
        return self.info is not None and self.info.role.serves(*stages)

    def state_under(self, model: ModelInfo | None) -> InstanceState:
        """Its state if ``model`` is the served one."""
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
        self._candidates.clear()

    def seen(self, info: InstanceInfo) -> bool:
        """Store the description. Returns whether the process has restarted."""
        restarted = self.info is not None and self.info.epoch != info.epoch
        if restarted:
            self.draining = False
            for one in self.stages.values():
                one.load, one.full_until_s = None, -inf
                one.engine_failures, one.backoff_until_s = 0, -inf
        self.info, self.reachable = info, True
        return restarted

    def reported(self, load: InstanceLoad) -> bool:
        """Store a load report. Returns whether the instance began or stopped draining."""
        changed, self.draining = self.draining is not load.draining, load.draining
        self.reports += 1
        for stage, reported in load.stages.items():
            one = self.stages[stage]
            one.load = reported
            one.new_tokens = one.new_pending = one.new_bytes = 0
        self._candidates.clear()
        return changed

    # --- credits -----------------------------------------------------------------------------------------------------

    def give(self, stage: Stage, tokens: int, nbytes: int) -> None:
        """Grant a credit: work for a stage, and arena bytes."""
        one = self.stages[stage]
        self.credits += 1
        one.own_tokens += tokens
        one.own_pending += 1
        one.own_bytes += nbytes
        one.new_tokens += tokens
        one.new_pending += 1
        one.new_bytes += nbytes
        self._candidates.clear()

    def work_ended(self, stage: Stage, tokens: int, report: int) -> None:
        """End a credit's work. Its bytes stay taken. ``report`` is the number of reports when it was granted."""
        one = self.stages[stage]
        one.own_tokens -= tokens
        one.own_pending -= 1
        # Reported load of prefill and decode shrinks token by token, so how much of this work it still counts is
        # unknown.
        if stage is Stage.ENCODE or report == self.reports:
            one.new_tokens -= tokens
            one.new_pending -= 1
        self._candidates.clear()

    def take_back(self, stage: Stage, nbytes: int) -> None:
        one = self.stages[stage]
        self.credits -= 1
        one.own_bytes -= nbytes
        one.new_bytes -= nbytes
        self._candidates.clear()

    # --- failures ----------------------------------------------------------------------------------------------------

    def refused_memory(self, until_s: float) -> None:
        self.stages[Stage.ENCODE].full_until_s = until_s
        self._candidates.clear()

    def engine_failed(self, stage: Stage, now_s: float, first_backoff_s: float, longest_backoff_s: float) -> None:
        one = self.stages[stage]
        if now_s < one.backoff_until_s:
            return  # one failed batch fails many requests at once
        one.backoff_until_s = now_s + min(first_backoff_s * 2 ** min(one.engine_failures, 30), longest_backoff_s)
        one.engine_failures += 1
        self._candidates.clear()

    def worked(self, stage: Stage) -> None:
        one = self.stages[stage]
        if one.engine_failures:
            one.engine_failures, one.backoff_until_s = 0, -inf
            self._candidates.clear()

    def may_be_tried_s(self, stage: Stage) -> tuple[float, float]:
        """When each of its backoffs ends or ended."""
        one = self.stages[stage]
        return one.full_until_s, one.backoff_until_s

    # --- for policies ------------------------------------------------------------------------------------------------

    def candidate(self, stages: Stages, now_s: float) -> Candidate:
        kept = self._candidates.get(stages)
        if kept is not None and now_s < kept[1]:
            return kept[0]
        made = self._candidates[stages] = self._candidate(stages, now_s)
        return made[0]

    def _candidate(self, stages: Stages, now_s: float) -> tuple[Candidate, float]:
        """Compute the candidate, and the time until which it is valid."""
        info, encodes = self.info, Stage.ENCODE in stages
        tokens = pending = nbytes = 0
        estimated_tokens = estimated_pending = estimated_nbytes = 0
        reported = full = backoff = False
        until_s = inf
        for stage in stages:
            one = self.stages[stage]
            tokens += one.own_tokens
            pending += one.own_pending
            nbytes += one.own_bytes
            estimated_tokens += one.new_tokens
            estimated_pending += one.new_pending
            estimated_nbytes += one.new_bytes
            if (load := one.load) is not None:
                reported = True
                estimated_tokens += load.pending_tokens
                estimated_pending += load.pending
                estimated_nbytes += load.leased_bytes
            if now_s < one.full_until_s:
                full, until_s = True, min(until_s, one.full_until_s)
            if now_s < one.backoff_until_s:
                backoff, until_s = True, min(until_s, one.backoff_until_s)
        if reported:
            # Only the report includes other routers' load; only the router's own counts include calls still on their
            # way.
            tokens = max(tokens, estimated_tokens) if encodes else estimated_tokens
            pending, nbytes = max(pending, estimated_pending), max(nbytes, estimated_nbytes)
        arena_bytes = info.arena_bytes if info is not None and encodes else 0
        made = Candidate(
            self.name,
            self.usable,
            tokens,
            pending,
            arena_bytes,
            0 if full else arena_bytes - nbytes,
            info.max_items if info is not None and encodes else 0,
            backoff,
            "" if info is None else info.instance_id,
        )
        return made, until_s
