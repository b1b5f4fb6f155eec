"""Finds free loopback ports, and explains why a port cannot be used."""

import errno
import os
import secrets
import socket
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from triptych.cli.outcome import ClusterError
from triptych.runtime.listening import listen_error

HOST = "127.0.0.1"
MAX_PORT = 65_535
RANGE = range(20_000, 32_000)
"""Below the kernel's ephemeral ports, so that the kernel gives none away between choosing and listening."""
_reserved: deque[int] = deque(maxlen=128)
"""The sockets that reserve the ports which this process found last. The oldest is given up for a new one."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A port to listen on, its owner, and the flag that chooses it, if any."""

    port: int
    owner: str
    flag: str = ""


def address(port: int) -> str:
    return f"{HOST}:{port}"


def free(count: int, but: Collection[int] = ()) -> list[int]:
    """Free ports that are not in ``but``. Raises ClusterError.

    Other clusters of this machine, which may start at the same time, do not find them while this process runs.
    """
    ports: list[int] = []
    for _ in range(100 * count):
        port = RANGE.start + secrets.randbelow(len(RANGE))
        if port not in but and listen_error(HOST, port) is None and _reserve(port):
            ports.append(port)
        if len(ports) == count:
            return ports
    raise ClusterError(f"found no {count} free ports between {RANGE.start} and {RANGE.stop}")


def _reserve(port: int) -> bool:
    """Reserve a port under a name in Linux's abstract namespace; False if another process has it. It ends with the
    process.
    """
    name = socket.socket(socket.AF_UNIX)
    try:
        name.bind(f"\0triptych-port-{port}")
    except OSError:
        name.close()
        return False
    if len(_reserved) == _reserved.maxlen:
        os.close(_reserved.popleft())
    _reserved.append(name.detach())
    return True


def refuse_taken(wanted: Iterable[Wanted]) -> None:
    """Raises ClusterError for the first port that cannot be listened on, or is wanted twice."""
    owners: dict[int, str] = {}
    for port in wanted:
        if port.port in owners:
            raise ClusterError(f"port {port.port} is used twice, for {owners[port.port]} and for {port.owner}")
        owners[port.port] = port.owner
        error = listen_error(HOST, port.port)
        if error is None:
            continue
        remedy = f"; choose another with {port.flag}, 0 picks a free one" if port.flag else ""
        if error.errno == errno.EADDRINUSE:
            raise ClusterError(f"port {port.port}, for {port.owner}, is taken: another process listens on it{remedy}")
        raise ClusterError(f"cannot listen on port {port.port}, for {port.owner}: {error.strerror}{remedy}")
