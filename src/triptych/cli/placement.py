"""Roles of a model's instances, and how many have each, as ``--roles`` says it."""

import re

from triptych.cli.outcome import ClusterError
from triptych.domain.scaling import Kind, parse_kind
from triptych.domain.stage import INSTANCE_NAMES, Role, Stage

DEFAULT_ROLES = "E:2,PD:1"
_MOST = 64
"""Instances of one role."""
_COUNT = re.compile("[0-9]{1,3}")
"""Python refuses to read thousands of digits, and reads those of other scripts."""


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
        try:
            kind = parse_kind(written)
        except ValueError as error:
            raise _wrong(roles, str(error)) from None
        if not (_COUNT.fullmatch(count) and 1 <= int(count) <= _MOST):
            raise _wrong(roles, f"{entry.strip()!r} is not ROLE:COUNT with a count of 1 to {_MOST}")
        if kind in sizes:
            raise _wrong(roles, f"{kind} is there more than once")
        if any(other.role is kind.role and bool(other.tier) != bool(kind.tier) for other in sizes):
            raise _wrong(roles, f"{kind.role.value} has a tier in one place and none in another")
        sizes[kind] = int(count)
    if idle := [stage.value for stage in Stage if not any(kind.role.serves(stage) for kind in sizes)]:
        raise _wrong(roles, f"nothing would {' and '.join(idle)}")
    return {kind: sizes[kind] for role in INSTANCE_NAMES for kind in sizes if kind.role is role}


def fair_threads(processes: int, cores: int, *, grows: bool) -> int:
    """Compute threads for each of ``processes`` that share ``cores``: 1 where there will be more of them."""
    return 1 if grows else max(1, cores // processes)


def _wrong(roles: str, text: str) -> ClusterError:
    return ClusterError(f"--roles {roles}: {text}", caller=True)
