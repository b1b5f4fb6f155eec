"""The order in which a reader tries transports to a holder's memory.

``benchmarks/transport.py`` measured, between two processes of one 2-core host, as a share of memcpy at 4 MB (a large
image's embedding): shared memory 0.9 and more, NIXL over shared memory 0.35 to 0.45, plain TCP 0.16 (the limit of
sockets there); NIXL over TCP reached a fourth of plain TCP. With RDMA only NIXL uses the hardware. Every transport is
probed before use, and the next is tried when the probe fails.

Between hosts without RDMA, NIXL is tried only if the operator prefers it. Its probe then fails unless UCX may emulate
reads (docs/data_plane.md), in which the holder sends: if a reader dies in the middle, the holder aborts (nixl 1.5.1),
and one reader must not kill an encoder.
"""

from collections.abc import Iterable
from dataclasses import dataclass

MEMORY, SHM, NIXL, TCP = "memory", "shm", "nixl", "tcp"
BETWEEN_PROCESSES = (SHM, NIXL, TCP)
"""What an instance may be told to use; ``MEMORY`` is for readers in the holder's own process."""
_REASONS = {
    MEMORY: "the holder may be in the same process",
    SHM: "same host: the holder's memory can be mapped",
    NIXL: "same host: one-sided reads through shared memory",
    TCP: "plain TCP reaches everything",
}
"""Why each is chosen, best first."""
_ORDER = tuple(_REASONS)


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
    scored: list[tuple[int, str, str]] = []
    for theirs in holder:
        own = mine.get(theirs.backend)
        if own is None:
            continue
        if own.backend == SHM and own.host != theirs.host:
            continue  # shared memory works only within a host
        if own.backend == NIXL != preferred and own.host != theirs.host and not (own.rdma and theirs.rdma):
            continue  # slower than plain TCP, and a reader that dies kills the holder
        score = _ORDER.index(own.backend) if own.backend in _ORDER else len(_ORDER)
        reason = _REASONS.get(own.backend, "a transport without a rank, which is tried last")
        if own.backend == NIXL and own.host != theirs.host:
            reason = "both hosts have RDMA"
        if theirs.backend == preferred:
            score, reason = -1, "preferred by configuration"
        scored.append((score, theirs.backend, reason))
    return tuple(Ranked(backend, reason) for _, backend, reason in sorted(scored))
