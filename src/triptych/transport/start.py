"""Start the transports that a process's settings name."""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from ipaddress import ip_address

from triptych.domain.embedding import LeaseId
from triptych.plugins import plugin, plugin_names
from triptych.policy.transport import NIXL, SHM, TCP, TRANSPORTS, UNRANKED
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

_PLUGINS = "triptych.transports"


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Surroundings that a transport may need to start. ``start_transports`` says what each is."""

    arena: Arena
    machine: str
    host: str
    advertise_host: str
    check: LeaseCheck
    max_pull_s: float
    tls: TlsIdentity | None
    on_reset: OnReset
    on_failure: OnFailure


Starter = Callable[[Surroundings], Awaitable[Transport]]
"""Starts a transport. Raises RuntimeError where it does not work, ValueError where the settings forbid it."""


async def _shm(near: Surroundings) -> Transport:
    if isinstance(near.arena, HostArena):
        return await ShmTransport.listen(near.arena, machine=near.machine, max_pull_s=near.max_pull_s)
    raise RuntimeError("it reaches host memory only, and this arena lies on a device")


async def _nixl(near: Surroundings) -> Transport:
    return await NixlTransport.start(
        near.arena, machine=near.machine, max_pull_s=near.max_pull_s, on_reset=near.on_reset
    )


async def _tcp(near: Surroundings) -> Transport:
    if not near.advertise_host and ip_address(near.host).is_unspecified:
        raise ValueError(f"{near.host} is no address that peers can reach: advertise another one, or leave tcp out")
    return await TcpTransport.listen(
        near.arena,
        machine=near.machine,
        check=near.check,
        limits=TcpLimits(max_pull_s=near.max_pull_s),
        bind_host=near.host,
        advertised_host=near.advertise_host or None,
        tls=near.tls,
        on_failure=near.on_failure,
    )


STARTERS: dict[str, Starter] = {SHM: _shm, NIXL: _nixl, TCP: _tcp}
"""How to start each transport between processes."""


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
    names = options.allowed(under_tls=tls is not None)
    if preferred and preferred not in names:
        raise ValueError(f"transport {preferred!r} is preferred, but not among {', '.join(names)}")
    starters = {name: _starter(name) for name in names}
    near = Surroundings(
        arena, machine, host, options.advertise_host, check, options.max_pull_s, tls, on_reset, on_failure
    )
    transports: list[Transport] = []
    for name in names:
        if tls is not None and not TRANSPORTS.get(name, UNRANKED).under_tls:
            logger.warning("transport %s is not covered by TLS: only its network can protect it", name)
        try:
            transports.append(await starters[name](near))
        except RuntimeError as error:
            logger.warning("transport %s is left out: %s", name, error)
    if not transports:
        raise ValueError(f"none of the transports {', '.join(names) or '(none named)'} works here")
    if network is not None:
        transports.append(MemoryTransport(network, arena, host=machine, check=check))
    if preferred and preferred not in {transport.backend for transport in transports}:
        logger.warning("preferred transport %s is not available: the others are ranked as usual", preferred)
        preferred = ""
    return TransportSet(transports, connect_timeout_s=connect_timeout_s, preferred=preferred or None)


def _starter(name: str) -> Starter:
    """How to start a transport, here or in a plug-in. Raises ValueError for a name that none between processes has."""
    starter = STARTERS.get(name) if name in TRANSPORTS else plugin(_PLUGINS, name)
    if callable(starter):
        return starter
    if starter is not None:
        raise ValueError(f"transport {name!r} of a plug-in is no function that starts one, but {starter!r}")
    offered = (other for other in plugin_names(_PLUGINS) if other not in TRANSPORTS)
    raise ValueError(f"there is no transport {name!r} between processes, only {', '.join((*STARTERS, *offered))}")


def nobody_reads(lease_id: LeaseId, offset: int, nbytes: int) -> bool:
    """The check of a reader's own transports: it grants no leases, and what it has pulled is not for others."""
    del lease_id, offset, nbytes
    return False
