"""Switches an instance between roles while it serves: tells its services which stages are open, and notices when others are empty."""

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from triptych.domain.stage import ModelPart, Role, Stage
from triptych.errors import TriptychError
from triptych.machine.stage_states import (
    Close,
    Emptied,
    GivenUp,
    Open,
    Opened,
    OpeningFailed,
    OpensIn,
    OrderOvertaken,
    RefuseOrder,
    StageStates,
    Switched,
    SwitchEvent,
    SwitchWanted,
)
from triptych.ports import Clock

from .record import SwitchRecord
from .weight_offloading import PART_OF, WeightOffloading, parts_of

logger = logging.getLogger(__name__)


class SwitchingService(Protocol):
    """A service of the instance. It reads the states, and takes work of open stages only."""

    def stages_changed(self) -> None:
        """Obey the states now: refuse, end or transfer what is of a closing stage, and report the load."""
        ...

    def is_idle(self, stage: Stage) -> bool:
        """Whether nothing of this stage runs in this service."""
        ...

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` whenever ``is_idle`` may have changed."""
        ...


class Switching:
    """A stage opens at once if what it needs is in memory, else when it is loaded."""

    def __init__(
        self,
        states: StageStates,
        services: Sequence[SwitchingService],
        *,
        clock: Clock,
        record: SwitchRecord,
        offloading: WeightOffloading | None,
    ) -> None:
        """Without ``offloading`` all that the stages need is in memory."""
        self._record = record
        self.states = states
        """Read only for others."""
        self._services = services
        self._clock = clock
        self._offloading = offloading
        for service in services:
            service.on_change(self._look)
        if offloading is not None:
            offloading.on_change(self._moved)
            self._tell_times(offloading)

    def set_stages(self, stages: frozenset[Stage], version: int, reason: str) -> None:
        """Open these stages, then close the others; it returns at once. ``reason`` is for the log. Raises Conflict unless ``version`` is above that of the last
        order, and InvalidRequest for stages that this instance cannot serve.
        """
        self._feed(SwitchWanted(stages, version))
        logger.info("switches to role %s, as ordered with version %d: %s", Role.of(stages).value, version, reason)
        self._changed()

    def _changed(self) -> None:
        for service in self._services:
            service.stages_changed()
        self._look()

    def _look(self) -> None:
        for stage in self.states.closing:
            if all(service.is_idle(stage) for service in self._services):
                self._feed(Emptied(stage))

    def _feed(self, event: SwitchEvent) -> None:
        effects = self.states.handle(event, self._clock())
        if self._offloading is not None:
            self._offloading.need(parts_of(self.states.in_use))
        for effect in effects:
            match effect:
                case Open(stage):
                    if self._offloading is None or self._offloading.has(PART_OF[stage]):
                        self._feed(Opened(stage))
                case Close():
                    pass  # the services are told of all changes together
                case RefuseOrder(error):
                    self._record.refused()
                    raise error
                case OrderOvertaken():
                    self._record.overtaken()
                case Switched(took_s):
                    self._record.switched(took_s)
                    logger.info("has switched within %.3f s", took_s)
                case GivenUp(error):
                    self._record.failed()
                    logger.warning("does not switch: %s", error.message)

    def _moved(self, part: ModelPart, error: TriptychError | None) -> None:
        """A part was loaded or unloaded, or could not be loaded."""
        if self._offloading is None:
            return
        self._tell_times(self._offloading)
        for stage in self.states.opening:
            if PART_OF[stage] is not part:
                continue
            if error is not None:
                self._feed(OpeningFailed(stage, error))
            elif self._offloading.has(part):
                self._feed(Opened(stage))
        self._changed()

    def _tell_times(self, offloading: WeightOffloading) -> None:
        for stage in self.states.widest.stages:
            self.states.handle(OpensIn(stage, offloading.opens_s(stage)), self._clock())

    def validate(self) -> None:
        """Raise AssertionError if an invariant is violated."""
        self.states.validate()
