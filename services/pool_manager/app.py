"""Wires up the pool manager."""

from collections.abc import AsyncGenerator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager

from triptych.domain.pool_sizes import MAX_POOL_SIZE
from triptych.ports import Scaler, Store
from triptych.rpc.app import RpcApp, server_of
from triptych.rpc.stubs import ScalerStub
from triptych.runtime.clock import monotonic
from triptych.runtime.host import machine_name, new_epoch
from triptych.runtime.process import CannotStart, known_profiles, tls_identity
from triptych.runtime.tasks import TaskScope
from triptych.runtime.telemetry import Telemetry
from triptych.runtime.tls import REDIS, TlsIdentity
from triptych.store.memory import MemoryStore
from triptych.wire.documents import manager_document

from .gauges import watch
from .record import ManagerRecord
from .service import PoolManagerService
from .servicer import SERVICE_NAME, PoolManagerServicer
from .settings import PoolManagerSettings


@asynccontextmanager
async def app(
    settings: PoolManagerSettings, telemetry: Telemetry | None = None
) -> AsyncGenerator[RpcApp[PoolManagerService]]:
    """Listen. Raises CannotStart."""
    telemetry = telemetry or Telemetry()
    tls = tls_identity(settings, telemetry)
    incarnation = new_epoch()
    async with AsyncExitStack() as stack:
        try:
            store = _store(settings, incarnation, tls)
            stack.push_async_callback(store.close)
            scaler, run = _scaler(settings, tls, stack)
        except ValueError as error:
            raise CannotStart(str(error)) from None
        except ImportError as error:
            needs = "redis" if settings.store.redis and error.name == "redis" else "kubernetes"
            raise CannotStart(f"{error.name} is not installed: install Triptych's extra '{needs}'") from None
        scope = await stack.enter_async_context(TaskScope("pool_manager"))
        if run is not None:
            scope.spawn(run, name="scaler's own work", vital=True)
        owner = f"{machine_name()[:8]}-{incarnation}"
        service = PoolManagerService(
            settings,
            incarnation=incarnation,
            clock=monotonic,
            scope=scope,
            store=store,
            scaler=scaler,
            owner=owner,
            profiles=known_profiles(settings.profiles),
            record=ManagerRecord(telemetry.metrics),
        )
        watch(telemetry.metrics, service)

        async def pools() -> object:
            return manager_document(await service.status())

        telemetry.show("/pools", pools)
        service.start()
        register = PoolManagerServicer(service, tls).register
        server = await stack.enter_async_context(
            server_of(settings, (SERVICE_NAME,), register, telemetry=telemetry, tls=tls)
        )
        yield RpcApp(service, server, scope)


def _store(settings: PoolManagerSettings, incarnation: int, tls: TlsIdentity | None) -> Store:
    """Raises ValueError."""
    if settings.store.redis:
        from triptych.store.redis import RedisStore

        return RedisStore(settings.store, tls=None if tls is None else tls.calling(REDIS))
    return MemoryStore(clock=monotonic, first_revision=incarnation // 1000)


def _scaler(
    settings: PoolManagerSettings, tls: TlsIdentity | None, stack: AsyncExitStack
) -> tuple[Scaler | None, Coroutine[object, object, None] | None]:
    """The scaler, and what it does all the time; no scaler if nobody carries out sizes. Raises ValueError."""
    match settings.scaler:
        case "none":
            return None, None
        case "kubernetes":
            from triptych.integrations.kubernetes.api import KubernetesApi
            from triptych.integrations.kubernetes.scaler import KubernetesScaler

            api = KubernetesApi(settings.kubernetes)
            stack.push_async_callback(api.close)
            kubernetes = KubernetesScaler(api, settings.named_deployments, max_size=MAX_POOL_SIZE)
            return kubernetes, kubernetes.run()
        case target:
            remote = ScalerStub(target, tls)
            stack.push_async_callback(remote.close)
            return remote, None
