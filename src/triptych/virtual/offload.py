"""Blocking work under virtual time: it runs at once, then its declared cost passes as virtual time.

A fake engine calls ``spend`` where a real one would compute. Under an ``InlineOffload`` the caller then waits for that
long while its worker stays busy; elsewhere (a real thread, a plain call) ``spend`` does nothing.
"""

import asyncio
from collections.abc import Callable
from contextvars import ContextVar
from enum import Enum, auto
from typing import Protocol, TypeVar

T = TypeVar("T")

_EARLY_S = 2e-9
"""asyncio runs a timer this much early, if another one is due."""


class Kind(Enum):
    """Kind of a piece of work, as far as it slows other work beside it."""

    PASS = auto()
    """Of many rows: a batch of the encoder with its preparation, or a step with prompts."""
    DECODE = auto()
    """A step of decodes alone."""
    OTHER = auto()


class Bill:
    """The cost of one piece of work so far."""

    def __init__(self, started_s: float) -> None:
        self.started_s = started_s
        self.cost_s = 0.0
        self.kind = Kind.OTHER

    @property
    def ends_s(self) -> float:
        return self.started_s + self.cost_s


_bill: ContextVar[Bill | None] = ContextVar("triptych_virtual_bill", default=None)


def spend(cost_s: float) -> None:
    """Add ``cost_s`` to the cost of the running work."""
    if (bill := _bill.get()) is not None:
        bill.cost_s += cost_s


def does(kind: Kind) -> None:
    """Say of which kind the running work is."""
    if (bill := _bill.get()) is not None:
        bill.kind = kind


def billed_s() -> float:
    """Cost of the running work so far; 0 outside of work."""
    bill = _bill.get()
    return 0.0 if bill is None else bill.cost_s


class ConcurrentUse(AssertionError):
    """A call overlapped an earlier one to an object that is not thread-safe."""


class OneAtATime:
    """Guards a fake that is not thread-safe: detects calls that would overlap in real threads."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._last: Bill | None = None

    def enter(self) -> None:
        """Raises ``ConcurrentUse`` while earlier work still takes time."""
        bill = _bill.get()
        last, self._last = self._last, bill or self._last
        if last is None or last is bill:
            return
        if bill is not None:
            now_s = bill.started_s
        else:
            try:
                now_s = asyncio.get_running_loop().time()
            except RuntimeError:  # a real thread
                return
        if now_s < last.ends_s - _EARLY_S:
            raise ConcurrentUse(
                f"{self._name} is called at {now_s:g} s, but a call before it runs to {last.ends_s:g} s"
            )


class Cores(Protocol):
    """Processors on which pieces of work take their time."""

    def run(self, cost_s: float, kind: Kind = Kind.OTHER) -> asyncio.Future[None]:
        """Begin a piece of work; the future is done at its end, whether somebody waits or not."""
        ...


class InlineOffload:
    """``ports.Offload`` without threads, with ``workers`` pieces of work at a time.

    As with threads, work runs to its end and keeps its worker busy even if the caller is cancelled.
    """

    def __init__(self, workers: int = 1, cores: Cores | None = None) -> None:
        """``cores``: which work shares with other work; by default each worker has one of its own."""
        self._slots = asyncio.Semaphore(workers)
        self._cores = cores

    async def run(self, fn: Callable[..., T], /, *args: object) -> T:
        await self._slots.acquire()
        loop = asyncio.get_running_loop()
        bill = Bill(loop.time())
        token = _bill.set(bill)
        try:
            return fn(*args)
        finally:
            _bill.reset(token)
            if bill.cost_s > 0 and self._cores is not None:
                done = self._cores.run(bill.cost_s, bill.kind)
                done.add_done_callback(lambda _: self._slots.release())
                await asyncio.shield(done)
            elif bill.cost_s > 0:
                loop.call_later(bill.cost_s, self._slots.release)
                await asyncio.sleep(bill.cost_s)
            else:
                self._slots.release()
