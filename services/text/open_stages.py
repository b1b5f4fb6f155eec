"""The stages of text that an instance serves now: those of its role, or of what it has switched to; none while it drains."""

from collections import Counter
from collections.abc import Set as AbstractSet
from dataclasses import replace

from triptych.domain.instance import InstanceLoad, LimitsReport, StageLoad
from triptych.domain.lora import LoadedLora
from triptych.domain.stage import Role, Stage
from triptych.errors import StageClosed, Unavailable
from triptych.machine.stage_states import StageStates

PREFILL, DECODE = frozenset({Stage.PREFILL}), frozenset({Stage.DECODE})
BOTH = PREFILL | DECODE


class OpenStages:
    """Reads the states, and counts what each open stage has served since it opened."""

    def __init__(self, role: Role, states: StageStates | None) -> None:
        """``states``: None for an instance that keeps its role. Read only."""
        self._role = role
        self.states = states
        self.draining = False
        self._served: Counter[Stage] = Counter()

    @property
    def open(self) -> frozenset[Stage]:
        return self._role.stages if self.states is None else self.states.open

    def takes(self, needs: AbstractSet[Stage]) -> bool:
        """Whether a new request that needs these stages is taken."""
        return not self.draining and (self.states is None or needs <= self.open)

    def closed(self) -> Unavailable:
        """Why what has not begun is refused."""
        if self.draining:
            return Unavailable("the text instance is draining")
        return StageClosed("the instance has switched to other stages")

    def changed(self) -> None:
        """Other stages are open now."""
        for stage in BOTH - self.open:
            del self._served[stage]

    def served(self, stages: AbstractSet[Stage]) -> None:
        """Note that these stages have computed their part of a request."""
        self._served.update(stages & self.open)

    def report(
        self, stages: dict[Stage, StageLoad], limits: LimitsReport | None, loras: tuple[LoadedLora, ...]
    ) -> InstanceLoad:
        """The load report, with the load of each open stage, limits of batches that can change, and adapters."""
        if self.states is None:
            return InstanceLoad(stages, self.draining, limits=limits, loras=loras)
        stages = {stage: replace(load, served=self._served[stage]) for stage, load in stages.items()}
        return InstanceLoad(
            stages,
            self.draining,
            stages_version=self.states.version,
            closed=self.states.closed,
            limits=limits,
            loras=loras,
        )


def stage_loads(
    open_stages: AbstractSet[Stage],
    *,
    waiting: int,
    running: int,
    tokens: int,
    unanswered_tokens: int,
    leased_bytes: int,
    free_tokens: int | None,
) -> dict[Stage, StageLoad]:
    """The load of the stages of text that are open.

    Requests that have not started (``waiting``) count as prefill load, the others (``running``) as decode load, as both share a batch. An
    instance without one of these stages counts all at the other. Of the ``tokens`` to compute and to generate, those of prompts count as
    prefill load until the first token of their answers, at most ``unanswered_tokens``.
    """
    prompts = min(unanswered_tokens, tokens)
    if open_stages >= BOTH:
        return {
            Stage.PREFILL: StageLoad(prompts, waiting, leased_bytes),
            Stage.DECODE: StageLoad(tokens - prompts, running, free_tokens=free_tokens),
        }
    if open_stages >= PREFILL:
        return {Stage.PREFILL: StageLoad(tokens, waiting + running, leased_bytes)}
    if open_stages >= DECODE:
        return {Stage.DECODE: StageLoad(tokens, waiting + running, free_tokens=free_tokens)}
    return {}
