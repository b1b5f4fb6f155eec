"""Wires up the router: stubs, threads, and the model's tokenizer and template."""

import logging
import random
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from triptych.domain.membership import MemberKind
from triptych.domain.pool import Registration
from triptych.families.model_files import BadModel, ModelFiles
from triptych.ports import Membership, Offload
from triptych.rpc.app import RpcApp, server_of
from triptych.rpc.registered import registered
from triptych.rpc.stubs import InstanceStub, PoolManagerStub
from triptych.runtime.clock import monotonic
from triptych.runtime.host import instance_name, new_epoch
from triptych.runtime.hub import model_directory, served_name
from triptych.runtime.managed_membership import ManagedMembership
from triptych.runtime.metrics import Metrics
from triptych.runtime.offload import ThreadOffload
from triptych.runtime.process import CannotStart, known_profiles, tls_identity
from triptych.runtime.tasks import TaskScope
from triptych.runtime.telemetry import Telemetry
from triptych.runtime.tls import TlsIdentity
from triptych.tokens.grammar import Grammars
from triptych.tokens.prompt import PromptBuilder

from .gauges import watch
from .membership import FileMembership, FixedMembership, read_members
from .prepare import ModelPrepare, SmallInline
from .record import RouterRecord
from .service import RouterService
from .servicer import SERVICE_NAME, RouterServicer
from .settings import RouterSettings

logger = logging.getLogger(__name__)


@asynccontextmanager
async def app(settings: RouterSettings, telemetry: Telemetry | None = None) -> AsyncGenerator[RpcApp[RouterService]]:
    """Load the model's tokenizer and template, connect to the instances, listen. Raises CannotStart."""
    telemetry = telemetry or Telemetry()
    tls = tls_identity(settings, telemetry)
    epoch = new_epoch()
    instance_id = settings.instance_id or instance_name("router", settings.port, epoch)
    model = settings.model_id or served_name(settings.model)

    async def introduce(address: str) -> Registration:
        return Registration(MemberKind.ROUTER, instance_id, epoch, address, model, slo=settings.slo)

    async with AsyncExitStack() as stack:
        offload = ThreadOffload(settings.prepare_threads, name="router-prepare")
        stack.callback(offload.close)
        prepare = await offload.run(partial(_prepare, settings))
        profiles = await offload.run(known_profiles, settings.profiles)
        scope = await stack.enter_async_context(TaskScope("router"))
        service = RouterService(
            await _membership(settings, offload, instance_id, model, tls, telemetry.metrics),
            lambda address: InstanceStub(address, tls),
            settings=settings,
            prepare=prepare,
            offload=SmallInline(offload, settings.prepare_inline_chars, settings.prepare_inline_media_bytes),
            clock=monotonic,
            scope=scope,
            rng=random.SystemRandom(),
            record=RouterRecord(telemetry.metrics),
            profiles=profiles,
        )
        watch(telemetry.metrics, service)
        service.start()
        stack.callback(service.close)
        register = RouterServicer(service).register
        server = await stack.enter_async_context(
            server_of(settings, (SERVICE_NAME,), register, telemetry=telemetry, tls=tls)
        )
        running = RpcApp(service, server, scope)
        async with registered(
            settings, service, introduce, running, telemetry=telemetry, tls=tls, windows=service.attainment
        ):
            yield running


async def _membership(
    settings: RouterSettings,
    offload: Offload,
    instance_id: str,
    model: str,
    tls: TlsIdentity | None,
    metrics: Metrics,
) -> Membership:
    """An invalid file is an error at startup; later the last valid snapshot is kept."""
    if settings.managers.pool_manager:
        managed = ManagedMembership(
            lambda address: PoolManagerStub(address, tls),
            settings.managers,
            settings.lost_members,
            clock=monotonic,
            name=instance_id,
            model=model,
            kinds=(MemberKind.INSTANCE,),
        )
        metrics.watch(managed.metrics)
        return managed
    path = settings.instances_file
    if path is None:
        if not settings.instances:
            logger.warning("no instance can join: give --pool-manager, --instances or --instances-file")
        return FixedMembership(settings.instances)
    try:
        await offload.run(read_members, path)
    except ValueError as error:
        raise CannotStart(f"--instances-file: {error}") from None
    return FileMembership(path, poll_s=settings.instances_poll_s, offload=offload)


def _prepare(settings: RouterSettings) -> ModelPrepare:
    try:
        builder = PromptBuilder.load(ModelFiles.load(model_directory(settings.model, weights=False)))
        return ModelPrepare(builder, settings.media, Grammars(builder.tokenizer))
    except BadModel as error:
        raise CannotStart(str(error)) from None
