"""Roles of a model's instances, and how many have each, as ``--roles`` says it."""

import re

from triptych.cli.outcome import ClusterError
from triptych.domain.stage import INSTANCE_NAMES, Role, Stage

DEFAULT_ROLES = "E:2,PD:1"
_MOST = 64
"""Instances of one role."""
_COUNT = re.compile("[0-9]{1,3}")
"""Python refuses to read thousands of digits, and reads those of other scripts."""


def placed(roles: str) -> dict[Role, int]:
    """The number of instances of each role that ``ROLE:COUNT,...`` names. Raises ClusterError, also if a stage has none."""
    sizes: dict[Role, int] = {}
    for entry in roles.split(","):
        letters, _, count = entry.strip().partition(":")
        role = next((role for role in INSTANCE_NAMES if role.value == letters), None)
        if role is None:
            raise _wrong(roles, f"{letters!r} is no role; roles are {', '.join(role.value for role in INSTANCE_NAMES)}")
        if not (_COUNT.fullmatch(count) and 1 <= int(count) <= _MOST):
            raise _wrong(roles, f"{entry.strip()!r} is not ROLE:COUNT with a count of 1 to {_MOST}")
        if role in sizes:
            raise _wrong(roles, f"{letters} is there more than once")
        sizes[role] = int(count)
    if idle := [stage.value for stage in Stage if not any(role.serves(stage) for role in sizes)]:
        raise _wrong(roles, f"nothing would {' and '.join(idle)}")
    return {role: sizes[role] for role in INSTANCE_NAMES if role in sizes}


def fair_threads(processes: int, cores: int, *, grows: bool) -> int:
    """Compute threads for each of ``processes`` that share ``cores``: 1 where there will be more of them."""
    return 1 if grows else max(1, cores // processes)


def _wrong(roles: str, text: str) -> ClusterError:
    return ClusterError(f"--roles {roles}: {text}", caller=True)
