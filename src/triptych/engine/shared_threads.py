"""Torch's threads, divided between two engines of a process that compute at the same time."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import nn

from triptych.ports import Clock, Offload

T = TypeVar("T")

BETWEEN_STEPS_S = 0.05
"""A text engine that computed so recently is about to go on."""


class SharedThreads:
    """An engine that computes alone has all threads; two that compute at the same time have half of them each, but at least one.

    Torch keeps the number of threads for each calling thread, so each engine sets its own: when a call begins, and between the
    layers of a pass, which may be long.
    """

    def __init__(
        self,
        threads: int,
        *,
        clock: Clock,
        set_threads: Callable[[int], None] = torch.set_num_threads,
    ) -> None:
        self._threads = threads
        self._set_threads = set_threads
        self._clock = clock
        self._lock = threading.Lock()
        self._until_s: dict[int, float] = {}
        """Times until which each engine's thread counts as computing: without end while it does."""
        self._own = threading.local()

    @contextmanager
    def computing(self, keeps_s: float = 0.0) -> Iterator[None]:
        """A context in which the calling thread computes. It keeps its share for ``keeps_s`` longer."""
        me = threading.get_ident()
        with self._lock:
            self._until_s[me] = float("inf")
        self.adjust()
        try:
            yield
        finally:
            with self._lock:
                self._until_s[me] = self._clock() + keeps_s

    def adjust(self) -> None:
        """Take as many threads as the calling thread, which computes, may have now."""
        now_s = self._clock()
        with self._lock:
            engines = sum(until_s > now_s for until_s in self._until_s.values())
        threads = max(1, self._threads // max(1, engines))
        if threads != getattr(self._own, "threads", None):
            self._set_threads(threads)
            self._own.threads = threads

    def adjust_between_layers(self, model: nn.Module) -> None:
        """Whenever ``model`` begins one of its layers, its thread takes what it may have."""
        for module in model.modules():
            if isinstance(module, nn.ModuleList):
                for layer in module:
                    layer.register_forward_pre_hook(lambda *_: self.adjust())


class SharingOffload:
    """An engine's thread, whose calls compute with its share of the threads."""

    def __init__(self, offload: Offload, threads: SharedThreads, *, keeps_s: float = 0.0) -> None:
        """``keeps_s``: how long it keeps its share after a call."""
        self._offload = offload
        self._threads = threads
        self._keeps_s = keeps_s

    async def run(self, fn: Callable[..., T], /, *args: object) -> T:
        return await self._offload.run(self._run, fn, args)

    def _run(self, fn: Callable[..., T], args: tuple[object, ...]) -> T:
        with self._threads.computing(self._keeps_s):
            return fn(*args)
