"""Registers a service with the pool managers of its settings, for as long as it runs."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import Protocol

from triptych.domain.instance import InstanceInfo
from triptych.domain.pool import Registration
from triptych.rpc.settings import InstanceSettings, MemberSettings
from triptych.rpc.stubs import PoolManagerStub
from triptych.runtime.batch_limits import SetLimits
from triptych.runtime.metrics import gauge
from triptych.runtime.registrar import Loaded, Registrar, Reporting, SetStages
from triptych.runtime.tasks import TaskScope
from triptych.runtime.telemetry import Telemetry
from triptych.runtime.tls import TlsIdentity

Introduce = Callable[[str], Awaitable[Registration]]
"""Describes the process, given its address."""


class Described(Loaded, Protocol):
    async def describe(self) -> InstanceInfo: ...


class Listening(Protocol):
    """A running app."""

    @property
    def port(self) -> int: ...

    async def drain(self) -> None: ...


def instance_registered(
    settings: InstanceSettings,
    service: Described,
    app: Listening,
    *,
    telemetry: Telemetry,
    tls: TlsIdentity | None,
    set_stages: SetStages | None = None,
    set_limits: SetLimits | None = None,
) -> AbstractAsyncContextManager[None]:
    """``registered`` for an instance."""

    async def introduce(address: str) -> Registration:
        info = await service.describe()
        return Registration.of_instance(info, address=address, tier=settings.hardware_tier)

    return registered(
        settings, service, introduce, app, telemetry=telemetry, tls=tls, set_stages=set_stages, set_limits=set_limits
    )


@asynccontextmanager
async def registered(
    settings: MemberSettings,
    service: Loaded,
    introduce: Introduce,
    app: Listening,
    *,
    telemetry: Telemetry,
    tls: TlsIdentity | None,
    windows: Reporting | None = None,
    set_stages: SetStages | None = None,
    set_limits: SetLimits | None = None,
) -> AsyncGenerator[None]:
    """A member while the context is open, if the settings name a pool manager; it says farewell at the end."""
    access = settings.managers
    if not access.pool_manager:
        yield
        return

    async def introduced() -> Registration:
        return replace(await introduce(settings.advertised(app.port)), metrics=settings.metrics_address)

    async with TaskScope("registrar") as scope:
        registrar = Registrar(
            service,
            introduced,
            app.drain,
            lambda address: PoolManagerStub(address, tls),
            access,
            scope,
            windows,
            set_stages,
            set_limits,
        )
        telemetry.metrics.watch(
            lambda: (
                gauge("triptych_pool_registrations", "Pool managers that know this process", registrar.registered),
            )
        )
        registrar.start()
        try:
            yield
        finally:
            await registrar.leave()
