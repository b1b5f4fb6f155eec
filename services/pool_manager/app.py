"""The process of a pool manager: its store, its scaler, gRPC."""

from collections.abc import AsyncGenerator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager

from triptych.domain.pool_sizes import MAX_POOL_SIZE
from triptych.ports import Scaler, Store
from triptych.rpc.app import RpcApp, server_of
from triptych.rpc.stubs import ScalerStub
from triptych.runtime.admin import Query
from triptych.runtime.clock import hours
from triptych.runtime.host import machine_name, new_epoch
from triptych.runtime.plans import BadPlan
from triptych.runtime.process import CannotStart, known_profiles, tls_identity
from triptych.runtime.telemetry import Telemetry
from triptych.runtime.tls import REDIS, TlsIdentity
from triptych.runtime.world import real_world
from triptych.wire.documents import manager_document

from .build import build
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
    epoch = new_epoch()
    async with AsyncExitStack() as stack:
        try:
            store = _store(settings, tls, stack)
            scaler, run = _scaler(settings, tls, stack)
        except ValueError as error:
            raise CannotStart(str(error)) from None
        except ImportError as error:
            needs = "redis" if settings.store.redis and error.name == "redis" else "kubernetes"
            raise CannotStart(f"{error.name} is not installed: install Triptych's extra '{needs}'") from None
        name = f"{machine_name()[:8]}-{epoch}"
        world = await stack.enter_async_context(real_world("pool_manager", name, epoch))
        if run is not None:
            world.scope.spawn(run, name="scaler's own work", vital=True)
        try:
            service = build(
                settings,
                world,
                hour=hours,
                store=store,
                scaler=scaler,
                profiles=known_profiles(settings.profiles),
                record=ManagerRecord(telemetry.metrics),
            )
        except BadPlan as error:
            raise CannotStart(f"plan {settings.plan}: {error}") from None
        watch(telemetry.metrics, service)

        async def pools(_: Query) -> object:
            return manager_document(await service.status())

        async def targets(query: Query) -> object:
            found = service.metrics_targets()
            return [target for target in found if query.get("job", target["labels"]["job"]) == target["labels"]["job"]]

        telemetry.show("/pools", pools)
        telemetry.show("/sd", targets)
        register = PoolManagerServicer(service, tls).register
        server = await stack.enter_async_context(
            server_of(settings, (SERVICE_NAME,), register, telemetry=telemetry, tls=tls)
        )
        yield RpcApp(service, server, world.scope)


def _store(settings: PoolManagerSettings, tls: TlsIdentity | None, stack: AsyncExitStack) -> Store | None:
    """The store that managers share, if they do. Raises ValueError."""
    if not settings.store.redis:
        return None
    from triptych.store.redis import RedisStore

    store = RedisStore(settings.store, tls=None if tls is None else tls.calling(REDIS))
    stack.push_async_callback(store.close)
    return store


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
