"""Roles of a model's instances, and how many have each, as ``--roles`` says it."""

import re
from typing import NamedTuple

from triptych.cli.outcome import ClusterError
from triptych.domain.stage import INSTANCE_NAMES, Role, Stage
from triptych.domain.tier import is_tier_name

DEFAULT_ROLES = "E:2,PD:1"
_MOST = 64
"""Instances of one role."""
_COUNT = re.compile("[0-9]{1,3}")
"""Python refuses to read thousands of digits, and reads those of other scripts."""


class Kind(NamedTuple):
    """A kind of instance: its role, and its tier of hardware (empty without tiers)."""

    role: Role
    tier: str = ""

    def __str__(self) -> str:
        return f"{self.role.value}@{self.tier}" if self.tier else self.role.value


def placed(roles: str) -> dict[Role, int]:
    """The number of instances of each role that ``ROLE:COUNT,...`` names. Raises ClusterError, also if a stage has none."""
    sizes = placed_kinds(roles)
    if tiers := [str(kind) for kind in sizes if kind.tier]:
        raise _wrong(roles, f"there are no tiers here, leave out @ in {', '.join(tiers)}")
    return {kind.role: size for kind, size in sizes.items()}


def placed_kinds(roles: str) -> dict[Kind, int]:
    """As ``placed``, of ``ROLE[@TIER]:COUNT,...``: a role may have several tiers, each once."""
    sizes: dict[Kind, int] = {}
    for entry in roles.split(","):
        written, _, count = entry.strip().partition(":")
        letters, at, tier = written.partition("@")
        role = next((role for role in INSTANCE_NAMES if role.value == letters), None)
        if role is None:
            raise _wrong(roles, f"{letters!r} is no role; roles are {', '.join(role.value for role in INSTANCE_NAMES)}")
        if at and not is_tier_name(tier):
            raise _wrong(roles, f"{tier!r} is no name of a tier: small letters, digits, dots and dashes")
        if not (_COUNT.fullmatch(count) and 1 <= int(count) <= _MOST):
            raise _wrong(roles, f"{entry.strip()!r} is not ROLE:COUNT with a count of 1 to {_MOST}")
        kind = Kind(role, tier)
        if kind in sizes:
            raise _wrong(roles, f"{kind} is there more than once")
        if any(other.role is role and bool(other.tier) != bool(tier) for other in sizes):
            raise _wrong(roles, f"{letters} has a tier in one place and none in another")
        sizes[kind] = int(count)
    if idle := [stage.value for stage in Stage if not any(kind.role.serves(stage) for kind in sizes)]:
        raise _wrong(roles, f"nothing would {' and '.join(idle)}")
    return {kind: sizes[kind] for role in INSTANCE_NAMES for kind in sizes if kind.role is role}


def fair_threads(processes: int, cores: int, *, grows: bool) -> int:
    """Compute threads for each of ``processes`` that share ``cores``: 1 where there will be more of them."""
    return 1 if grows else max(1, cores // processes)


def _wrong(roles: str, text: str) -> ClusterError:
    return ClusterError(f"--roles {roles}: {text}", caller=True)
