"""Who and where this process is."""

import platform
import time
from hashlib import blake2b
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def machine_name() -> str:
    """Equal for processes under one kernel, different for others; says nothing about the machine itself."""
    try:
        identity = _BOOT_ID.read_text()
    except OSError:
        identity = platform.node()
    return blake2b(identity.encode(), digest_size=16, person=b"triptych-host").hexdigest()


def new_epoch() -> int:
    """A number that a process gets at its start, higher than that of any process before it under the same name."""
    return time.time_ns()


def instance_name(service: str, port: int, epoch: int) -> str:
    """A name for an instance that was given none: unique among machines, and on one machine."""
    return f"{service}-{machine_name()[:8]}-{port or epoch}"
