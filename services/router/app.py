"""The process of a router: the model's tokenizer and template, stubs of instances and managers, gRPC."""

import logging
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager

from triptych.domain.membership import MemberKind
from triptych.domain.pool import Registration
from triptych.families.model_files import BadModel, ModelFiles
from triptych.ports import Membership, Offload
from triptych.rpc.app import RpcApp, server_of
from triptych.rpc.registered import registered
from triptych.rpc.stubs import InstanceStub, PoolManagerStub
from triptych.runtime.admin import Query
from triptych.runtime.host import instance_name, new_epoch
from triptych.runtime.hub import model_directory, served_name
from triptych.runtime.metrics import Metrics
from triptych.runtime.process import CannotStart, known_profiles, tls_identity
from triptych.runtime.telemetry import Telemetry
from triptych.runtime.tls import TlsIdentity
from triptych.runtime.world import World, real_world
from triptych.tokens.grammar import Grammars
from triptych.tokens.prompt import PromptBuilder
from triptych.wire.documents import recent_document

from .build import build, managed_membership
from .gauges import watch
from .membership import FileMembership, FixedMembership, read_members
from .prepare import ModelPrepare
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
        world = await stack.enter_async_context(real_world("router", instance_id, epoch))
        reading = world.threads(1, name="router-files")
        prompts = await reading.run(_prompts, settings)
        service = build(
            settings,
            world,
            membership=await _membership(settings, world, reading, model, tls, telemetry.metrics),
            connect=lambda address: InstanceStub(address, tls),
            prepare=ModelPrepare(
                prompts,
                settings.media,
                await reading.run(Grammars, prompts.tokenizer),
                settings.reasoning,
                settings.tool_syntax,
            ),
            profiles=await reading.run(known_profiles, settings.profiles),
            record=RouterRecord(telemetry.metrics),
        )
        stack.callback(service.close)
        watch(telemetry.metrics, service)

        async def requests(query: Query) -> object:
            position = query.get("after", "")
            recent = service.recent_chats(int(position) if position.isdecimal() else None)
            return {"epoch": epoch, **recent_document(recent)}

        telemetry.show("/requests", requests)
        register = RouterServicer(service).register
        server = await stack.enter_async_context(
            server_of(settings, (SERVICE_NAME,), register, telemetry=telemetry, tls=tls)
        )
        running = RpcApp(service, server, world.scope)
        async with registered(
            settings, service, introduce, running, telemetry=telemetry, tls=tls, windows=service.attainment
        ):
            yield running


async def _membership(
    settings: RouterSettings, world: World, reading: Offload, model: str, tls: TlsIdentity | None, metrics: Metrics
) -> Membership:
    """An invalid file is an error at startup; later the last valid snapshot is kept."""
    if settings.managers.pool_manager:
        managed = managed_membership(settings, world, model, lambda address: PoolManagerStub(address, tls))
        metrics.watch(managed.metrics)
        return managed
    path = settings.instances_file
    if path is None:
        if not settings.instances:
            logger.warning("no instance can join: give --pool-manager, --instances or --instances-file")
        return FixedMembership(settings.instances)
    try:
        await reading.run(read_members, path)
    except ValueError as error:
        raise CannotStart(f"--instances-file: {error}") from None
    return FileMembership(path, poll_s=settings.instances_poll_s, offload=reading)


def _prompts(settings: RouterSettings) -> PromptBuilder:
    try:
        return PromptBuilder.load(ModelFiles.load(model_directory(settings.model, weights=False)))
    except BadModel as error:
        raise CannotStart(str(error)) from None
