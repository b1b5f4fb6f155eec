"""The transports of a process, by the names that its settings use."""

import logging
from collections.abc import Sequence
from ipaddress import ip_address

from triptych.policy.transport import NIXL, SHM, TCP
from triptych.ports import LeaseCheck, Transport
from triptych.transport.arena import HostArena
from triptych.transport.nixl import NixlTransport
from triptych.transport.probe import TransportSet
from triptych.transport.shm import ShmTransport
from triptych.transport.tcp import TcpTransport
from triptych.transport.tcp_holder import TcpLimits

logger = logging.getLogger(__name__)


async def start_transports(
    names: Sequence[str],
    arena: HostArena,
    *,
    machine: str,
    host: str,
    advertise_host: str,
    check: LeaseCheck,
    max_pull_s: float,
    connect_timeout_s: float,
) -> TransportSet:
    """Start what works here of ``names``; ``host`` is the address to listen on, ``advertise_host`` the one under which
    peers reach it (empty: the same).

    The names say what is allowed; which is best is found out for each pair of hosts. A backend that is not installed
    or does not start is left out with a warning. Raises ValueError for an unknown name, or when none is left.
    """
    transports: list[Transport] = []
    for name in names:
        match name:
            case "shm" | "nixl":
                backend = ShmTransport.listen if name == SHM else NixlTransport.start
                try:
                    transports.append(await backend(arena, machine=machine, max_pull_s=max_pull_s))
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
                )
                transports.append(await listener)
            case _:
                raise ValueError(f"there is no transport {name!r} between processes, only {SHM}, {NIXL} and {TCP}")
    if not transports:
        raise ValueError(f"none of the transports {', '.join(names) or '(none named)'} works here")
    return TransportSet(transports, connect_timeout_s=connect_timeout_s)
