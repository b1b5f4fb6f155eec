"""A text instance that also encodes (roles EP, ED, EPD): both services with one checkpoint, one engine thread and one port.

This is the one place where the text service imports another ([ADR
14](../../docs/adr/0014-instances-that-encode-as-well.md)), and where another service's settings are read: the
encoder's, from ``mount_encoder``. It is imported only for these roles.
"""

import asyncio
import logging
import shlex
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

from triptych.domain.embedding import LeaseId
from triptych.domain.instance import InstanceInfo
from triptych.engine.checkpoint import open_checkpoint
from triptych.families.model_files import BadModel
from triptych.policy.batching import MEASURED_SHARE
from triptych.policy.iteration import ImageBudget
from triptych.ports import Encoder, ObservedTextEngine
from triptych.rpc.app import RpcApp
from triptych.rpc.encoder import EncoderServicer
from triptych.rpc.registered import instance_registered
from triptych.runtime.host import instance_name, machine_name, new_epoch
from triptych.runtime.hub import model_directory
from triptych.runtime.offload import ThreadOffload
from triptych.runtime.process import CannotStart, tls_identity
from triptych.runtime.settings import InstanceSettings, SettingsError
from triptych.runtime.telemetry import Telemetry
from triptych.transport.memory import MemoryNetwork, MemoryTransport

from ..encoder import app as encoders  # noqa: TID252 - in the wheel the services lie within triptych
from ..encoder.settings import EncoderSettings  # noqa: TID252
from .app import MountedEncoder, opened, states_of, switches
from .hybrid import HybridInstance
from .service import TextService
from .settings import TextSettings

logger = logging.getLogger(__name__)


class TextWithEncoder:
    """Run by ``runtime.process``. Both services drain together. If either fails, the process ends."""

    def __init__(self, text: RpcApp[TextService], encoder: encoders.OpenEncoder) -> None:
        self.text = text
        self.encoder = encoder
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
    """Open the checkpoint once, load encoder and decoder from it, and serve both. Raises CannotStart."""
    telemetry = telemetry or Telemetry()
    encoder_settings = settings_of_encoder(settings)
    tls = tls_identity(settings, telemetry)
    epoch = new_epoch()
    instance_id = settings.instance_id or instance_name("text", settings.port, epoch)
    compute = ThreadOffload(1, name="engine")
    try:
        try:
            checkpoint = await compute.run(lambda: open_checkpoint(model_directory(settings.model)))
        except BadModel as error:
            raise CannotStart(str(error)) from None
        states = states_of(settings)
        opening = encoders.opened(
            encoder_settings,
            telemetry,
            model=checkpoint,
            compute=compute,
            instance_id=instance_id,
            epoch=epoch,
            tls=tls,
            states=states,
        )
        async with opening as encoder:
            encoder.service.start(runs_batches=False)
            beside = opened(
                settings,
                telemetry,
                model=checkpoint,
                engine_thread=compute,
                instance_id=instance_id,
                epoch=epoch,
                tls=tls,
                states=states,
                mounted=_mounted_encoder(encoder, settings, encoder_settings.batches.max_batch_items),
            )
            async with beside as text:
                both = TextWithEncoder(text, encoder)
                whole = HybridInstance(text.service, encoder.service, settings)
                set_stages = switches(states, telemetry.metrics, text.service, encoder.service)
                async with instance_registered(
                    settings, whole, both, telemetry=telemetry, tls=tls, set_stages=set_stages
                ):
                    yield both
    finally:
        compute.close()


def _mounted_encoder(encoder: encoders.OpenEncoder, settings: TextSettings, most_items: int) -> MountedEncoder:
    network = MemoryNetwork()
    store = encoder.store
    memory = MemoryTransport(network, store.arena, host=machine_name(), check=store.may_read)
    return MountedEncoder(
        encoder=OwnEncoder(encoder.service, memory),
        network=network,
        vision_encoder=encoder.service.batcher,
        image_budget=partial(_image_budget, encoder, settings.engine_options.tpot_slo_s, most_items),
        whole=lambda text: HybridInstance(text, encoder.service, settings),
        store=store,
        published=encoder.service.published,
        register=EncoderServicer(encoder.service).register,
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
