"""Pools as a scaler sees them (``ports.Scaler``): the wanted number of instances, and what exists."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from triptych.domain.stage import INSTANCE_NAMES, Role
from triptych.domain.tier import is_tier_name


class Kind(NamedTuple):
    """A kind of instance: its role, and its tier of hardware (empty without tiers)."""

    role: Role
    tier: str = ""

    def __str__(self) -> str:
        return f"{self.role.value}@{self.tier}" if self.tier else self.role.value

    @property
    def name(self) -> str:
        """Instances of the kind are named after it: ``text``, or ``text-l4``."""
        return f"{INSTANCE_NAMES[self.role]}-{self.tier}" if self.tier else INSTANCE_NAMES[self.role]


@dataclass(frozen=True, slots=True)
class PoolName:
    """The instances of one model that serve the same stages, on one kind of device where there are several."""

    model: str
    role: Role
    tier: str = ""
    """Tier of hardware; empty without tiers."""

    @property
    def kind(self) -> str:
        """Role and tier: ``PD``, or ``PD@l4``."""
        return str(Kind(self.role, self.tier))

    def __str__(self) -> str:
        return f"{self.model}/{self.kind}"


def parse_kind(text: str) -> Kind:
    """Read ``ROLE[@TIER]``. Raises ValueError."""
    letters, at, tier = text.partition("@")
    role = next((role for role in Role if role.value == letters), None)
    if role is None:
        raise ValueError(f"{letters!r} is no role; roles are {', '.join(role.value for role in Role)}")
    if at and not is_tier_name(tier):
        raise ValueError(f"{tier!r} is no name of a tier: small letters, digits, dots and dashes")
    return Kind(role, tier)


class ProcessPhase(StrEnum):
    """An instance as its scaler sees it: a process that is started and stopped. What it says of itself is ``MemberCondition``."""

    ORDERED = "ordered"
    """Wanted and not started yet, or waiting for its next attempt."""
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    """The process was told to end and finishes what runs."""
    FAILED = "failed"
    """The process is not started any more, until a size is declared again."""


@dataclass(frozen=True, slots=True)
class ScaledInstance:
    """An instance of a pool; ``reason`` says why it is not running, if there is more to say."""

    name: str
    phase: ProcessPhase
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ScaledPool:
    """The state of a pool. ``wanted`` is the size declared last; None if none was."""

    name: PoolName
    wanted: int | None
    instances: tuple[ScaledInstance, ...]
    fault: str = ""
    """Why the pool does not become what is wanted; empty while nothing is wrong."""

    def count(self, *phases: ProcessPhase) -> int:
        return sum(instance.phase in phases for instance in self.instances)
