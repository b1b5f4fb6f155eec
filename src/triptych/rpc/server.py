"""A gRPC server with the standard services and one error boundary."""

import logging
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from triptych.domain.limits import MAX_MESSAGE_NBYTES
from triptych.errors import Unavailable
from triptych.rpc import limits
from triptych.rpc.authorization import Authorization
from triptych.rpc.credentials import server_credentials
from triptych.rpc.interceptors import ErrorInterceptor
from triptych.rpc.multiplex_server import SERVICE_NAME as CALLS_SERVICE
from triptych.rpc.multiplex_server import CallsServicer, Handlers
from triptych.rpc.observer import CallObserver
from triptych.runtime.listening import listen_error
from triptych.runtime.telemetry import Telemetry
from triptych.runtime.tls import TlsIdentity

logger = logging.getLogger(__name__)

Register = Callable[[grpc.aio.Server], None]


class RpcServer:
    """Serves what ``register`` adds to it on ``host:port``.

    ``service_names`` are full names such as ``triptych.v1.Router``.

    With ``tls`` clients need a certificate, under ``tls_name`` one for a kind that may call
    (``authorization.CALLERS``). ``port`` 0 picks a free port, which ``port`` holds once the context is entered. Raises
    Unavailable if the port is in use.
    """

    def __init__(
        self,
        *,
        host: str,
        port: int,
        service_names: Sequence[str],
        register: Register,
        max_message_nbytes: int = MAX_MESSAGE_NBYTES,
        max_concurrent_calls: int | None = None,
        telemetry: Telemetry | None = None,
        tls: TlsIdentity | None = None,
    ) -> None:
        self._tls = tls
        self._host = host
        self._service_names = tuple(service_names)
        self._health = HealthServicer()
        interceptor = ErrorInterceptor(CallObserver(telemetry or Telemetry()), Authorization(tls))
        self._server = grpc.aio.server(
            interceptors=(interceptor,),
            options=limits.server_options(max_message_nbytes),
            maximum_concurrent_rpcs=max_concurrent_calls,
        )
        handlers = Handlers(self._server, register)
        CallsServicer(handlers, interceptor, max_concurrent_calls).register(self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (*self._service_names, CALLS_SERVICE, "grpc.health.v1.Health", reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        self.port = port

    async def __aenter__(self) -> Self:
        try:
            host = f"[{self._host}]" if ":" in self._host else self._host
            address = f"{host}:{self.port}"
            if self._tls is None:
                self.port = self._server.add_insecure_port(address)
            else:
                self.port = self._server.add_secure_port(address, server_credentials(self._tls))
        except RuntimeError:
            raise _in_use(self._host, self.port) from None
        await self._server.start()
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)
        logger.info("%s listens on %s:%d", " with ".join(self._service_names), self._host, self.port)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop(0.2)

    async def announce_drain(self) -> None:
        """Make health checks fail. New calls are still answered, by the service's own refusal."""
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, and cut off running ones after ``grace_s``."""
        await self._server.stop(grace=grace_s)

    async def _set_health(self, status: Any) -> None:
        for name in ("", *self._service_names):
            await self._health.set(name, status)


def check_port(host: str, port: int) -> None:
    """Raises Unavailable if the port is in use now, for those that load something long before they listen."""
    if listen_error(host, port) is not None:
        raise _in_use(host, port)


def _in_use(host: str, port: int) -> Unavailable:
    return Unavailable(f"cannot listen on port {port} of {host}: is it in use?")


def remaining_s(context: grpc.aio.ServicerContext[Any, Any]) -> float:
    """Time until the call's deadline, capped; a default if it has none."""
    remaining = context.time_remaining()
    return limits.DEFAULT_CALL_TIMEOUT_S if remaining is None else min(max(0.0, remaining), limits.MAX_CALL_TIMEOUT_S)
