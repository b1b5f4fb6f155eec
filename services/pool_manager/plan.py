"""A plan of ``triptych plan --json`` as the pool manager needs it: the sizes of its pools, and the mix that it was made for.

Only these parts of the file are read, so that plans with other parts can be followed as well.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import ceil
from pathlib import Path
from typing import Literal, Self

from pydantic import TypeAdapter, ValidationError

from triptych.domain.decision import Bounds
from triptych.domain.mix import Form, Mix
from triptych.domain.pool_sizes import planned_most
from triptych.domain.scaling import PoolName
from triptych.domain.stage import Role
from triptych.files import BadFile, read_bytes

_MAX_NBYTES = 16 << 20


class BadPlan(ValueError):
    """A file that is no plan to follow. The message says what is wrong, without the file's name."""


@dataclass(frozen=True, slots=True)
class _Placement:
    roles: Mapping[Role, int]
    devices: Mapping[Role, str]
    degrees: Mapping[Role, int]
    more: tuple[object, ...] = ()

    def __post_init__(self) -> None:
        if not self.roles or not (self.roles.keys() == self.devices.keys() == self.degrees.keys()):
            raise ValueError("roles, devices and degrees are not of the same roles")
        if min((*self.roles.values(), *self.degrees.values())) < 1:
            raise ValueError("a number of instances or devices is below 1")
        if self.more:
            raise ValueError("a role has instances on several kinds of devices: such a plan is not followed")


@dataclass(frozen=True, slots=True)
class _Candidate:
    placement: _Placement
    meets: bool


@dataclass(frozen=True, slots=True)
class _Budget:
    devices: Mapping[str, int | None]
    rate: float


@dataclass(frozen=True, slots=True)
class _Document:
    format: Literal["triptych-plan"]
    version: Literal[1]
    model_id: str
    candidates: tuple[_Candidate, ...]
    budget: _Budget
    mix: tuple[Form, ...] | None = None


@dataclass(frozen=True, slots=True)
class FollowedPlan:
    """A plan that is followed."""

    model: str
    roles: Mapping[Role, int]
    """Instances of the chosen candidate."""
    bounds: Mapping[Role, Bounds]
    """From half of that to what the budget's devices allow."""
    mix: Mix
    rate: float
    """Requests per second."""
    devices: frozenset[tuple[str, int]]
    """Kinds of devices, each with the number of an instance."""
    most: int
    """Instances that the budget's devices allow in all, or twice those of the plan where it has no number."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises BadPlan."""
        try:
            document = _adapter().validate_json(read_bytes(path, _MAX_NBYTES), strict=True)
        except BadFile as error:
            raise BadPlan(str(error)) from None
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            where, reason = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
            raise BadPlan(f"{where}: {reason}" if where else reason) from None
        if not document.candidates or not document.candidates[0].meets:
            raise BadPlan("no candidate of the plan meets the objectives")
        if not document.mix or not document.budget.rate > 0:
            raise BadPlan("the plan does not say for which mix it was made: make it again with this version")
        placement, budget = document.candidates[0].placement, document.budget
        kinds = frozenset((placement.devices[role], placement.degrees[role]) for role in placement.roles)
        there_are = [None if (count := budget.devices.get(kind)) is None else count // degree for kind, degree in kinds]
        planned = sum(placement.roles.values())
        whole = 2 * planned if None in there_are else max(planned, sum(count or 0 for count in there_are))
        most = planned_most(placement.roles, placement.devices, placement.degrees, budget.devices)
        return cls(
            document.model_id,
            placement.roles,
            {role: Bounds(ceil(count / 2), most[role]) for role, count in placement.roles.items()},
            Mix(document.mix),
            budget.rate,
            kinds,
            whole,
        )

    def check_movable(self) -> None:
        """Raise BadPlan unless all instances are alike, so that any of them can serve any role."""
        if len(self.devices) > 1:
            kinds = " and ".join(
                sorted(device if degree == 1 else f"{degree}x{device}" for device, degree in self.devices)
            )
            raise BadPlan(f"replan moves instances on devices of one kind and number, the plan has {kinds}")

    def bounds_of(self, pool: PoolName, *, replans: bool) -> Bounds | None:
        """Sizes that a pool may have; None if the plan does not say it. Where plans change, a pool may become as small as one instance, and
        as large as all of them.
        """
        if pool.model != self.model:
            return None
        return Bounds(1, self.most) if replans else self.bounds.get(pool.role)


@cache
def _adapter() -> TypeAdapter[_Document]:
    return TypeAdapter(_Document)
