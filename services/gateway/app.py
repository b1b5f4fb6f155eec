"""Wires up the gateway: a router stub behind it, uvicorn in front of it."""

import asyncio
import logging
import os
import socket
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager, suppress
from datetime import UTC, datetime

import uvicorn

from triptych.domain.membership import MemberKind
from triptych.media.fetch import Fetcher
from triptych.ports import Router
from triptych.rpc.routers import Routers
from triptych.rpc.stubs import PoolManagerStub, RouterStub
from triptych.runtime import open_files
from triptych.runtime.admin import Query
from triptych.runtime.clock import monotonic
from triptych.runtime.host import instance_name, new_epoch
from triptych.runtime.managed_membership import ManagedMembership, membership_gauges
from triptych.runtime.metrics import Metrics, total
from triptych.runtime.offload import ThreadOffload
from triptych.runtime.process import CannotStart, tls_identity
from triptych.runtime.tasks import TaskScope
from triptych.runtime.telemetry import Telemetry
from triptych.runtime.tls import ServerCertificate, TlsIdentity

from . import observe
from .http import SPARE_CONNECTIONS, BoundedHttp
from .keys import KeyRing
from .listener import Listener
from .media import RemoteMedia
from .routes import create_app
from .service import Gateway
from .settings import GatewaySettings

logger = logging.getLogger(__name__)

_ABORT_S = 2.0
"""Time that answers may take to report that the shutdown ended them, seconds."""
_BACKLOG = 2048
_LISTED_S = 3.0
"""Longest wait of the start for a pool manager's list of routers, seconds."""
_OTHER_FILES = 128
"""Files that are open beside clients' connections, at most."""


class GatewayApp:
    """Run by ``runtime.process``. ``port`` is the port it listens on."""

    def __init__(self, gateway: Gateway, server: "_Server", serving: TaskScope, port: int) -> None:
        self._gateway = gateway
        self._server = server
        self._serving = serving
        self.port = port

    async def missing(self) -> tuple[str, ...]:
        """Why the gateway is not ready: the router's missing stages, or the router itself."""
        return (await self._gateway.readiness()).missing

    async def drain(self) -> None:
        """Stop accepting requests and wait for running answers."""
        self._server.should_exit = True
        await self._serving.drain(self._server.drain_s)

    async def failed(self) -> str:
        return await self._serving.failed()


class _Server(uvicorn.Server):
    """Uvicorn without its signal handlers, as ``runtime.process`` handles signals, and without its way to accept connections."""

    def __init__(self, config: uvicorn.Config, listening: socket.socket, settings: GatewaySettings) -> None:
        super().__init__(config)
        self.drain_s = settings.drain_s
        self._listening = listening
        self._settings = settings

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets or [])
        self._listener = Listener(
            self._listening,
            self._protocol,
            tls=self.config.ssl,
            handshake_s=self._settings.head_timeout_s,
            most_handshakes=self._settings.max_connections + SPARE_CONNECTIONS,
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._listener.close()
        await super().shutdown(sockets)

    def _protocol(self) -> asyncio.Protocol:
        made: asyncio.Protocol = self.config.http_protocol_class(self.config, self.server_state, self.lifespan.state)  # type: ignore[call-arg]
        return made


@asynccontextmanager
async def app(settings: GatewaySettings, telemetry: Telemetry | None = None) -> AsyncGenerator[GatewayApp]:
    """A gateway that calls the routers of ``settings``."""
    telemetry = telemetry or Telemetry()
    tls = tls_identity(settings, telemetry)
    async with (
        _routers(settings, tls, telemetry.metrics) as routers,
        serve(settings, routers, telemetry) as running,
    ):
        yield running


@asynccontextmanager
async def _routers(settings: GatewaySettings, tls: TlsIdentity | None, metrics: Metrics) -> AsyncGenerator[Routers]:
    """The routers of the settings, or those that pool managers name."""
    routers = Routers(lambda address: RouterStub(address, tls))
    try:
        async with TaskScope("routers", limit=2) as scope:
            if settings.managers.pool_manager:
                membership = ManagedMembership(
                    lambda address: PoolManagerStub(address, tls),
                    settings.managers,
                    settings.lost_members,
                    clock=monotonic,
                    name=instance_name("gateway", settings.port, new_epoch()),
                    kinds=(MemberKind.ROUTER,),
                    metrics=settings.metrics_address,
                )
                metrics.watch(membership.metrics)
                metrics.watch(lambda: membership_gauges(membership.version, membership.fault))
                scope.spawn(routers.follow(membership), name="membership", vital=True)
                # Clients that wait for the port, as after a restart, would be told that there is no router.
                with suppress(TimeoutError):
                    async with asyncio.timeout(_LISTED_S):
                        await routers.listed()
            else:
                routers.use(settings.router)
            await routers.ask()
            metrics.watch(
                lambda: [
                    total(
                        "triptych_gateway_continuations",
                        "Answers that went on at another router, as theirs was lost",
                        {(): routers.continuations},
                    )
                ]
            )
            scope.spawn(routers.keep_asking(), name="models", vital=True)
            yield routers
    finally:
        await routers.close()


@asynccontextmanager
async def serve(
    settings: GatewaySettings, router: Router, telemetry: Telemetry | None = None
) -> AsyncGenerator[GatewayApp]:
    """A gateway that calls the given router, a stub or an object in this process."""
    telemetry = telemetry or Telemetry()
    certificate = _certificate(settings)
    if certificate is not None:
        telemetry.certificates.watch("rest", lambda: certificate.validity)
    offload = ThreadOffload(settings.parse_threads, name="gateway-parse")
    gateway = Gateway(
        router,
        offload,
        settings,
        lambda: datetime.now(UTC).timestamp(),
        keys=_keys(settings),
        media=remote_media(settings),
    )
    observe.watch(telemetry.metrics, gateway.admission, gateway.shedding)

    async def instances(_: Query) -> object:
        return (await gateway.readiness()).instances

    telemetry.show("/instances", instances)
    listener = _listen(settings.host, settings.port)
    port: int = listener.getsockname()[1]
    application = create_app(
        gateway,
        clock=monotonic,
        connections=lambda: len(server.server_state.connections),
        telemetry=telemetry,
    )
    config = uvicorn.Config(
        application,
        http=type(
            "Http",
            (BoundedHttp,),
            {"max_connections": settings.max_connections, "head_timeout_s": settings.head_timeout_s},
        ),
        timeout_keep_alive=settings.keep_alive_s,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        ssl_context_factory=None if certificate is None else lambda _config, _default: certificate.listening(),
        timeout_graceful_shutdown=int(settings.drain_s + _ABORT_S),
    )
    server = _Server(config, listener, settings)
    try:
        async with TaskScope("gateway", limit=1) as serving:
            serving.spawn(server.serve(), name="http", vital=True)
            if not settings.is_loopback and settings.keys is None:
                logger.warning(
                    "%s is not a loopback address and no keys are set: anyone can send requests", settings.host
                )
            if (most := open_files.allowed()) is not None and most < settings.max_connections + _OTHER_FILES:
                logger.warning(
                    "max_connections is %d, but this process may have %d files open: raise its hard limit (ulimit -Hn)",
                    settings.max_connections,
                    most,
                )
            logger.info("listening on %s://%s:%d", "http" if certificate is None else "https", settings.host, port)
            try:
                yield GatewayApp(gateway, server, serving, port)
            finally:
                server.should_exit = True
                gateway.admission.close()
                await serving.drain(_ABORT_S)
    finally:
        listener.close()
        offload.close()


def _keys(settings: GatewaySettings) -> KeyRing:
    try:
        return KeyRing.load(settings.keys, monotonic)
    except ValueError as error:
        raise CannotStart(str(error)) from None


def _certificate(settings: GatewaySettings) -> ServerCertificate | None:
    if settings.rest_tls.files is None:
        return None
    try:
        return ServerCertificate(*settings.rest_tls.files)
    except ValueError as error:
        raise CannotStart(str(error)) from None


def remote_media(settings: GatewaySettings) -> RemoteMedia:
    """Fetcher of items, as the settings have it."""
    fetcher = (
        Fetcher(settings.fetch_rules, settings.fetch_limits, max_bytes=settings.max_item_bytes)
        if settings.fetch
        else None
    )
    return RemoteMedia(fetcher, settings.max_urls_per_request)


def _listen(host: str, port: int) -> socket.socket:
    """Bind before uvicorn starts, so that a port in use is reported in one clear line."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise CannotStart(f"cannot listen on {host}:{port}: {os.strerror(error.errno or 0)}") from None
    listener.setblocking(False)
    return listener
