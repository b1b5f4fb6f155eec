"""The process of an encoder: engine, service, gRPC."""

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from triptych.engine.families.here import process_here
from triptych.rpc import instance
from triptych.rpc.app import RpcApp
from triptych.rpc.encoder import SERVICE_NAME, EncoderServicer
from triptych.rpc.identity import InstanceIdentity, checkpoint_of
from triptych.rpc.instance import InstanceServicer
from triptych.rpc.registered import instance_registered
from triptych.runtime.telemetry import Telemetry
from triptych.runtime.world import real_world

from .build import build
from .engines import loaded
from .gauges import watch
from .record import EncoderRecord
from .service import EncoderService
from .settings import EncoderSettings


@asynccontextmanager
async def app(
    settings: EncoderSettings, telemetry: Telemetry | None = None
) -> AsyncGenerator[RpcApp[EncoderService[Any]]]:
    """Load the engine, register the arena, listen. Raises CannotStart, and Unavailable if the port is in use."""
    identity = InstanceIdentity.new("encoder", settings, telemetry)
    metrics = identity.telemetry.metrics
    async with AsyncExitStack() as stack:
        world = await stack.enter_async_context(real_world("encoder", identity.instance_id, identity.epoch))
        compute = world.threads(1, name="encoder-compute")
        checkpoint = await compute.run(checkpoint_of, settings, process_here)
        settings, engine = await stack.enter_async_context(loaded(settings, world, checkpoint, compute=compute))
        record = EncoderRecord(metrics)
        data_plane = identity.data_plane(settings, world.scope, record.transport_reset)
        encoder = await stack.enter_async_context(build(settings, world, data_plane, engine, record=record))
        service = encoder.service
        watch(metrics, encoder)
        servicers = {
            SERVICE_NAME: EncoderServicer(service).register,
            instance.SERVICE_NAME: InstanceServicer(service).register,
        }
        server = await stack.enter_async_context(identity.server(settings, servicers))
        running = RpcApp(service, server, world.scope)
        registered = instance_registered(
            settings,
            service,
            running,
            telemetry=identity.telemetry,
            tls=identity.tls,
            set_limits=service.live_limits.set,
        )
        async with registered:
            yield running
