"""Start the transports that a process's settings name."""

import logging
from collections.abc import Sequence
from ipaddress import ip_address

from triptych.domain.embedding import LeaseId
from triptych.policy.transport import NIXL, SHM, TCP
from triptych.ports import Arena, LeaseCheck, Transport
from triptych.runtime.tls import TlsIdentity
from triptych.transport.arena import HostArena
from triptych.transport.memory import MemoryNetwork, MemoryTransport
from triptych.transport.nixl import NixlTransport, OnReset
from triptych.transport.options import TransferOptions
from triptych.transport.shm import ShmTransport
from triptych.transport.tcp import TcpTransport
from triptych.transport.tcp_holder import OnFailure, TcpLimits
from triptych.transport.transport_set import TransportSet

logger = logging.getLogger(__name__)


async def start_transports(
    options: TransferOptions,
    arena: Arena,
    *,
    machine: str,
    host: str,
    check: LeaseCheck,
    connect_timeout_s: float,
    preferred: str = "",
    tls: TlsIdentity | None = None,
    on_reset: OnReset = lambda _backend, _cause: None,
    on_failure: OnFailure = lambda _: None,
    network: MemoryNetwork | None = None,
) -> TransportSet:
    """Start those of the allowed transports that work here. Listen on ``host``.

    ``preferred`` (one of them, or empty) is tried first; the best one is found for each pair of hosts. A backend that
    is not installed or does not start is left out with a warning. ``on_reset`` is called when a backend restarts,
    ``on_failure`` when one cannot go on. ``tls`` encrypts TCP, with certificates on both ends. ``network`` joins other
    arenas of this process, whose memory is read directly. Raises ValueError for an unknown name, or when no backend is
    left.
    """
    names, max_pull_s = options.allowed(under_tls=tls is not None), options.max_pull_s
    advertise_host = options.advertise_host
    if preferred and preferred not in names:
        raise ValueError(f"transport {preferred!r} is preferred, but not among {', '.join(names)}")
    _warn_of_open(names, tls)
    transports: list[Transport] = []
    for name in names:
        match name:
            case "shm" | "nixl":
                try:
                    if name == SHM:
                        transports.append(await _shm(arena, machine=machine, max_pull_s=max_pull_s))
                    else:
                        transports.append(
                            await NixlTransport.start(arena, machine=machine, max_pull_s=max_pull_s, on_reset=on_reset)
                        )
                except RuntimeError as error:
                    logger.warning("transport %s is left out: %s", name, error)
            case "tcp":
                if not advertise_host and ip_address(host).is_unspecified:
                    raise ValueError(
                        f"{host} is no address that peers can reach: advertise another one, or leave tcp out"
                    )
                listener = TcpTransport.listen(
                    arena,
                    machine=machine,
                    check=check,
                    limits=TcpLimits(max_pull_s=max_pull_s),
                    bind_host=host,
                    advertised_host=advertise_host or None,
                    tls=tls,
                    on_failure=on_failure,
                )
                transports.append(await listener)
            case _:
                raise ValueError(f"there is no transport {name!r} between processes, only {SHM}, {NIXL} and {TCP}")
    if not transports:
        raise ValueError(f"none of the transports {', '.join(names) or '(none named)'} works here")
    if network is not None:
        transports.append(MemoryTransport(network, arena, host=machine, check=check))
    if preferred and preferred not in {transport.backend for transport in transports}:
        logger.warning("preferred transport %s is not available: the others are ranked as usual", preferred)
        preferred = ""
    return TransportSet(transports, connect_timeout_s=connect_timeout_s, preferred=preferred or None)


def nobody_reads(lease_id: LeaseId, offset: int, nbytes: int) -> bool:
    """The check of a reader's own transports: it grants no leases, and what it has pulled is not for others."""
    del lease_id, offset, nbytes
    return False


def _warn_of_open(names: Sequence[str], tls: TlsIdentity | None) -> None:
    if tls is not None and NIXL in names:
        logger.warning("transport nixl is not covered by TLS: only its network can protect it")


async def _shm(arena: Arena, *, machine: str, max_pull_s: float) -> ShmTransport:
    if isinstance(arena, HostArena):
        return await ShmTransport.listen(arena, machine=machine, max_pull_s=max_pull_s)
    raise RuntimeError("it reaches host memory only, and this arena lies on a device")
