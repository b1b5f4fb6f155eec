"""The encoder of an instance whose role includes encode: the encoder service, beside the text service, over one checkpoint.

This is the one place where the text service imports another ([ADR
14](../../docs/adr/0014-instances-that-encode-as-well.md)), and where another service's settings are read: the
encoder's, from ``mount_encoder``. It is imported only for these roles.
"""

import logging
import shlex
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from triptych.domain.embedding import LeaseId
from triptych.domain.instance import InstanceInfo
from triptych.domain.stage import ModelPart
from triptych.engine.checkpoint import Checkpoint
from triptych.errors import TriptychError
from triptych.machine.stage_states import StageStates
from triptych.policy.batching import MEASURED_SHARE
from triptych.policy.iteration import ImageBudget
from triptych.ports import Encoder, TextEngine, UnloadableWeights
from triptych.rpc.identity import InstanceIdentity
from triptych.rpc.settings import InstanceSettings
from triptych.runtime.clock import monotonic
from triptych.runtime.host import machine_name
from triptych.runtime.offload import ThreadOffload
from triptych.runtime.process import CannotStart
from triptych.runtime.settings import SettingsError
from triptych.transport.memory import MemoryNetwork, MemoryTransport

from ..encoder import app as encoders  # noqa: TID252 - in the wheel the services lie within triptych
from ..encoder.settings import EncoderSettings  # noqa: TID252
from .device_scheduler import VisionEncoder
from .engines import EngineThreads
from .service import TextService
from .settings import TextSettings
from .weight_offloading import Unloadable, WeightOffloading, parts_of

if TYPE_CHECKING:
    from triptych.engine.shared_threads import SharedThreads

logger = logging.getLogger(__name__)


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


class EncoderPart:
    """The encoder in this process, as the other part of the instance uses it."""

    def __init__(
        self,
        opened: encoders.OpenEncoder,
        settings: TextSettings,
        *,
        most_items: int,
        shared: "SharedThreads | None",
        offloading: WeightOffloading | None,
    ) -> None:
        """``most_items``: of a batch. ``shared``: divides torch's threads, where both engines compute at the same time. ``offloading``:
        of an instance that has only those weights in memory that its open stages need.
        """
        self.service = opened.service
        self.store = opened.store
        """Its arena, which also holds keys and values."""
        self.scope = opened.scope
        self.network = MemoryNetwork()
        """Of both memory transports."""
        memory = MemoryTransport(self.network, opened.store.arena, host=machine_name(), check=opened.store.may_read)
        self.own = OwnEncoder(opened.service, memory)
        self.offloading = offloading
        self._engine = opened.engine
        self._settings = settings
        self._most_items = most_items
        self._shared = shared

    @property
    def vision_encoder(self) -> VisionEncoder | None:
        """Computes in the text engine's thread, in turns with it; None if it computes in its own, at the same time."""
        return self.service.batcher if self._shared is None else None

    def image_budget(self, text: TextEngine) -> ImageBudget | None:
        """Of a turn, measured with this engine; None for only the encoder's own limits. Runs in the engine's thread, before anything
        else.
        """
        tpot_slo_s = self._settings.engine_options.tpot_slo_s
        if tpot_slo_s is None:
            return None
        from triptych.engine.decoder.text_engine import TransformersTextEngine
        from triptych.engine.encoder import TransformersEncoderEngine
        from triptych.engine.image_budget import measured_image_budget

        vision = self._engine
        if not isinstance(text, TransformersTextEngine) or not isinstance(vision, TransformersEncoderEngine):
            raise CannotStart("tpot_slo_s is measured: it needs engines that compute, without delay_profile")
        if vision.weights is not None:
            vision.weights.load()
        budget, iteration_s = measured_image_budget(
            vision,
            decode_s=text.full_decode_s(),
            tpot_slo_s=MEASURED_SHARE * tpot_slo_s,
            most_items=self._most_items,
        )
        if iteration_s > tpot_slo_s:
            logger.warning(
                "decodes beside one encoded item take %.3g s, the objective is %.3g s: it is missed while items are encoded",
                iteration_s,
                tpot_slo_s,
            )
        logger.info("the encoder computes up to %d tokens between two decode steps", budget.tokens)
        return budget

    async def complete(self, text: TextService, engine: TextEngine) -> None:
        """Before the instance listens, with its text part. Raises CannotStart."""
        if self._shared is not None:
            from triptych.engine.decoder.text_engine import TransformersTextEngine
            from triptych.engine.encoder import TransformersEncoderEngine

            for computing in (self._engine, engine):
                if isinstance(computing, TransformersEncoderEngine | TransformersTextEngine):
                    self._shared.adjust_between_layers(computing.module)
        if self.offloading is not None:
            await self._settle(self.offloading, text, engine)

    async def _settle(self, offloading: WeightOffloading, text: TextService, engine: TextEngine) -> None:
        """Add the decoder, and have in memory what the role needs, from now on."""
        offloading.add(ModelPart.DECODER, Unloadable(_checked(engine.weights), call=text.between_steps))
        offloading.need(parts_of(self._settings.role.stages))
        try:
            await offloading.settle()
        except TriptychError as error:
            raise CannotStart(error.message) from None
        self.scope.spawn(offloading.run(), name="weight-offloading", vital=True)


@asynccontextmanager
async def open_encoder(
    settings: TextSettings,
    own_settings: EncoderSettings,
    identity: InstanceIdentity,
    checkpoint: Checkpoint,
    *,
    threads: EngineThreads,
    states: StageStates | None,
) -> AsyncGenerator[EncoderPart]:
    """Load the encoder and start its service. ``own_settings``: the encoder's. ``states``: of an instance that switches. Raises
    CannotStart.
    """
    offloading = None
    async with AsyncExitStack() as stack:
        if states is not None and await threads.text.run(_unloads, settings, own_settings, checkpoint):
            stack.callback((weights := ThreadOffload(1, name="weights")).close)
            offloading = WeightOffloading(thread=weights, clock=monotonic)
            identity.telemetry.metrics.watch(offloading.metrics)
        opened = await stack.enter_async_context(
            encoders.opened(
                own_settings,
                identity,
                checkpoint,
                compute=threads.encoder,
                states=states,
                unloads=offloading is not None,
            )
        )
        opened.service.start(runs_batches=threads.shared is not None)
        if offloading is not None:
            vision = _checked(opened.engine.weights)
            offloading.add(ModelPart.ENCODER, Unloadable(vision))
            await threads.encoder.run(vision.unload)  # before the decoder is loaded, which may need its memory
        most_items = own_settings.batches.max_batch_items
        yield EncoderPart(opened, settings, most_items=most_items, shared=threads.shared, offloading=offloading)


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


def _checked(weights: UnloadableWeights | None) -> UnloadableWeights:
    if weights is None:
        raise CannotStart("resident=role needs engines whose weights can be unloaded")
    return weights
