"""The text engine of the settings (one that computes, vLLM, or one that sleeps), and the threads in which engines compute.

Engines that compute are imported when they are loaded: torch and transformers take seconds, and engines that delay need neither.
"""

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from triptych.domain.instance import ServedPart
from triptych.domain.profile import BadProfile, ProfileIdentity
from triptych.domain.stage import ModelPart, Stage
from triptych.engine.checkpoint import DTYPES, Checkpoint
from triptych.engine.delay import DelayTextEngine, delay_costs
from triptych.engine.first_pass import answer_first
from triptych.families.model_files import BadModel
from triptych.ports import Offload, TextEngine
from triptych.runtime.hub import served_name
from triptych.runtime.metrics import Read
from triptych.runtime.process import CannotStart
from triptych.runtime.world import World
from triptych.tokens.detokenize import IncrementalDetokenizer
from triptych.tokens.grammar import Grammars
from triptych.tokens.tokenizer import Tokenizer

from .service import LoadedText
from .settings import TextSettings

if TYPE_CHECKING:
    from triptych.engine.shared_threads import SharedThreads

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Engine:
    """An engine with what it was loaded from. One that sleeps runs what its profile is of."""

    engine: TextEngine
    part: ServedPart
    metrics: Read | None = None
    close: Callable[[], None] | None = None
    """Ends what the engine has started, in the engine's thread."""
    when_lost: Callable[[Callable[[], None]], None] | None = None


@asynccontextmanager
async def loaded(
    settings: TextSettings, checkpoint: Checkpoint, *, thread: Offload, can_unload: bool
) -> AsyncGenerator[LoadedText]:
    """The engine, loaded and tried out in ``thread``. ``can_unload``: its weights can leave the memory. Raises CannotStart."""
    async with AsyncExitStack() as stack:
        try:
            tokenizer = await thread.run(Tokenizer.load, checkpoint.files)
            grammars = await thread.run(Grammars, tokenizer)
            found = await thread.run(partial(_load, settings, checkpoint, can_unload=can_unload))
        except (BadModel, BadProfile) as error:
            raise CannotStart(str(error)) from None
        if found.close is not None:
            stack.push_async_callback(thread.run, found.close)
        try:
            await thread.run(answer_first, found.engine)
        except BadModel as error:
            raise CannotStart(f"engine {settings.engine.engine}: {error}") from error
        yield LoadedText(
            found.engine,
            found.part,
            thread,
            partial(IncrementalDetokenizer, tokenizer),
            grammars.start,
            found.metrics,
            found.when_lost,
        )


def _load(settings: TextSettings, checkpoint: Checkpoint, *, can_unload: bool) -> _Engine:
    """Runs in the engine's thread. Raises BadModel, BadProfile."""
    model_id = settings.model_id or served_name(settings.model)
    if settings.delay_profile is not None:
        costs = delay_costs(settings.delay_profile, ModelPart.DECODER, settings.tensor_parallel)
        info = checkpoint.model_info(model_id=model_id, dtype=DTYPES[settings.compute.dtype])
        sleeping = DelayTextEngine(info, checkpoint.family, costs, settings.engine_options)
        return _Engine(sleeping, _part(costs.profile.identity, settings))
    if settings.engine.engine == "vllm":
        return _load_vllm(settings, checkpoint, model_id)
    from triptych.engine.decoder.text_engine import TransformersTextEngine
    from triptych.engine.part_identity import part_identity

    engine = TransformersTextEngine(
        checkpoint,
        settings.engine_options,
        model_id=model_id,
        max_embedding_bytes=settings.tensor_cache.max_embedding_bytes,
        compute=settings.compute,
        loras=settings.lora_limits,
        can_unload=can_unload,
    )
    return _Engine(engine, _part(part_identity(checkpoint, ModelPart.DECODER, settings.compute), settings))


def _part(identity: ProfileIdentity, settings: TextSettings) -> ServedPart:
    """With the largest token budget: the instances of a pool may measure different ones, which hardly change what a prompt takes."""
    return ServedPart(identity, settings.engine.max_sequences, token_budget=settings.engine.most_step_tokens)


def _load_vllm(settings: TextSettings, checkpoint: Checkpoint, model_id: str) -> _Engine:
    from triptych.integrations.vllm.release import check_release

    check_release()
    from triptych.integrations.vllm.engine import VllmTextEngine

    engine = VllmTextEngine(
        checkpoint,
        _vllm_args(settings),
        model_id=model_id,
        max_embedding_bytes=settings.tensor_cache.max_embedding_bytes,
        compute=settings.compute,
        transfers_kv=not settings.role.serves(Stage.PREFILL, Stage.DECODE),
    )
    part = ServedPart(engine.identity, engine.max_sequences, token_budget=engine.token_budget)
    return _Engine(engine, part, engine.metrics, engine.close, engine.when_lost)


def _vllm_args(settings: TextSettings) -> str:
    degree = settings.tensor_parallel
    return settings.engine.vllm_args if degree == 1 else f"{settings.engine.vllm_args} --tensor-parallel-size {degree}"


class EngineThreads(NamedTuple):
    text: Offload
    encoder: Offload
    """The same one where both engines compute in turns."""
    shared: "SharedThreads | None" = None
    """Divides torch's threads between two engines that compute at the same time; None if they do not."""


def engine_threads(settings: TextSettings, world: World) -> EngineThreads:
    """Engines compute in turns on a GPU, with one thread for both, and where items go first."""
    compute = settings.compute
    encodes = settings.widest.serves(Stage.ENCODE)
    at_once = encodes and compute.device == "cpu" and compute.torch_threads > 1 and not settings.encode_first
    if not at_once or settings.delay_profile is not None:
        thread = world.threads(1, name="engine" if encodes else "text-engine")
        return EngineThreads(thread, thread)
    from triptych.engine.shared_threads import BETWEEN_STEPS_S, SharedThreads, SharingOffload

    logger.info("encoder and text engine compute at the same time, in %d threads", compute.torch_threads)
    shared = SharedThreads(compute.torch_threads, clock=world.clock)
    text = SharingOffload(world.threads(1, name="text-engine"), shared, keeps_s=BETWEEN_STEPS_S)
    return EngineThreads(text, SharingOffload(world.threads(1, name="encoder"), shared), shared)
