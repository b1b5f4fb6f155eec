"""The table of transports, and the order in which a reader tries them on a holder's memory.

The order within a host is that of ``benchmarks/transport.py``. With RDMA only NIXL uses the hardware. Every transport is
probed before use, and the next is tried when the probe fails.

Between hosts without RDMA, NIXL is tried only if the operator prefers it. Its probe then fails unless UCX may emulate
reads (docs/data_plane.md). In an emulated read the holder sends, and aborts if the reader dies in the middle (nixl
1.5.1): one reader must not kill an encoder.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

MEMORY, SHM, NIXL, TCP = "memory", "shm", "nixl", "tcp"


class Reach(IntEnum):
    """Reach of a transport, widest first."""

    EVERYWHERE = 0
    RDMA = 1
    """The same host, and hosts that both have RDMA."""
    HOST = 2


@dataclass(frozen=True, slots=True)
class TransportKind:
    """Row of the table of transports."""

    reach: Reach
    reason: str
    """Why it is chosen; shown in the log."""
    between_processes: bool = True
    """Whether an instance may be told to use it."""
    under_tls: bool = True
    """Whether it is used under TLS without being named: it is encrypted there, or stays within a user's memory."""


TRANSPORTS: dict[str, TransportKind] = {
    MEMORY: TransportKind(Reach.EVERYWHERE, "the holder may be in the same process", between_processes=False),
    SHM: TransportKind(Reach.HOST, "same host: the holder's memory can be mapped"),
    NIXL: TransportKind(Reach.RDMA, "same host: one-sided reads through shared memory", under_tls=False),
    TCP: TransportKind(Reach.EVERYWHERE, "plain TCP reaches everything"),
}
"""Every transport by its name, best first."""
UNRANKED = TransportKind(Reach.EVERYWHERE, "a transport without a rank, which is tried last", under_tls=False)
"""A plug-in's."""


def between_processes() -> tuple[str, ...]:
    """Transports that an instance may be told to use, best first."""
    return tuple(name for name, kind in TRANSPORTS.items() if kind.between_processes)


def usual(*, under_tls: bool) -> tuple[str, ...]:
    """Transports that an instance uses when it is told nothing, best first."""
    return tuple(name for name in between_processes() if TRANSPORTS[name].under_tls or not under_tls)


def far_first() -> tuple[str, ...]:
    """The transports that reach other hosts, those that reach all of them first."""
    far = (name for name, kind in TRANSPORTS.items() if kind.reach is not Reach.HOST)
    return tuple(sorted(far, key=lambda name: TRANSPORTS[name].reach))


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A transport that one side supports. ``host`` identifies its machine."""

    backend: str
    host: str
    rdma: bool = False


@dataclass(frozen=True, slots=True)
class Ranked:
    backend: str
    reason: str


def rank_backends(reader: Iterable[Endpoint], holder: Iterable[Endpoint], preferred: str | None) -> tuple[Ranked, ...]:
    """Transports that both sides support, best first. The operator's ``preferred`` one comes first."""
    mine = {endpoint.backend: endpoint for endpoint in reader}
    order = list(TRANSPORTS)
    scored: list[tuple[int, str, str]] = []
    for theirs in holder:
        own = mine.get(theirs.backend)
        if own is None:
            continue
        kind, far = TRANSPORTS.get(own.backend, UNRANKED), own.host != theirs.host
        rdma = own.rdma and theirs.rdma
        if far and kind.reach is Reach.HOST:
            continue
        if far and kind.reach is Reach.RDMA and not rdma and own.backend != preferred:
            continue
        score = order.index(own.backend) if own.backend in TRANSPORTS else len(order)
        reason = "both hosts have RDMA" if far and kind.reach is Reach.RDMA else kind.reason
        if theirs.backend == preferred:
            score, reason = -1, "preferred by configuration"
        scored.append((score, theirs.backend, reason))
    return tuple(Ranked(backend, reason) for _, backend, reason in sorted(scored))
