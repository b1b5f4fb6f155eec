"""The threads in which the engines of an instance compute."""

import logging
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, NamedTuple

from triptych.domain.stage import Stage
from triptych.ports import Offload
from triptych.runtime.clock import monotonic
from triptych.runtime.offload import ThreadOffload

from .settings import TextSettings

if TYPE_CHECKING:
    from triptych.engine.shared_threads import SharedThreads

logger = logging.getLogger(__name__)


class EngineThreads(NamedTuple):
    text: Offload
    encoder: Offload
    """The same one where both engines compute in turns."""
    shared: "SharedThreads | None" = None
    """Divides torch's threads between two engines that compute at the same time; None if they do not."""


def engine_threads(settings: TextSettings, stack: AsyncExitStack) -> EngineThreads:
    """Ended by ``stack``. Engines compute in turns on a GPU, with one thread for both, and where items go first."""

    def new(name: str) -> ThreadOffload:
        thread = ThreadOffload(1, name=name)
        stack.callback(thread.close)
        return thread

    compute = settings.compute
    encodes = settings.widest.serves(Stage.ENCODE)
    at_once = encodes and compute.device == "cpu" and compute.torch_threads > 1 and not settings.encode_first
    if not at_once or settings.delay_profile is not None:
        thread = new("engine" if encodes else "text-engine")
        return EngineThreads(thread, thread)
    from triptych.engine.shared_threads import BETWEEN_STEPS_S, SharedThreads, SharingOffload

    logger.info("encoder and text engine compute at the same time, in %d threads", compute.torch_threads)
    shared = SharedThreads(compute.torch_threads, clock=monotonic)
    text = SharingOffload(new("text-engine"), shared, keeps_s=BETWEEN_STEPS_S)
    return EngineThreads(text, SharingOffload(new("encoder"), shared), shared)
