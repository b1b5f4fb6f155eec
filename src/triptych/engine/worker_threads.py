"""Threads for compiled kernels, beside the thread that calls them."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import torch


class WorkerThreads:
    """Runs parts of one computation, which must not hold Python's lock for long. Threads begin with the first."""

    def __init__(self, threads: int) -> None:
        """``threads``: the most, the calling one included."""
        self._threads = threads
        self._others = ThreadPoolExecutor(threads - 1, "kernels") if threads > 1 else None

    def usable(self, worthwhile: int) -> int:
        """Number of threads to use: at least 1, at most those that torch has for the calling thread, and as many as are
        ``worthwhile``.
        """
        return max(1, min(self._threads, torch.get_num_threads(), worthwhile))

    def run(self, part: Callable[[int, int], None], ends: Sequence[int]) -> None:
        """Call ``part`` between each two of ``ends``, at the same time. Raises what one of them raises, when all have ended."""
        first, *rest = [span for span in pairwise(ends) if span[0] < span[1]] or [(0, 0)]
        waiting = [] if self._others is None else [self._others.submit(part, *span) for span in rest]
        part(*first)
        for span in rest[len(waiting) :]:
            part(*span)
        errors = [error for future in waiting if (error := future.exception()) is not None]
        if errors:
            raise errors[0]
