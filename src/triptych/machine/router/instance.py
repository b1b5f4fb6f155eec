"""One instance as a router sees it: what it said of itself, what it last reported, and what was given to it since."""

from dataclasses import dataclass, field
from enum import StrEnum
from math import inf

from triptych.domain.instance import InstanceInfo, InstanceLoad, ModelInfo, StageLoad
from triptych.domain.membership import Member
from triptych.domain.stage import Role, Stage
from triptych.policy.routing import Candidate

Stages = tuple[Stage, ...]
"""What a pool is asked for: instances that serve all of these."""


class InstanceState(StrEnum):
    """Ready, or why it gets nothing."""

    NOT_SEEN = "not seen yet"
    NOT_REACHABLE = "not reachable"
    OTHER_MEMBER = "is not the member that is expected there"
    OTHER_MODEL = "serves another model"
    LEAVING = "leaving"
    DRAINING = "draining"
    READY = "ready"


@dataclass(slots=True)
class StageCredits:
    """One stage of an instance: what it reported, what the router has given to it, and until when it is left alone."""

    load: StageLoad | None = None
    # What the router itself has there now ...
    own_tokens: int = 0
    own_pending: int = 0
    own_bytes: int = 0
    # ... and how that has changed since the last report.
    new_tokens: int = 0
    new_pending: int = 0
    new_bytes: int = 0
    full_until_s: float = -inf
    """It had no memory, although its credits said so."""
    engine_failures: int = 0
    backoff_until_s: float = -inf

    def reported(self, load: StageLoad) -> None:
        self.load = load
        self.new_tokens = self.new_pending = self.new_bytes = 0


@dataclass(slots=True)
class Instance:
    """A part of ``machine.router.cluster.ClusterMachine``, which alone changes it."""

    member: Member
    info: InstanceInfo | None = None
    reachable: bool = False
    leaving: bool = False
    draining: bool = False
    state: InstanceState = InstanceState.NOT_SEEN
    reports: int = 0
    credits: int = 0
    """Credits that are out."""
    stages: dict[Stage, StageCredits] = field(default_factory=lambda: {stage: StageCredits() for stage in Stage})
    _candidates: dict[Stages, tuple[Candidate, float]] = field(default_factory=dict)
    """Kept until something changes, or time has: how it looks in each pool, and until when."""

    @property
    def name(self) -> str:
        return self.member.address

    @property
    def role(self) -> Role | None:
        """None before it was seen."""
        return None if self.info is None else self.info.role

    @property
    def usable(self) -> bool:
        return self.state is InstanceState.READY

    def serves(self, stages: Stages) -> bool:
        return self.info is not None and self.info.role.serves(*stages)

    def state_under(self, model: ModelInfo | None) -> InstanceState:
        """What its state is where ``model`` is the one that is served."""
        info = self.info
        if info is None:
            return InstanceState.NOT_SEEN
        if not self.reachable:
            return InstanceState.NOT_REACHABLE
        if not self.member.agrees_with(info):
            return InstanceState.OTHER_MEMBER
        if info.model is not model and info.model != model:
            return InstanceState.OTHER_MODEL
        if self.leaving:
            return InstanceState.LEAVING
        return InstanceState.DRAINING if self.draining else InstanceState.READY

    def review(self, model: ModelInfo | None) -> None:
        self.state = self.state_under(model)
        self._candidates.clear()

    def seen(self, info: InstanceInfo) -> bool:
        """Whether it is another process than before: that one has reported nothing yet."""
        restarted = self.info is not None and self.info.epoch != info.epoch
        if restarted:
            self.draining = False
            for one in self.stages.values():
                one.load, one.full_until_s = None, -inf
                one.engine_failures, one.backoff_until_s = 0, -inf
        self.info, self.reachable = info, True
        return restarted

    def reported(self, load: InstanceLoad) -> None:
        self.draining = load.draining
        self.reports += 1
        for stage, one in load.stages.items():
            self.stages[stage].reported(one)
        self._candidates.clear()

    # --- credits -----------------------------------------------------------------------------------------------------

    def give(self, stage: Stage, tokens: int, nbytes: int) -> None:
        """Work for a stage, and arena bytes."""
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
        """The work of a credit that was given when there had been so many reports; its bytes are still taken."""
        one = self.stages[stage]
        one.own_tokens -= tokens
        one.own_pending -= 1
        # A report of prefill or decode shrinks token by token: what it still counted of this work is not known.
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

    # --- what goes wrong there ---------------------------------------------------------------------------------------

    def refused_memory(self, until_s: float) -> None:
        self.stages[Stage.ENCODE].full_until_s = until_s
        self._candidates.clear()

    def engine_failed(self, stage: Stage, now_s: float, first_backoff_s: float, longest_backoff_s: float) -> None:
        one = self.stages[stage]
        if now_s < one.backoff_until_s:
            return  # one bad pass fails many requests at once
        one.backoff_until_s = now_s + min(first_backoff_s * 2 ** min(one.engine_failures, 30), longest_backoff_s)
        one.engine_failures += 1
        self._candidates.clear()

    def worked(self, stage: Stage) -> None:
        one = self.stages[stage]
        if one.engine_failures:
            one.engine_failures, one.backoff_until_s = 0, -inf
            self._candidates.clear()

    def may_be_tried_s(self, stage: Stage) -> tuple[float, float]:
        """When it has, or had, been left alone for long enough, for each reason."""
        one = self.stages[stage]
        return one.full_until_s, one.backoff_until_s

    # --- as the policies see it --------------------------------------------------------------------------------------

    def candidate(self, stages: Stages, now_s: float) -> Candidate:
        kept = self._candidates.get(stages)
        if kept is not None and now_s < kept[1]:
            return kept[0]
        made = self._candidates[stages] = self._candidate(stages, now_s)
        return made[0]

    def _candidate(self, stages: Stages, now_s: float) -> tuple[Candidate, float]:
        """How it looks, and until when. Made for every decision, of an instance to which something has happened."""
        info, encodes = self.info, Stage.ENCODE in stages
        tokens = pending = nbytes = 0
        told_tokens = told_pending = told_nbytes = 0
        reported = full = backoff = False
        until_s = inf
        for stage in stages:
            one = self.stages[stage]
            tokens += one.own_tokens
            pending += one.own_pending
            nbytes += one.own_bytes
            told_tokens += one.new_tokens
            told_pending += one.new_pending
            told_nbytes += one.new_bytes
            if (load := one.load) is not None:
                reported = True
                told_tokens += load.pending_tokens
                told_pending += load.pending
                told_nbytes += load.leased_bytes
            if now_s < one.full_until_s:
                full, until_s = True, min(until_s, one.full_until_s)
            if now_s < one.backoff_until_s:
                backoff, until_s = True, min(until_s, one.backoff_until_s)
        if reported:
            # Other routers' load is in the report alone; what is under way to the instance is in the own books alone.
            tokens = max(tokens, told_tokens) if encodes else told_tokens
            pending, nbytes = max(pending, told_pending), max(nbytes, told_nbytes)
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
