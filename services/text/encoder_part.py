"""The encoder of an instance whose role includes encode: the encoder service, beside the text service, over one checkpoint.

This is the one place where the text service imports another ([ADR
14](../../docs/adr/0014-instances-that-encode-as-well.md)), and where another service's settings are read: the
encoder's, from ``mount_encoder``. It is imported only for these roles.
"""

import logging
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from triptych.domain.stage import ModelPart
from triptych.engine.checkpoint import DTYPES, Checkpoint
from triptych.machine.stage_states import StageStates
from triptych.policy.batching import MEASURED_SHARE
from triptych.policy.iteration import ImageBudget
from triptych.ports import Offload, TextEngine
from triptych.runtime.metrics import Metrics
from triptych.runtime.process import CannotStart
from triptych.runtime.world import World
from triptych.transport.data_plane import DataPlane

from ..encoder import build as encoders  # noqa: TID252 - in the wheel the services lie within triptych
from ..encoder.build import BuiltEncoder as BuiltEncoder  # noqa: PLC0414, TID252
from ..encoder.engines import loaded as loaded_encoder  # noqa: TID252
from ..encoder.gauges import watch  # noqa: TID252
from ..encoder.record import NO_RECORD, EncoderRecord, Record  # noqa: TID252
from ..encoder.service import LoadedEncoder  # noqa: TID252
from ..encoder.settings import EncoderSettings  # noqa: TID252
from .engines import EngineThreads
from .settings import TextSettings
from .weight_offloading import Unloadable, WeightOffloading, checked_weights

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EncoderPart:
    """The encoder of an instance of other stages, loaded."""

    settings: EncoderSettings
    loaded: LoadedEncoder[Any]
    budget: ImageBudget | None = None
    """Of a turn in the text engine's thread; None for only the encoder's own limits."""
    offloading: WeightOffloading | None = None
    """Of an instance that has only those weights in memory that its open stages need."""
    record: Record = NO_RECORD

    def in_turns(self, text_thread: Offload) -> bool:
        """Whether it computes in the text engine's thread, in turns with it; else in its own, at the same time."""
        return self.loaded.compute is text_thread

    def build(
        self, world: World, data_plane: DataPlane, states: StageStates | None, text_thread: Offload
    ) -> AbstractAsyncContextManager[BuiltEncoder]:
        """The encoder, started."""
        return encoders.build(
            self.settings,
            world,
            data_plane,
            self.loaded,
            record=self.record,
            states=states,
            runs_batches=not self.in_turns(text_thread),
        )

    def watch(self, metrics: Metrics, built: BuiltEncoder) -> None:
        """Read it at every scrape."""
        watch(metrics, built)
        if self.offloading is not None:
            metrics.watch(self.offloading.metrics)


@asynccontextmanager
async def loaded_part(
    settings: TextSettings, world: World, checkpoint: Checkpoint, threads: EngineThreads, metrics: Metrics
) -> AsyncGenerator[EncoderPart]:
    """The encoder, loaded. Its weights have left the memory if they can: the decoder may need it. Raises CannotStart."""
    own_settings = settings_of_encoder(settings)
    offloading = None
    if settings.switchable is not None and await threads.text.run(_unloads, settings, own_settings, checkpoint):
        offloading = WeightOffloading(thread=world.threads(1, name="weights"), clock=world.clock)
    async with AsyncExitStack() as stack:
        own_settings, loaded = await stack.enter_async_context(
            loaded_encoder(own_settings, world, checkpoint, compute=threads.encoder, can_unload=offloading is not None)
        )
        if offloading is not None:
            vision = checked_weights(loaded.engine.weights)
            offloading.add(ModelPart.ENCODER, Unloadable(vision))
            await threads.encoder.run(vision.unload)
        yield EncoderPart(own_settings, loaded, offloading=offloading, record=EncoderRecord(metrics))


async def beside(part: EncoderPart, settings: TextSettings, engine: TextEngine, threads: EngineThreads) -> EncoderPart:
    """The part, as it computes beside the loaded text engine. Raises CannotStart."""
    if threads.shared is None:
        return replace(part, budget=await threads.text.run(_image_budget, part, settings, engine))
    from triptych.engine.decoder.text_engine import TransformersTextEngine
    from triptych.engine.encoder import TransformersEncoderEngine

    for computing in (part.loaded.engine, engine):
        if isinstance(computing, TransformersEncoderEngine | TransformersTextEngine):
            threads.shared.adjust_between_layers(computing.module)
    return part


def settings_of_encoder(settings: TextSettings) -> EncoderSettings:
    """The settings in ``mount_encoder``. Raises CannotStart."""
    try:
        return EncoderSettings.mounted(settings.mount_encoder, settings)
    except ValueError as error:
        raise CannotStart(f"--mount-encoder: {error}") from None


def _image_budget(part: EncoderPart, settings: TextSettings, text: TextEngine) -> ImageBudget | None:
    """Of a turn, measured with these engines; None for only the encoder's own limits. Runs in their thread."""
    vision, tpot_slo_s = part.loaded.engine, settings.engine_options.tpot_slo_s
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
        vision,
        decode_s=text.full_decode_s(),
        tpot_slo_s=MEASURED_SHARE * tpot_slo_s,
        most_items=part.settings.batches.max_batch_items,
    )
    if iteration_s > tpot_slo_s:
        logger.warning(
            "decodes beside one encoded item take %.3g s, the objective is %.3g s: it is missed while items are encoded",
            iteration_s,
            tpot_slo_s,
        )
    logger.info("the encoder computes up to %d tokens between two decode steps", budget.tokens)
    return budget


def _unloads(settings: TextSettings, encoder: EncoderSettings, checkpoint: Checkpoint) -> bool:
    """Whether only those weights stay in memory that the open stages need."""
    if settings.resident != "auto" or settings.delay_profile is not None:
        return settings.resident == "role"
    from triptych.engine.device_memory import free_nbytes

    taken = settings.engine.kv_cache_bytes + settings.image_cache_bytes + encoder.arena_bytes
    weights = checkpoint.weights_nbytes(DTYPES[settings.compute.dtype])
    needed, free = weights + taken, free_nbytes(settings.compute)
    fits = free is None or needed <= free
    logger.info("all weights %s: %d bytes are needed, %s are free", "stay" if fits else "do not fit", needed, free)
    return not fits
