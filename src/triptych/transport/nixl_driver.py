"""Runs NIXL reads on one thread, since they can neither be awaited nor polled through a file descriptor.

On one host the copy happens inside the call that posts a read, under NIXL's lock: 14 ms for 64 MB, during which all
other calls into NIXL block. So the event loop makes no such call, except for small reads while nothing else is running:
passing those to the thread and back would take several times as long. The thread sleeps on its inbox when idle, and for
50 us to 1 ms between polls otherwise.

Small reads from one peer that are submitted together, or wait together, become one transfer. An abandoned read stays
here until it ends: releasing it earlier would not stop it from writing.
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
"""Below this size a read's fixed cost exceeds the cost of its bytes."""
_MAX_JOINED = 16
"""Reads in one transfer, hence at most 2 MB."""
_INLINE_NBYTES = _MAX_JOINED * _SMALL_NBYTES
"""Most bytes that the event loop reads in one turn, so that it is not blocked for long."""
_NOT_BEGUN = "given up before it was begun"
_STUCK_S = 1.0
"""Longest wait of ``stop``, beyond its timeout, for a call into NIXL to return, seconds."""


@dataclass(slots=True, eq=False)
class Read:
    """A read from a remote to a local address. ``outcome`` is set, in the event loop, when nothing can write any more."""

    peer: str
    device: int | None
    """The CUDA device of the peer's memory; None for host memory."""
    local_address: int
    remote_address: int
    nbytes: int
    outcome: "asyncio.Future[str | None]"
    """Outcome of the read: None for success, else NIXL's error."""
    wanted: bool = True
    given_up_s: float | None = None
    """Time when the caller gave up before the read ended, seconds on the event loop's clock."""


@dataclass(slots=True, eq=False)
class _Transfer:
    """Reads from one peer in one NIXL transfer."""

    reads: tuple[Read, ...]
    handle: int | None = None

    @property
    def nbytes(self) -> int:
        return sum(read.nbytes for read in self.reads)


OnEnd = Callable[[Sequence[Read], str | None], None]
"""Called in the event loop with the reads of a transfer and their outcome (as ``Read.outcome``)."""


class NixlDriver:
    """The thread. ``nixl`` is the bindings module, ``agent`` and ``ucx`` are what it created."""

    def __init__(
        self,
        nixl: Any,
        agent: Any,
        ucx: int,
        *,
        device: int | None = None,
        on_end: OnEnd = lambda _reads, _error: None,
    ) -> None:
        """Must be called in the reads' event loop. ``device`` holds the destinations."""
        self._device = device
        self._on_end = on_end
        self._nixl = nixl
        self._agent = agent
        self._ucx = ucx
        self._loop = asyncio.get_running_loop()
        self._inbox: queue.SimpleQueue[Sequence[Read] | _Transfer | None] = queue.SimpleQueue()
        self._under_way = 0
        """Running reads, as seen by the event loop."""
        self._stopping = False
        self._stop_after_s = 0.0
        self._finished = False
        self._calling_since_s: float | None = None
        self._thread = threading.Thread(target=self._run, name="nixl", daemon=True)
        self._thread.start()

    def submit(self, reads: Sequence[Read], *, warm: Collection[str]) -> None:
        """Start reads that were submitted together. The caller bounds their number.

        ``warm``: peers read before, for which posting a read does not wait for a connection.
        """
        room_nbytes = _INLINE_NBYTES if self._under_way == 0 else 0
        self._under_way += len(reads)
        if abandoned := [read for read in reads if not read.wanted]:
            self._report(abandoned, _NOT_BEGUN)
        waiting: list[Read] = []
        wanted = [read for read in reads if read.wanted]
        for group in [tuple(wanted)] if len(wanted) == 1 else group_reads(wanted):  # a single read needs no sorting
            first, nbytes = group[0], sum(read.nbytes for read in group)
            if first.peer not in warm or first.nbytes > _SMALL_NBYTES or nbytes > room_nbytes:
                waiting += group
                continue
            transfer = _Transfer(group)
            if self._finishes_inline(transfer):
                room_nbytes -= nbytes
            else:
                room_nbytes = 0
                self._inbox.put(transfer)
        if waiting:
            self._inbox.put(waiting)

    def stop(self, timeout_s: float) -> bool:
        """End the thread, blocking for little more than ``timeout_s``. Return whether every read has ended.

        A thread that hangs inside NIXL is left behind; as a daemon it does not keep the process alive.
        """
        self._stop_after_s = timeout_s
        self._inbox.put(None)
        self._thread.join(timeout_s + _STUCK_S)
        return self._finished

    @property
    def ended(self) -> bool:
        """Whether the thread has made its last call."""
        return not self._thread.is_alive()

    @property
    def hanging_s(self) -> float:
        """Time for which the thread has been inside its current call into NIXL, seconds; 0 while in none."""
        since_s = self._calling_since_s
        return 0.0 if since_s is None else time.monotonic() - since_s  # noqa: TID251 - the thread's clock

    def drop_agent(self) -> None:
        """Drop the agent, which ends with its last reference. Only after the thread has ``ended``."""
        self._agent = None

    def _finishes_inline(self, transfer: _Transfer) -> bool:
        """Post the transfer from the event loop. Return whether it is over; if not, the thread must poll it."""
        try:
            if self._begin(transfer):
                return False
        except Exception as error:  # noqa: BLE001 - as in the thread: the reads end with the error
            self._release(transfer)
            self._report(transfer.reads, type(error).__name__)
        else:
            self._release(transfer)
            self._report(transfer.reads, None)
        return True

    def _run(self) -> None:
        active: list[_Transfer] = []
        poll_s = _POLL_MIN_S
        while not self._stopping:
            if arrived := self._next(poll_s if active else None):
                poll_s = _POLL_MIN_S
                active += self._start_all(arrived)
            else:
                poll_s = min(poll_s * 2, _POLL_MAX_S)
            active = [transfer for transfer in active if self._step(transfer, self._poll)]
        deadline_s = time.monotonic() + self._stop_after_s  # noqa: TID251 - a thread has no event loop's clock
        while active and time.monotonic() < deadline_s:  # noqa: TID251 - as above
            time.sleep(_POLL_MAX_S)
            active = [transfer for transfer in active if self._step(transfer, self._poll)]
        self._finished = not active

    def _next(self, timeout_s: float | None) -> list[Sequence[Read] | _Transfer]:
        """Everything in the inbox; empty after the timeout. Notes a request to stop."""
        arrived: list[Sequence[Read] | _Transfer] = []
        with contextlib.suppress(queue.Empty):
            call = self._inbox.get(timeout=timeout_s)
            while call is not None:
                arrived.append(call)
                call = self._inbox.get_nowait()
            self._stopping = True
        return arrived

    def _start_all(self, arrived: "Iterable[Sequence[Read] | _Transfer]") -> list[_Transfer]:
        """Return the transfers that are running."""
        begun: list[_Transfer] = []
        wanted: list[Read] = []
        for call in arrived:
            if isinstance(call, _Transfer):
                begun.append(call)
                continue
            wanted += [read for read in call if read.wanted]
            if abandoned := tuple(read for read in call if not read.wanted):
                self._end(_Transfer(abandoned), _NOT_BEGUN)
        begun += [transfer for transfer in map(_Transfer, group_reads(wanted)) if self._step(transfer, self._begin)]
        return begun

    def _step(self, transfer: _Transfer, action: "Callable[[_Transfer], bool]") -> bool:
        """Return whether the transfer is still running."""
        self._calling_since_s = time.monotonic()  # noqa: TID251 - a thread has no event loop's clock
        try:
            if action(transfer):
                return True
        except Exception as error:  # noqa: BLE001 - the thread and the other reads go on
            self._end(transfer, type(error).__name__)
        else:
            self._end(transfer, None)
        finally:
            self._calling_since_s = None
        return False

    def _begin(self, transfer: _Transfer) -> bool:
        nixl, reads = self._nixl, transfer.reads
        local_device, remote_device = self._device, reads[0].device
        local_parts = [(read.local_address, read.nbytes, local_device or 0) for read in reads]
        remote_parts = [(read.remote_address, read.nbytes, remote_device or 0) for read in reads]
        local = nixl.nixlXferDList(segment(nixl, local_device), local_parts)
        remote = nixl.nixlXferDList(segment(nixl, remote_device), remote_parts)
        transfer.handle = self._agent.createXferReq(nixl.NIXL_READ, local, remote, reads[0].peer, b"", [self._ucx])
        return bool(self._agent.postXferReq(transfer.handle) == nixl.NIXL_IN_PROG)

    def _poll(self, transfer: _Transfer) -> bool:
        return bool(self._agent.getXferStatus(transfer.handle) == self._nixl.NIXL_IN_PROG)

    def _end(self, transfer: _Transfer, error: str | None) -> None:
        self._release(transfer)
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(self._report, transfer.reads, error)

    def _release(self, transfer: _Transfer) -> None:
        if transfer.handle is not None:
            try:  # noqa: SIM105 - contextlib.suppress would take a twentieth of a small read's time
                self._agent.releaseXferReq(transfer.handle)
            except Exception:  # noqa: BLE001, S110 - the transfer is over: there is nothing to abort
                pass

    def _report(self, reads: Sequence[Read], error: str | None) -> None:
        self._under_way -= len(reads)
        for read in reads:
            if not read.outcome.done():
                read.outcome.set_result(error)
        self._on_end(reads, error)


def group_reads(reads: Iterable[Read]) -> list[tuple[Read, ...]]:
    """Group reads into transfers: small ones of a peer together and first, so that no large one delays them."""
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
