"""Identity of this process and its host."""

import os
import platform
import socket
import time
from hashlib import blake2b
from pathlib import Path

_CPUS = Path("/proc/cpuinfo")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")


def machine_name() -> str:
    """The same for all processes of one kernel, unique otherwise; reveals nothing about the machine."""
    try:
        identity = _BOOT_ID.read_text()
    except OSError:
        identity = platform.node()
    return _digest(identity)


def cpu_name() -> str:
    """The processor, as in the identity of profiles."""
    lines = _CPUS.read_text().splitlines() if _CPUS.is_file() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "unknown CPU")


def memory_nbytes() -> int | None:
    """Bytes of the machine's memory; None where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def new_epoch() -> int:
    """A process's epoch: higher than that of any earlier process under the same name."""
    return time.time_ns()


def own_address() -> str:
    """The IP address that this machine's name stands for: in a container, its own. Raises OSError when it has none."""
    addresses = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    return str(addresses[0][4][0])


def instance_name(service: str, port: int, epoch: int) -> str:
    """Default name of an instance, unique within and across machines, and across the containers of one machine."""
    try:
        network = str(_NETWORK.readlink())
    except OSError:
        network = ""
    return f"{service}-{_digest(machine_name() + network)[:8]}-{port or epoch}"


def _digest(identity: str) -> str:
    return blake2b(identity.encode(), digest_size=16, person=b"triptych-host").hexdigest()
