"""Runs NIXL's reads on one thread, because NIXL can neither be awaited nor watched through a file descriptor.

On one host the copy happens inside the call that posts a read, under NIXL's lock: 14 ms for 64 MB, during which every
other call into NIXL waits. So none is made from the event loop. The thread sleeps on its inbox while nothing is under
way, and between 50 us and 1 ms while something is.

A read that nobody waits for any more stays here until it is over: releasing it earlier would not keep it from writing.
"""

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

_POLL_MIN_S = 50e-6
_POLL_MAX_S = 1e-3
_MAX_INBOX = 4096


@dataclass(slots=True, eq=False)
class Read:
    """``nbytes`` from a remote to a local address. ``over`` is set, in the event loop, once nothing writes any more."""

    peer: str
    local_address: int
    remote_address: int
    nbytes: int
    over: "asyncio.Future[str | None]"
    """None for success, else what went wrong, in NIXL's words."""
    wanted: bool = True
    handle: int | None = field(default=None, repr=False)


class NixlDriver:
    """The thread. ``nixl`` is the bindings module, ``agent`` and ``ucx`` what it created."""

    def __init__(self, nixl: Any, agent: Any, ucx: int) -> None:
        """Called in the event loop that the reads belong to."""
        self._nixl = nixl
        self._agent = agent
        self._ucx = ucx
        self._loop = asyncio.get_running_loop()
        self._inbox: queue.Queue[Read | None] = queue.Queue(_MAX_INBOX)
        self._stop_after_s = 0.0
        self._unfinished = False
        self._thread = threading.Thread(target=self._run, name="nixl", daemon=True)
        self._thread.start()

    def submit(self, read: Read) -> None:
        """Raises queue.Full when thousands of reads wait."""
        self._inbox.put_nowait(read)

    def stop(self, timeout_s: float) -> bool:
        """End the thread, blocking for ``timeout_s`` at most. Whether every read has come to its end."""
        self._stop_after_s = timeout_s
        self._inbox.put(None)
        self._thread.join()
        self._agent = None
        return not self._unfinished

    def _run(self) -> None:
        active: list[Read] = []
        poll_s = _POLL_MIN_S
        while (read := self._next(poll_s if active else None)) is not None:
            if isinstance(read, Read):
                poll_s = _POLL_MIN_S
                if self._step(read, self._begin):
                    active.append(read)
            else:
                poll_s = min(poll_s * 2, _POLL_MAX_S)
            active = [read for read in active if self._step(read, self._look)]
        deadline_s = time.monotonic() + self._stop_after_s  # noqa: TID251 - a thread has no loop whose time it could use
        while active and time.monotonic() < deadline_s:  # noqa: TID251 - as above
            time.sleep(_POLL_MAX_S)
            active = [read for read in active if self._step(read, self._look)]
        self._unfinished = bool(active)

    def _next(self, timeout_s: float | None) -> "Read | bool | None":
        """The next read; False when none came in time; None to stop."""
        try:
            return self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            return False

    def _step(self, read: Read, action: "Callable[[Read], bool]") -> bool:
        """Whether the read is still under way."""
        try:
            if action(read):
                return True
        except Exception as error:  # noqa: BLE001 - whatever a read fails with, the thread and the other reads go on
            self._end(read, type(error).__name__)
        else:
            self._end(read, None)
        return False

    def _begin(self, read: Read) -> bool:
        if not read.wanted:
            return False
        nixl = self._nixl
        local = nixl.nixlXferDList(nixl.DRAM_SEG, [(read.local_address, read.nbytes, 0)])
        remote = nixl.nixlXferDList(nixl.DRAM_SEG, [(read.remote_address, read.nbytes, 0)])
        read.handle = self._agent.createXferReq(nixl.NIXL_READ, local, remote, read.peer, b"", [self._ucx])
        return bool(self._agent.postXferReq(read.handle) == nixl.NIXL_IN_PROG)

    def _look(self, read: Read) -> bool:
        return bool(self._agent.getXferStatus(read.handle) == self._nixl.NIXL_IN_PROG)

    def _end(self, read: Read, error: str | None) -> None:
        if read.handle is not None:
            with contextlib.suppress(Exception):  # it is over: there is nothing left that could be aborted
                self._agent.releaseXferReq(read.handle)
        with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody waits
            self._loop.call_soon_threadsafe(_tell, read, error)


def _tell(read: Read, error: str | None) -> None:
    if not read.over.done():
        read.over.set_result(error)
