"""The encoder engine of the settings: one that computes, vLLM, or one that sleeps.

Engines that compute are imported when they are loaded: torch and transformers take seconds, and engines that delay need neither. So is
what decodes media, which simulations do without.
"""

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from triptych.domain.profile import BadProfile, ProfileIdentity
from triptych.domain.stage import ModelPart
from triptych.engine.checkpoint import DTYPES, Checkpoint
from triptych.engine.delay import DelayEncoderEngine, delay_costs
from triptych.engine.first_pass import encode_first
from triptych.families.base import Family
from triptych.families.model_files import BadModel
from triptych.machine.encoder.batch_queue import BatchLimits
from triptych.ports import EncoderEngine, Offload
from triptych.runtime.cores import nodes, pinning, spread, usable_cores
from triptych.runtime.hub import served_name
from triptych.runtime.process import CannotStart
from triptych.runtime.world import World

from .embedding_files import EmbeddingFiles
from .service import LoadedEncoder
from .settings import EncoderSettings

if TYPE_CHECKING:
    from triptych.engine.media.item import Decoding

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Engine:
    """An engine, and what it runs: one that sleeps runs what its profile is of."""

    engine: EncoderEngine[Any]
    family: Family
    identity: ProfileIdentity
    close: Callable[[], None] | None = None
    """Ends what the engine has started, in the thread that loaded it."""
    prepare_cores: int | None = None
    """Items that it preprocesses at the same time; None: one by each thread."""


@asynccontextmanager
async def loaded(
    settings: EncoderSettings, world: World, checkpoint: Checkpoint, *, compute: Offload, can_unload: bool = False
) -> AsyncGenerator[tuple[EncoderSettings, LoadedEncoder[Any]]]:
    """The engine, loaded and tried out in ``compute``, and the settings with the limits of a batch that were measured.

    ``can_unload``: its weights can leave the memory. Raises CannotStart.
    """
    from triptych.engine.media.decoders import DecoderProcesses

    async with AsyncExitStack() as stack:
        cores = usable_cores()
        threads = settings.prepare_threads or max(2, len(cores))
        prepare = world.threads(threads, name="encoder-prepare", starting=pinning(spread(threads, nodes(cores))))
        decoders = DecoderProcesses(settings.decoding)
        stack.callback(decoders.close)
        found = await compute.run(partial(_load, settings, checkpoint, decoders, can_unload=can_unload))
        if found.close is not None:
            stack.push_async_callback(compute.run, found.close)
        if settings.delay_profile is None:
            await prepare.run(decoders.start)
        try:
            await encode_first(found.engine, found.family, prepare=prepare, compute=compute)
        except BadModel as error:
            raise CannotStart(f"engine {settings.engine.engine}: {error}") from error
        batches = await compute.run(_batches, settings, found.engine)
        files = await prepare.run(_files, settings)
        yield (
            settings.model_copy(update={"batches": batches}),
            LoadedEncoder(found.engine, found.identity, compute, prepare, threads, files, found.prepare_cores),
        )


def _files(settings: EncoderSettings) -> EmbeddingFiles | None:
    """Raises CannotStart."""
    directory = settings.embedding_files
    try:
        return None if directory is None else EmbeddingFiles(directory, settings.embedding_files_bytes)
    except OSError as error:
        raise CannotStart(f"embedding_files {directory}: {error.strerror}") from None
    except ValueError as error:
        raise CannotStart(f"embedding_files {directory}: {error}") from None


def _load(settings: EncoderSettings, checkpoint: Checkpoint, decoding: "Decoding", *, can_unload: bool) -> _Engine:
    """Runs in the thread that encodes. Raises CannotStart."""
    try:
        model_id = settings.model_id or served_name(settings.model)
        if settings.delay_profile is not None:
            info = checkpoint.model_info(model_id=model_id, dtype=DTYPES[settings.compute.dtype])
            costs = delay_costs(settings.delay_profile, ModelPart.ENCODER, settings.tensor_parallel)
            delays = DelayEncoderEngine(info, checkpoint.family, costs)
            return _Engine(delays, checkpoint.family, costs.profile.identity)
        if settings.engine.engine == "vllm":
            return _load_vllm(settings, checkpoint, model_id, decoding)
        from triptych.engine.encoder import TransformersEncoderEngine
        from triptych.engine.part_identity import part_identity

        engine = TransformersEncoderEngine(
            checkpoint,
            model_id=model_id,
            compute=settings.compute,
            decoding=decoding,
            loras=settings.lora_limits,
            can_unload=can_unload,
        )
        identity = part_identity(checkpoint, ModelPart.ENCODER, settings.compute)
        return _Engine(engine, checkpoint.family, identity)
    except (BadModel, BadProfile) as error:
        raise CannotStart(str(error)) from None


def _batches(settings: EncoderSettings, engine: EncoderEngine[Any]) -> BatchLimits:
    """Runs in the thread that encodes. The limits of one pass, measured where that is left to the encoder."""
    limits = settings.batches
    if limits.max_batch_tokens is not None or settings.compute.device != "cpu" or settings.delay_profile is not None:
        return limits
    from triptych.engine.encoder import TransformersEncoderEngine
    from triptych.engine.image_budget import tokens_worth_batching

    if not isinstance(engine, TransformersEncoderEngine):
        return limits
    tokens = tokens_worth_batching(engine, most_items=limits.max_batch_items)
    logger.info("a pass encodes up to %d tokens: more are not encoded faster", tokens)
    return replace(limits, max_batch_tokens=tokens)


def _load_vllm(settings: EncoderSettings, checkpoint: Checkpoint, model_id: str, decoding: "Decoding") -> _Engine:
    from triptych.integrations.vllm.release import check_release

    check_release()
    from triptych.integrations.vllm.encoder import VllmEncoderEngine

    engine = VllmEncoderEngine(
        checkpoint,
        settings.engine.vllm_args,
        model_id=model_id,
        compute=settings.compute,
        decoding=decoding,
    )
    return _Engine(engine, checkpoint.family, engine.identity, engine.close, engine.prepare_cores)
