"""Runs NIXL's reads, which can neither be awaited nor watched through a file descriptor, on one thread.

On one host the copy happens inside the call that posts a read, under NIXL's lock: 14 ms for 64 MB, during which every
other call into NIXL waits. So none is made from the event loop, but for small reads while nothing else is under way:
handing those to the thread and back would take several times as long as they do. The thread sleeps on its inbox while
nothing is under way, and between 50 us and 1 ms while something is.

Small reads from one peer that come together, or wait at the same time, become one transfer. A read that nobody waits for
any more stays here until it is over: releasing it earlier would not keep it from writing.
"""

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from triptych.transport.nixl_agent import segment

_POLL_MIN_S = 50e-6
_POLL_MAX_S = 1e-3
_SMALL_NBYTES = 128 << 10
"""Up to here a read costs more by being one than by its bytes."""
_MAX_JOINED = 16
"""Reads in one transfer, which thereby has at most 2 MB."""
_INLINE_NBYTES = _MAX_JOINED * _SMALL_NBYTES
"""What the event loop's thread reads in one turn: more would keep it from everything else for too long."""
_NOT_BEGUN = "given up before it was begun"
_STUCK_S = 1.0
"""How long ``stop`` waits, beyond its time, for a call into NIXL that does not return."""


@dataclass(slots=True, eq=False)
class Read:
    """``nbytes`` from a remote to a local address. ``over`` is set, in the event loop, once nothing writes any more."""

    peer: str
    device: int | None
    """Of the peer's memory: a CUDA device, or None for its host's."""
    local_address: int
    remote_address: int
    nbytes: int
    over: "asyncio.Future[str | None]"
    """None for success, else what went wrong, in NIXL's words."""
    wanted: bool = True
    given_up_s: float | None = None
    """When nobody wanted it any more, although it was not over; on the event loop's clock."""


@dataclass(slots=True, eq=False)
class _Transfer:
    """Reads from one peer that NIXL does as one."""

    reads: tuple[Read, ...]
    handle: int | None = None

    @property
    def nbytes(self) -> int:
        return sum(read.nbytes for read in self.reads)


OnEnd = Callable[[Sequence[Read], str | None], None]
"""Told in the event loop of the reads of one transfer, and how it ended: None for success, else as ``Read.over``."""


class NixlDriver:
    """The thread. ``nixl`` is the bindings module, ``agent`` and ``ucx`` what it created."""

    def __init__(
        self,
        nixl: Any,
        agent: Any,
        ucx: int,
        *,
        device: int | None = None,
        on_end: OnEnd = lambda _reads, _error: None,
    ) -> None:
        """Called in the event loop that the reads belong to. ``device``: where their destinations lie."""
        self._device = device
        self._on_end = on_end
        self._nixl = nixl
        self._agent = agent
        self._ucx = ucx
        self._loop = asyncio.get_running_loop()
        self._inbox: queue.SimpleQueue[Sequence[Read] | _Transfer | None] = queue.SimpleQueue()
        self._under_way = 0
        """Reads that are not over, as the event loop knows."""
        self._stopping = False
        self._stop_after_s = 0.0
        self._finished = False
        self._calling_since_s: float | None = None
        self._thread = threading.Thread(target=self._run, name="nixl", daemon=True)
        self._thread.start()

    def submit(self, reads: Sequence[Read], *, warm: Collection[str]) -> None:
        """Begin reads that came together. How many may come is for the caller to bound.

        ``warm``: peers that have been read before, so that posting a read does not wait for a connection.
        """
        room_nbytes = _INLINE_NBYTES if self._under_way == 0 else 0
        self._under_way += len(reads)
        if unwanted := [read for read in reads if not read.wanted]:
            self._tell(unwanted, _NOT_BEGUN)
        waiting: list[Read] = []
        wanted = [read for read in reads if read.wanted]
        for group in [tuple(wanted)] if len(wanted) == 1 else joined(wanted):  # a lone one needs no sorting
            first, nbytes = group[0], sum(read.nbytes for read in group)
            if first.peer not in warm or first.nbytes > _SMALL_NBYTES or nbytes > room_nbytes:
                waiting += group
                continue
            transfer = _Transfer(group)
            if self._ends_at_once(transfer):
                room_nbytes -= nbytes
            else:
                room_nbytes = 0
                self._inbox.put(transfer)
        if waiting:
            self._inbox.put(waiting)

    def stop(self, timeout_s: float) -> bool:
        """End the thread, blocking for little more than ``timeout_s``. Whether every read has come to its end.

        A thread that NIXL does not return from is left behind: it is a daemon, which does not keep the process.
        """
        self._stop_after_s = timeout_s
        self._inbox.put(None)
        self._thread.join(timeout_s + _STUCK_S)
        return self._finished

    @property
    def ended(self) -> bool:
        """Whether the thread makes no call any more, and never will."""
        return not self._thread.is_alive()

    @property
    def hanging_s(self) -> float:
        """For how long the thread has been inside one call into NIXL; 0 while it is in none."""
        since_s = self._calling_since_s
        return 0.0 if since_s is None else time.monotonic() - since_s  # noqa: TID251 - the thread's clock

    def let_go(self) -> None:
        """Of the agent, which then ends with its last owner. Only after the thread has ``ended``."""
        self._agent = None

    def _ends_at_once(self, transfer: _Transfer) -> bool:
        """Post it from the event loop. Whether it is over; else the thread has to look after it."""
        try:
            if self._begin(transfer):
                return False
        except Exception as error:  # noqa: BLE001 - as in the thread: the reads end with what they fail with
            self._release(transfer)
            self._tell(transfer.reads, type(error).__name__)
        else:
            self._release(transfer)
            self._tell(transfer.reads, None)
        return True

    def _run(self) -> None:
        active: list[_Transfer] = []
        poll_s = _POLL_MIN_S
        while not self._stopping:
            if came := self._next(poll_s if active else None):
                poll_s = _POLL_MIN_S
                active += self._start_all(came)
            else:
                poll_s = min(poll_s * 2, _POLL_MAX_S)
            active = [transfer for transfer in active if self._step(transfer, self._look)]
        deadline_s = time.monotonic() + self._stop_after_s  # noqa: TID251 - a thread has no loop whose time it could use
        while active and time.monotonic() < deadline_s:  # noqa: TID251 - as above
            time.sleep(_POLL_MAX_S)
            active = [transfer for transfer in active if self._step(transfer, self._look)]
        self._finished = not active

    def _next(self, timeout_s: float | None) -> list[Sequence[Read] | _Transfer]:
        """All that waits; nothing when nothing came in time. Notes when it is time to stop."""
        came: list[Sequence[Read] | _Transfer] = []
        with contextlib.suppress(queue.Empty):
            one = self._inbox.get(timeout=timeout_s)
            while one is not None:
                came.append(one)
                one = self._inbox.get_nowait()
            self._stopping = True
        return came

    def _start_all(self, came: "Iterable[Sequence[Read] | _Transfer]") -> list[_Transfer]:
        """Those that are under way now."""
        begun: list[_Transfer] = []
        wanted: list[Read] = []
        for one in came:
            if isinstance(one, _Transfer):
                begun.append(one)
                continue
            wanted += [read for read in one if read.wanted]
            if unwanted := tuple(read for read in one if not read.wanted):
                self._end(_Transfer(unwanted), _NOT_BEGUN)
        begun += [transfer for transfer in map(_Transfer, joined(wanted)) if self._step(transfer, self._begin)]
        return begun

    def _step(self, transfer: _Transfer, action: "Callable[[_Transfer], bool]") -> bool:
        """Whether the transfer is still under way."""
        self._calling_since_s = time.monotonic()  # noqa: TID251 - a thread has no loop whose time it could use
        try:
            if action(transfer):
                return True
        except Exception as error:  # noqa: BLE001 - whatever a read fails with, the thread and the other reads go on
            self._end(transfer, type(error).__name__)
        else:
            self._end(transfer, None)
        finally:
            self._calling_since_s = None
        return False

    def _begin(self, transfer: _Transfer) -> bool:
        nixl, reads = self._nixl, transfer.reads
        here, there = self._device, reads[0].device
        local_parts = [(read.local_address, read.nbytes, here or 0) for read in reads]
        remote_parts = [(read.remote_address, read.nbytes, there or 0) for read in reads]
        local = nixl.nixlXferDList(segment(nixl, here), local_parts)
        remote = nixl.nixlXferDList(segment(nixl, there), remote_parts)
        transfer.handle = self._agent.createXferReq(nixl.NIXL_READ, local, remote, reads[0].peer, b"", [self._ucx])
        return bool(self._agent.postXferReq(transfer.handle) == nixl.NIXL_IN_PROG)

    def _look(self, transfer: _Transfer) -> bool:
        return bool(self._agent.getXferStatus(transfer.handle) == self._nixl.NIXL_IN_PROG)

    def _end(self, transfer: _Transfer, error: str | None) -> None:
        self._release(transfer)
        with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody waits
            self._loop.call_soon_threadsafe(self._tell, transfer.reads, error)

    def _release(self, transfer: _Transfer) -> None:
        if transfer.handle is not None:
            try:  # noqa: SIM105 - contextlib.suppress would take a twentieth of a small read's time
                self._agent.releaseXferReq(transfer.handle)
            except Exception:  # noqa: BLE001, S110 - it is over: there is nothing left that could be aborted
                pass

    def _tell(self, reads: Sequence[Read], error: str | None) -> None:
        self._under_way -= len(reads)
        for read in reads:
            if not read.over.done():
                read.over.set_result(error)
        self._on_end(reads, error)


def joined(reads: Iterable[Read]) -> list[tuple[Read, ...]]:
    """Reads as they go into transfers: small ones of one peer together and first, so that no large one delays them."""
    small: dict[str, list[Read]] = {}
    large: list[tuple[Read, ...]] = []
    for read in reads:
        if read.nbytes <= _SMALL_NBYTES:
            small.setdefault(read.peer, []).append(read)
        else:
            large.append((read,))
    groups = [
        tuple(waiting[at : at + _MAX_JOINED])
        for waiting in small.values()
        for at in range(0, len(waiting), _MAX_JOINED)
    ]
    return groups + large
