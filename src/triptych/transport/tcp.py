"""Plain TCP: needs no extra package and reaches every host.

The holder checks each read against its leases, so a ticket's nonce is what grants access. Without TLS the stream is
not encrypted and belongs on an isolated network.
"""

import asyncio
import socket
from typing import Self

from triptych.domain.instance import TransportOffer
from triptych.policy.transport import TCP
from triptych.ports import Arena, LeaseCheck
from triptych.runtime.tls import TlsIdentity
from triptych.transport.tcp_holder import OnFailure, TcpLimits, TcpListener
from triptych.transport.tcp_reader import TcpPeer
from triptych.transport.tcp_wire import TcpOffer

BACKEND = TCP
_BACKLOG = 128


class TcpTransport:
    """Listens from ``listen`` until ``close``."""

    def __init__(
        self,
        arena: Arena,
        listener: TcpListener,
        *,
        machine: str,
        advertised: tuple[str, int],
        max_pull_s: float,
        tls: TlsIdentity | None,
    ) -> None:
        """Use ``listen``. ``machine`` names the host, as in ``TransportOffer.host``; readers use the ``advertised`` host and
        port.
        """
        self._arena = arena
        self._listener = listener
        self._machine = machine
        self._advertised = advertised
        self._max_pull_s = max_pull_s
        self._tls = tls
        self._peers: set[TcpPeer] = set()

    @classmethod
    async def listen(
        cls,
        arena: Arena,
        *,
        machine: str,
        check: LeaseCheck,
        limits: TcpLimits,
        bind_host: str = "127.0.0.1",
        advertised_host: str | None = None,
        tls: TlsIdentity | None = None,
        on_failure: OnFailure = lambda _: None,
    ) -> Self:
        """Serve ``arena`` on a port that the system chooses.

        ``advertised_host`` is the address that readers use when it differs from ``bind_host``. ``on_failure`` is called when
        no more readers can connect. Raises OSError when it cannot be bound.
        """
        infos = await asyncio.get_running_loop().getaddrinfo(
            bind_host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, _, _, _, address = infos[0]
        bound = socket.create_server(address, family=family, backlog=_BACKLOG)
        port = bound.getsockname()[1]
        listener = TcpListener(bound, arena, check, limits, tls, on_failure=on_failure)
        advertised = (advertised_host or bind_host, port)
        return cls(arena, listener, machine=machine, advertised=advertised, max_pull_s=limits.max_pull_s, tls=tls)

    @property
    def backend(self) -> str:
        return BACKEND

    @property
    def arena(self) -> Arena:
        return self._arena

    @property
    def connections(self) -> int:
        """Connected readers."""
        return self._listener.connections

    def offer(self) -> TransportOffer:
        host, port = self._advertised
        return TransportOffer(BACKEND, self._machine, TcpOffer(self._arena.probe, host, port).pack())

    async def connect(self, offer: TransportOffer) -> TcpPeer:
        peer = TcpPeer(
            self._arena,
            TcpOffer.parse(offer),
            max_pull_s=self._max_pull_s,
            tls=self._tls,
            closed=self._peers.discard,
        )
        self._peers.add(peer)
        try:
            await peer.prove()
        except BaseException:
            await peer.close()
            raise
        return peer

    def quarantined(self) -> tuple[tuple[int, int], ...]:
        """Always empty: a cancelled pull stops writing at once."""
        return ()

    async def close(self) -> None:
        await self._listener.close()
        for peer in list(self._peers):
            await peer.close()
