"""Builds an instance of any role but E from its settings: a text part, an encoder part where it encodes, and one port for both."""

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from triptych.domain.stage import Stage
from triptych.engine.checkpoint import open_checkpoint
from triptych.families.model_files import BadModel
from triptych.machine.stage_states import StageStates
from triptych.rpc import encoder as encoder_rpc
from triptych.rpc import instance as instance_rpc
from triptych.rpc.app import RpcApp
from triptych.rpc.encoder import EncoderServicer
from triptych.rpc.identity import InstanceIdentity
from triptych.rpc.instance import InstanceServicer
from triptych.rpc.registered import instance_registered
from triptych.rpc.server import RpcServer
from triptych.runtime.clock import monotonic
from triptych.runtime.hub import model_directory
from triptych.runtime.process import CannotStart
from triptych.runtime.registrar import SetStages
from triptych.runtime.telemetry import Telemetry

from .engines import engine_threads
from .gauges import watch_stages
from .hybrid import HybridInstance
from .record import MeteredSwitches
from .service import TextService
from .servicer import SERVICE_NAME, TextServicer
from .settings import TextSettings
from .switching import Switching, SwitchingService
from .text_part import TextPart, open_text

if TYPE_CHECKING:
    from .encoder_part import EncoderPart


class InstanceApp(RpcApp[TextService | HybridInstance]):
    """A running instance. Its parts drain together; when either fails, the process ends."""

    def __init__(
        self,
        service: TextService | HybridInstance,
        server: RpcServer,
        text: TextPart,
        encoder: "EncoderPart | None",
        set_stages: SetStages | None,
    ) -> None:
        """``service``: over all stages. ``set_stages``: switches it, if it can."""
        super().__init__(service, server, text.scope, *(() if encoder is None else (encoder.scope,)))
        self.text = text.service
        self.encoder = encoder
        self.set_stages = set_stages


@asynccontextmanager
async def app(settings: TextSettings, telemetry: Telemetry | None = None) -> AsyncGenerator[InstanceApp]:
    """Load what the widest role needs from one checkpoint, register the arenas, listen. Raises CannotStart, and Unavailable if the
    port is in use.
    """
    identity = InstanceIdentity.new("text", settings, telemetry)
    open_encoder = None
    if settings.widest.serves(Stage.ENCODE):
        from . import encoder_part  # imports the encoder service, which other roles do without

        own_settings = encoder_part.settings_of_encoder(settings)
        open_encoder = partial(encoder_part.open_encoder, settings, own_settings, identity)
    states = None if settings.switchable is None else StageStates(settings.role, settings.switchable)
    async with AsyncExitStack() as stack:
        threads = engine_threads(settings, stack)
        try:
            checkpoint = await threads.text.run(lambda: open_checkpoint(model_directory(settings.model)))
        except BadModel as error:
            raise CannotStart(str(error)) from None
        encoder = None
        if open_encoder is not None:
            encoder = await stack.enter_async_context(open_encoder(checkpoint, threads=threads, states=states))
        text = await stack.enter_async_context(
            open_text(settings, identity, checkpoint, thread=threads.text, states=states, encoder=encoder)
        )
        service: TextService | HybridInstance = text.service
        if encoder is not None:
            await encoder.complete(text.service, text.engine)
            service = HybridInstance(text.service, encoder.service, settings)
        servicers = {
            SERVICE_NAME: TextServicer(service).register,
            instance_rpc.SERVICE_NAME: InstanceServicer(service).register,
        }
        if encoder is not None or text.own_store is not None:  # others read from its arena
            servicers[encoder_rpc.SERVICE_NAME] = EncoderServicer(service).register
        server = await stack.enter_async_context(identity.server(settings, servicers))
        set_stages = None if states is None else _switching(states, identity, text, encoder)
        running = InstanceApp(service, server, text, encoder, set_stages)
        await stack.enter_async_context(
            instance_registered(
                settings, service, running, telemetry=identity.telemetry, tls=identity.tls, set_stages=set_stages
            )
        )
        yield running


def _switching(
    states: StageStates, identity: InstanceIdentity, text: TextPart, encoder: "EncoderPart | None"
) -> SetStages:
    """What switches the instance."""
    metrics = identity.telemetry.metrics
    watch_stages(metrics, states, monotonic)
    services: list[SwitchingService] = [text.service]
    offloading = None
    if encoder is not None:
        services.append(encoder.service)
        offloading = encoder.offloading
    switching = Switching(states, services, clock=monotonic, record=MeteredSwitches(metrics), offloading=offloading)
    return switching.set_stages
