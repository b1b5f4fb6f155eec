"""Switches an instance between roles while it serves: tells its services which stages are open, and notices when others are empty."""

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from triptych.domain.stage import Role, Stage
from triptych.machine.stage_states import (
    Close,
    Emptied,
    Open,
    Opened,
    OrderOvertaken,
    Refuse,
    StageStates,
    Switched,
    SwitchEvent,
    SwitchWanted,
)
from triptych.ports import Clock

from .record import NO_SWITCH_RECORD, SwitchRecord

logger = logging.getLogger(__name__)


class SwitchingService(Protocol):
    """A service of the instance. It reads the states, and takes work of open stages only."""

    def stages_changed(self) -> None:
        """Obey the states now: refuse, end or hand over what is of a closing stage, and report the load."""
        ...

    def is_idle(self, stage: Stage) -> bool:
        """Whether nothing of this stage runs in this service."""
        ...

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` whenever ``is_idle`` may have changed."""
        ...


class Switching:
    """All that the stages need is resident, so that they open at once."""

    def __init__(
        self,
        states: StageStates,
        services: Sequence[SwitchingService],
        *,
        clock: Clock,
        record: SwitchRecord = NO_SWITCH_RECORD,
    ) -> None:
        self._record = record
        self._states = states
        self._services = services
        self._clock = clock
        for service in services:
            service.on_change(self._look)

    def set_stages(self, stages: frozenset[Stage], version: int) -> None:
        """Open these stages, then close the others; it returns at once. Raises Conflict unless ``version`` is above that of the last
        order, and InvalidRequest for stages that this instance cannot serve.
        """
        self._feed(SwitchWanted(stages, version))
        logger.info("switches to role %s, as ordered with version %d", Role.of(stages).value, version)
        for service in self._services:
            service.stages_changed()
        self._look()

    def _look(self) -> None:
        for stage in self._states.closing:
            if all(service.is_idle(stage) for service in self._services):
                self._feed(Emptied(stage))

    def _feed(self, event: SwitchEvent) -> None:
        for effect in self._states.handle(event, self._clock()):
            match effect:
                case Open(stage):
                    self._feed(Opened(stage))
                case Close():
                    pass  # the services are told of all changes together
                case Refuse(error):
                    self._record.refused()
                    raise error
                case OrderOvertaken():
                    self._record.overtaken()
                case Switched(took_s):
                    self._record.switched(took_s)
                    logger.info("has switched within %.3f s", took_s)

    def validate(self) -> None:
        """Raise AssertionError if an invariant is violated."""
        self._states.validate()
