"""The process of an instance of any role but E: engines, services over one checkpoint, gRPC on one port."""

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager

from triptych.domain.stage import Stage
from triptych.engine.families.here import process_here
from triptych.rpc import encoder as encoder_rpc
from triptych.rpc import instance as instance_rpc
from triptych.rpc.app import RpcApp
from triptych.rpc.encoder import EncoderServicer
from triptych.rpc.identity import InstanceIdentity, checkpoint_of
from triptych.rpc.instance import InstanceServicer
from triptych.rpc.registered import instance_registered
from triptych.rpc.server import RpcServer
from triptych.runtime.tasks import TaskScope
from triptych.runtime.telemetry import Telemetry
from triptych.runtime.world import real_world

from .build import Instance, build
from .engines import engine_threads, loaded
from .gauges import watch
from .hybrid import HybridInstance
from .record import NO_SWITCH_RECORD, MeteredSwitches, TextRecord
from .service import TextService
from .servicer import SERVICE_NAME, TextServicer
from .settings import TextSettings


class InstanceApp(RpcApp[TextService | HybridInstance]):
    """A running instance. Its parts drain together; when either fails, the process ends."""

    def __init__(self, instance: Instance, server: RpcServer, scope: TaskScope) -> None:
        super().__init__(instance.service, server, scope)
        self.instance = instance


@asynccontextmanager
async def app(settings: TextSettings, telemetry: Telemetry | None = None) -> AsyncGenerator[InstanceApp]:
    """Load what the widest role needs from one checkpoint, register the arenas, listen. Raises CannotStart, and Unavailable if the
    port is in use.
    """
    identity = InstanceIdentity.new("text", settings, telemetry)
    metrics = identity.telemetry.metrics
    async with AsyncExitStack() as stack:
        world = await stack.enter_async_context(real_world("text", identity.instance_id, identity.epoch))
        threads = engine_threads(settings, world)
        checkpoint = await threads.text.run(checkpoint_of, settings, process_here)
        encoder = None
        if settings.widest.serves(Stage.ENCODE):
            from . import encoder_part  # imports the encoder service, which other roles do without

            encoder = await stack.enter_async_context(
                encoder_part.loaded_part(settings, world, checkpoint, threads, metrics)
            )
        can_unload = encoder is not None and encoder.offloading is not None
        text = await stack.enter_async_context(loaded(settings, checkpoint, thread=threads.text, can_unload=can_unload))
        if encoder is not None:
            encoder = await encoder_part.beside(encoder, settings, text.engine, threads)
        record = TextRecord(metrics, text.engine.model, counts_tokens=text.metrics is None)
        instance = await stack.enter_async_context(
            build(
                settings,
                world,
                identity.data_plane(settings, world.scope, record.transport_reset),
                text,
                encoder,
                record=record,
                switch_record=NO_SWITCH_RECORD if settings.switchable is None else MeteredSwitches(metrics),
            )
        )
        watch(metrics, instance, text, world.clock)
        if encoder is not None and instance.encoder is not None:
            encoder.watch(metrics, instance.encoder)
        servicers = {
            SERVICE_NAME: TextServicer(instance.service).register,
            instance_rpc.SERVICE_NAME: InstanceServicer(instance.service).register,
        }
        if instance.encoder is not None or instance.store is not None:  # others read from its arena
            servicers[encoder_rpc.SERVICE_NAME] = EncoderServicer(instance.service).register
        server = await stack.enter_async_context(identity.server(settings, servicers))
        running = InstanceApp(instance, server, world.scope)
        await stack.enter_async_context(
            instance_registered(
                settings,
                instance.service,
                running,
                telemetry=identity.telemetry,
                tls=identity.tls,
                set_stages=None if instance.switching is None else instance.switching.set_stages,
                set_limits=instance.service.live_limits.set,
            )
        )
        yield running
