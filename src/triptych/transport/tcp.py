"""Plain TCP: needs no extra package and reaches every host.

The holder checks each read against its leases, so a ticket's nonce is what grants access. Without TLS the stream is
not encrypted and belongs on an isolated network.
"""

import asyncio
from typing import Self, cast

from triptych.domain.instance import TransportOffer
from triptych.policy.transport import TCP
from triptych.ports import Arena, LeaseCheck
from triptych.runtime.tls import INSTANCE, TlsIdentity
from triptych.transport.tcp_holder import Serving, TcpLimits
from triptych.transport.tcp_reader import TcpPeer
from triptych.transport.tcp_wire import TLS_HANDSHAKE_S, TcpOffer

BACKEND = TCP


class TcpTransport:
    """Listens from ``listen`` until ``close``."""

    def __init__(
        self, arena: Arena, *, machine: str, check: LeaseCheck, limits: TcpLimits, tls: TlsIdentity | None
    ) -> None:
        """Use ``listen``. ``machine`` names the host, as in ``TransportOffer.host``."""
        self._arena = arena
        self._machine = machine
        self._check = check
        self._limits = limits
        self._tls = tls
        self._server: asyncio.Server | None = None
        self._closed = False
        self._advertised = ("", 0)
        self._serving: set[Serving] = set()
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
    ) -> Self:
        """Serve ``arena`` on a port that the system chooses.

        ``advertised_host`` is the address that readers use when it differs from ``bind_host``. Raises OSError when it
        cannot be bound.
        """
        transport = cls(arena, machine=machine, check=check, limits=limits, tls=tls)
        loop = asyncio.get_running_loop()
        if tls is None:
            server = await loop.create_server(transport._accept, bind_host, 0)
        else:
            server = await loop.create_server(
                transport._accept, bind_host, 0, ssl=tls.listening(INSTANCE), ssl_handshake_timeout=TLS_HANDSHAKE_S
            )
        transport._server = server
        transport._advertised = (advertised_host or bind_host, server.sockets[0].getsockname()[1])
        return transport

    @property
    def backend(self) -> str:
        return BACKEND

    @property
    def arena(self) -> Arena:
        return self._arena

    @property
    def connections(self) -> int:
        """Connected readers."""
        return len(self._serving)

    def offer(self) -> TransportOffer:
        host, port = self._advertised
        return TransportOffer(BACKEND, self._machine, TcpOffer(self._arena.probe, host, port).pack())

    async def connect(self, offer: TransportOffer) -> TcpPeer:
        peer = TcpPeer(
            self._arena,
            TcpOffer.parse(offer),
            max_pull_s=self._limits.max_pull_s,
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
        self._closed = True
        if self._server is not None:
            self._server.close()
            for serving in self._serving:
                serving.abort()
            await self._server.wait_closed()
        for peer in list(self._peers):
            await peer.close()
        if self._serving:
            await asyncio.wait([serving.gone for serving in self._serving])  # safe to cancel

    def _accept(self) -> asyncio.Protocol:
        if len(self._serving) >= self._limits.max_connections:
            return _Refusing()
        return Serving(self._arena, self._check, self._limits, begun=self._begun)

    def _begun(self, serving: Serving) -> None:
        """Counted only now: a failed TLS handshake does not call its protocol. One may end after ``close``."""
        if self._closed:
            serving.abort()
            return
        self._serving.add(serving)
        serving.gone.add_done_callback(lambda _: self._serving.discard(serving))


class _Refusing(asyncio.Protocol):
    """Hangs up, when the limit of readers is reached."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).abort()  # uvloop's class does not derive from it
