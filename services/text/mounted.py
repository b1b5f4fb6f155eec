"""A text instance that also encodes (roles EP, ED, EPD): both services with one checkpoint, one engine thread and one port.

This is the one place where the text service imports another ([ADR
14](../../docs/adr/0014-instances-that-encode-as-well.md)), and where another service's settings are read: the
encoder's, from ``mount_encoder``. It is imported only for these roles.
"""

import asyncio
import logging
import shlex
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from triptych.rpc.settings import InstanceSettings

from triptych.domain.embedding import LeaseId
from triptych.domain.instance import InstanceInfo
from triptych.domain.stage import ModelPart
from triptych.engine.checkpoint import Checkpoint, open_checkpoint
from triptych.errors import TriptychError
from triptych.families.model_files import BadModel
from triptych.policy.batching import MEASURED_SHARE
from triptych.policy.iteration import ImageBudget
from triptych.ports import (
    Encoder,
    ObservedTextEngine,
    Offload,
    UnloadableEngine,
    UnloadableTextEngine,
    UnloadableWeights,
)
from triptych.rpc.app import RpcApp
from triptych.rpc.encoder import EncoderServicer
from triptych.rpc.registered import instance_registered
from triptych.rpc.server import check_port
from triptych.runtime.clock import monotonic
from triptych.runtime.host import instance_name, machine_name, new_epoch
from triptych.runtime.hub import model_directory
from triptych.runtime.offload import ThreadOffload
from triptych.runtime.process import CannotStart, tls_identity
from triptych.runtime.registrar import SetStages
from triptych.runtime.settings import SettingsError
from triptych.runtime.telemetry import Telemetry
from triptych.transport.memory import MemoryNetwork, MemoryTransport

from ..encoder import app as encoders  # noqa: TID252 - in the wheel the services lie within triptych
from ..encoder.settings import EncoderSettings  # noqa: TID252
from .app import MountedEncoder, opened, states_of, switches
from .hybrid import HybridInstance
from .residence import Residence, Unloadable, parts_of
from .service import TextService
from .settings import TextSettings

if TYPE_CHECKING:
    from triptych.engine.shared_threads import SharedThreads

logger = logging.getLogger(__name__)


class TextWithEncoder:
    """Run by ``runtime.process``. Both services drain together. If either fails, the process ends."""

    def __init__(
        self, text: RpcApp[TextService], encoder: encoders.OpenEncoder, set_stages: SetStages | None = None
    ) -> None:
        self.text = text
        self.encoder = encoder
        self.set_stages = set_stages
        """Switches it, if it can."""
        self.port = text.port

    async def missing(self) -> tuple[str, ...]:
        """What either service lacks, without duplicates."""
        return tuple(dict.fromkeys((*await self.text.missing(), *await self.encoder.service.missing())))

    async def drain(self) -> None:
        """Drain both: running answers read embeddings from here, and encoded items may be for other instances."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.text.drain())
            group.create_task(self.encoder.service.drain())

    async def failed(self) -> str:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one.failed()) for one in (self.text, self.encoder.scope)]
            done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in pending:
                task.cancel()
        return done.pop().result()


class OwnEncoder:
    """This process's encoder as its own text service uses it: read from memory to memory only."""

    def __init__(self, encoder: Encoder, memory: MemoryTransport) -> None:
        self._encoder = encoder
        self._memory = memory

    async def describe(self) -> InstanceInfo:
        return replace(await self._encoder.describe(), offers=(self._memory.offer(),))

    async def release(self, lease_ids: Sequence[LeaseId]) -> None:
        await self._encoder.release(lease_ids)

    async def close(self) -> None:
        """The service owns the encoder."""


@asynccontextmanager
async def app(settings: TextSettings, telemetry: Telemetry | None = None) -> AsyncGenerator[TextWithEncoder]:
    """Open the checkpoint once, load encoder and decoder from it, and serve both. Raises CannotStart, and Unavailable if the port is in
    use.
    """
    check_port(settings.host, settings.port)
    telemetry = telemetry or Telemetry()
    encoder_settings = settings_of_encoder(settings)
    tls = tls_identity(settings, telemetry)
    epoch = new_epoch()
    instance_id = settings.instance_id or instance_name("text", settings.port, epoch)
    residence = None
    with ExitStack() as stack:
        compute, encode, shared = _engine_threads(settings, stack)
        try:
            checkpoint = await compute.run(lambda: open_checkpoint(model_directory(settings.model)))
        except BadModel as error:
            raise CannotStart(str(error)) from None
        states = states_of(settings)
        if states is not None and await compute.run(_unloads, settings, encoder_settings, checkpoint):
            stack.callback((weights := ThreadOffload(1, name="weights")).close)
            residence = Residence(thread=weights, clock=monotonic)
        opening = encoders.opened(
            encoder_settings,
            telemetry,
            model=checkpoint,
            compute=encode,
            instance_id=instance_id,
            epoch=epoch,
            tls=tls,
            states=states,
            unloads=residence is not None,
        )
        async with opening as encoder:
            encoder.service.start(runs_batches=shared is not None)
            if residence is not None:
                vision = _weights_of(encoder.engine)
                residence.add(ModelPart.ENCODER, Unloadable(vision))
                await encode.run(vision.unload)  # before the decoder is loaded, which may need its memory
            beside = opened(
                settings,
                telemetry,
                model=checkpoint,
                engine_thread=compute,
                instance_id=instance_id,
                epoch=epoch,
                tls=tls,
                states=states,
                mounted=_mounted_encoder(
                    encoder, settings, encoder_settings.batches.max_batch_items, residence, shared
                ),
                unloads=residence is not None,
            )
            async with beside as text:
                set_stages = switches(states, telemetry.metrics, text.service, encoder.service, residence=residence)
                both = TextWithEncoder(text, encoder, set_stages)
                whole = HybridInstance(text.service, encoder.service, settings)
                if residence is not None:
                    telemetry.metrics.watch(residence.metrics)
                    encoder.scope.spawn(residence.run(), name="residence", vital=True)
                async with instance_registered(
                    settings, whole, both, telemetry=telemetry, tls=tls, set_stages=set_stages
                ):
                    yield both


def _engine_threads(settings: TextSettings, stack: ExitStack) -> tuple[Offload, Offload, "SharedThreads | None"]:
    """Those of the text engine and of the encoder, and what divides torch's threads between the two; None if they compute in turns, in
    one thread: on a GPU, with one thread for both, or where items go first.
    """

    def engine(name: str) -> ThreadOffload:
        thread = ThreadOffload(1, name=name)
        stack.callback(thread.close)
        return thread

    compute = settings.compute
    at_once = compute.device == "cpu" and compute.torch_threads > 1 and not settings.encode_first
    if not at_once or settings.delay_profile is not None:
        return (one := engine("engine")), one, None
    from triptych.engine.shared_threads import BETWEEN_STEPS_S, SharedThreads, SharingOffload

    logger.info("encoder and text engine compute at the same time, in %d threads", compute.torch_threads)
    shared = SharedThreads(compute.torch_threads, clock=monotonic)
    text = SharingOffload(engine("text-engine"), shared, keeps_s=BETWEEN_STEPS_S)
    return text, SharingOffload(engine("encoder"), shared), shared


def _unloads(settings: TextSettings, encoder: EncoderSettings, checkpoint: Checkpoint) -> bool:
    """Whether only those weights stay in memory that the open stages need."""
    if settings.resident != "auto" or settings.delay_profile is not None:
        return settings.resident == "role"
    from triptych.engine.device_memory import free_nbytes, weights_nbytes

    taken = settings.engine.kv_cache_bytes + settings.image_cache_bytes + encoder.arena_bytes
    needed, free = weights_nbytes(checkpoint, settings.compute) + taken, free_nbytes(settings.compute)
    fits = free is None or needed <= free
    logger.info("all weights %s: %d bytes are needed, %s are free", "stay" if fits else "do not fit", needed, free)
    return not fits


def _weights_of(engine: object) -> UnloadableWeights:
    if not isinstance(engine, UnloadableEngine) or engine.weights is None:
        raise CannotStart("resident=role needs engines whose weights can be unloaded")
    return engine.weights


async def _complete(
    encoder: encoders.OpenEncoder,
    settings: TextSettings,
    residence: Residence | None,
    shared: "SharedThreads | None",
    service: TextService,
    engine: ObservedTextEngine,
) -> None:
    """Before the instance listens. Raises CannotStart."""
    if shared is not None:
        from triptych.engine.decoder.text_engine import TransformersTextEngine
        from triptych.engine.encoder import TransformersEncoderEngine

        for one in (encoder.engine, engine):
            if isinstance(one, TransformersEncoderEngine | TransformersTextEngine):
                shared.adjust_between_layers(one.module)
    if residence is not None:
        await _settle(residence, settings, service, engine)


async def _settle(
    residence: Residence, settings: TextSettings, service: TextService, engine: ObservedTextEngine
) -> None:
    """Add the decoder, and have in memory what the role needs."""
    between, weights = service.between_steps, _weights_of(engine)
    if not isinstance(engine, UnloadableTextEngine):
        raise CannotStart("resident=role needs a text engine whose weights can be unloaded")
    decoder = Unloadable(
        weights,
        before_unload=lambda: between(engine.before_unload),
        after_load=lambda: between(engine.after_load),
    )
    residence.add(ModelPart.DECODER, decoder)
    residence.need(parts_of(settings.role.stages))
    try:
        await residence.settle()
    except TriptychError as error:
        raise CannotStart(error.message) from None


def _mounted_encoder(
    encoder: encoders.OpenEncoder,
    settings: TextSettings,
    most_items: int,
    residence: Residence | None,
    shared: "SharedThreads | None",
) -> MountedEncoder:
    network = MemoryNetwork()
    store = encoder.store
    memory = MemoryTransport(network, store.arena, host=machine_name(), check=store.may_read)
    return MountedEncoder(
        encoder=OwnEncoder(encoder.service, memory),
        network=network,
        vision_encoder=encoder.service.batcher if shared is None else None,
        image_budget=partial(_image_budget, encoder, settings.engine_options.tpot_slo_s, most_items),
        whole=lambda text: HybridInstance(text, encoder.service, settings),
        store=store,
        published=encoder.service.published,
        register=EncoderServicer(encoder.service).register,
        before_listening=partial(_complete, encoder, settings, residence, shared),
    )


def settings_of_encoder(settings: TextSettings) -> EncoderSettings:
    """The settings in ``mount_encoder``, with those of the whole instance taken from ``settings``. Raises CannotStart.

    The encoder reads its environment and file as usual.
    """
    try:
        whole = settings.flat(InstanceSettings)
        loaded = EncoderSettings.load(shlex.split(settings.mount_encoder), below=whole)
    except (SettingsError, ValueError) as error:
        raise CannotStart(f"--mount-encoder: {error}") from None
    if loaded.engine.engine == "vllm":
        raise CannotStart("--mount-encoder: engine vllm is for encoders that are processes of their own")
    for name, value in loaded.flat(InstanceSettings).items():
        if value != whole[name]:
            raise CannotStart(f"--mount-encoder: {name} belongs to the whole instance; set it outside --mount-encoder")
    return loaded


def _image_budget(
    encoder: encoders.OpenEncoder, tpot_slo_s: float | None, most_items: int, text: ObservedTextEngine
) -> ImageBudget | None:
    """Runs in the engine's thread, before anything else."""
    vision = encoder.engine
    if tpot_slo_s is None:
        return None
    from triptych.engine.decoder.text_engine import TransformersTextEngine
    from triptych.engine.encoder import TransformersEncoderEngine
    from triptych.engine.image_budget import measured_image_budget

    if not isinstance(text, TransformersTextEngine) or not isinstance(vision, TransformersEncoderEngine):
        raise CannotStart("tpot_slo_s is measured: it needs engines that compute, without delay_profile")
    if vision.weights is not None:
        vision.weights.load()
    budget, iteration_s = measured_image_budget(
        vision, decode_s=text.full_decode_s(), tpot_slo_s=MEASURED_SHARE * tpot_slo_s, most_items=most_items
    )
    if iteration_s > tpot_slo_s:
        logger.warning(
            "decodes beside one encoded item take %.3g s, the objective is %.3g s: it is missed while items are encoded",
            iteration_s,
            tpot_slo_s,
        )
    logger.info("the encoder computes up to %d tokens between two decode steps", budget.tokens)
    return budget
