"""Which backend a reader tries first to reach a holder's memory.

Measured by ``benchmarks/transport.py`` between two processes of one 2-core host, as a share of memcpy at 4 MB (a large
image's embedding): shared memory 0.9 and more, NIXL over shared memory 0.35 to 0.45, plain TCP 0.16, which is what
sockets can do there at all; NIXL over TCP had a fourth of plain TCP. With RDMA only NIXL uses the hardware. A rank is a
wish: each backend is proven by a probe before it is used, and the next one is tried when it fails.

Between hosts without RDMA, NIXL is tried only where the operator prefers it, and then fails at the probe unless UCX may
emulate reads (docs/data_plane.md): it has the holder's process send, and ends that process (abort, nixl 1.5.1) when a
reader dies in the middle. One reader must not take an encoder with it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

MEMORY, SHM, NIXL, TCP = "memory", "shm", "nixl", "tcp"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A backend that one side has. ``host`` names its machine."""

    backend: str
    host: str
    rdma: bool = False


@dataclass(frozen=True, slots=True)
class Ranked:
    backend: str
    reason: str


def rank_backends(reader: Iterable[Endpoint], holder: Iterable[Endpoint], preferred: str | None) -> tuple[Ranked, ...]:
    """Backends that both sides have, best first. ``preferred``, the operator's choice, comes before all others."""
    mine = {endpoint.backend: endpoint for endpoint in reader}
    scored: list[tuple[int, str, str]] = []
    for theirs in holder:
        own = mine.get(theirs.backend)
        if own is None:
            continue
        if own.backend == SHM and own.host != theirs.host:
            continue  # it cannot leave a host, so that trying would only cost time
        if own.backend == NIXL != preferred and own.host != theirs.host and not (own.rdma and theirs.rdma):
            continue  # slower than plain TCP, and a reader that dies takes the holder with it
        score, reason = _score(own, theirs)
        if theirs.backend == preferred:
            score, reason = -1, "preferred by configuration"
        scored.append((score, theirs.backend, reason))
    return tuple(Ranked(backend, reason) for _, backend, reason in sorted(scored))


def _score(own: Endpoint, theirs: Endpoint) -> tuple[int, str]:
    same_host = own.host == theirs.host
    match own.backend:
        case "memory":
            return 0, "the holder may be in the same process"
        case "shm":
            return 1, "one host: the holder's memory can be mapped"
        case "nixl":
            return 2, "one host: a one-sided read through shared memory" if same_host else "both hosts have RDMA"
        case "tcp":
            return 3, "plain TCP reaches everything"
        case _:
            return 4, "nothing is known of this backend"
