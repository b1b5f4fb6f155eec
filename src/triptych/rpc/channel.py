"""A client's connection to one service, which survives new certificates."""

import asyncio
from dataclasses import dataclass
from typing import Any, ClassVar

import grpc.aio

from triptych.rpc import limits
from triptych.rpc.credentials import channel_credentials
from triptych.rpc.multiplex import Multiplexer
from triptych.runtime.tasks import TaskScope
from triptych.runtime.tls import TlsIdentity, TlsMaterial

_POLL_S = 5.0


@dataclass(slots=True, eq=False)
class _Connection:
    channel: grpc.aio.Channel
    calls: Multiplexer
    """For calls that share a stream."""
    material: TlsMaterial | None
    stub: Any
    """For calls of their own."""

    async def close(self) -> None:
        await self.calls.close()
        await self.channel.close()


class Channel:
    """A connection to ``target`` (``host:port``), with mutual TLS if ``tls`` is given. It reconnects automatically.

    gRPC keeps the certificate of a channel, so new files get a new channel; calls on the old one go on to their end.
    """

    kind: ClassVar[str]
    """Kind of server that is called, for the name in its certificate."""
    stub_class: ClassVar[Any]
    """The generated stub."""

    def __init__(self, target: str, tls: TlsIdentity | None = None) -> None:
        self._target = target
        self._tls = tls
        self._current = self._open()
        self._closed = False
        self._old = TaskScope("connections with earlier certificates")

    @property
    def refused(self) -> bool:
        """Whether the last connection attempt failed, so that a call fails without being sent."""
        return self._current.channel.get_state() is grpc.ChannelConnectivity.TRANSIENT_FAILURE

    @property
    def connected(self) -> bool:
        return self._current.channel.get_state() is grpc.ChannelConnectivity.READY

    async def close(self) -> None:
        """Running calls fail, and later ones, too."""
        self._closed = True
        await self._old.close()
        await self._current.close()

    @property
    def _connection(self) -> _Connection:
        """The connection for a new call."""
        if self._tls is not None and not self._closed and self._tls.current is not self._current.material:
            self._old.spawn(_finish(self._current), name=self._target)
            self._current = self._open()
        return self._current

    def _open(self) -> _Connection:
        if self._tls is None:
            material = None
            channel = grpc.aio.insecure_channel(self._target, options=limits.channel_options())
        else:
            material = self._tls.current
            options = limits.channel_options(self._tls.name_of(self.kind))
            channel = grpc.aio.secure_channel(self._target, channel_credentials(material), options=options)
        return _Connection(channel, Multiplexer(channel), material, self.stub_class(channel))


async def _finish(connection: _Connection) -> None:
    """Close it once its calls have ended, also those that were about to start."""
    try:
        await asyncio.sleep(_POLL_S)
        while connection.calls.busy:  # noqa: ASYNC110 - when it closes does not matter
            await asyncio.sleep(_POLL_S)
        await connection.calls.close()
        await connection.channel.close(grace=limits.MAX_CALL_TIMEOUT_S)
    finally:
        await connection.close()
