"""A device on which engines of several instances compute at the same time, in virtual time."""

import asyncio
from dataclasses import dataclass, field

from triptych.domain.stage import Role
from triptych.virtual.offload import Kind

_INSTANT_S = 2e-9
"""Timers are as much too early."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """Encoders compute on the devices of instances of another role: the n-th on those of the n-th, and so on in turn."""

    role: Role
    """The other one."""
    speed: float
    """Of each of two engines that compute at once, over what it has alone: 0.5 where they only take turns, 1 where they do not meet."""


@dataclass(eq=False, slots=True)
class _Piece:
    left_s: float
    """Time that it takes alone."""
    done: asyncio.Future[None]


@dataclass(slots=True)
class SharedDevice:
    """Owner of the work that runs on a device, a ``virtual.offload.Cores``. One piece alone has all of it; of several, all run alike."""

    speed: float
    """Of each of two, as in ``Sharing``. More than two are together as fast as two."""
    _running: list[_Piece] = field(default_factory=list)
    _known_s: float = 0.0
    """Up to when ``left_s`` counts."""
    _timer: asyncio.TimerHandle | None = None

    def run(self, cost_s: float, kind: Kind = Kind.OTHER) -> asyncio.Future[None]:
        """Begin a piece of work; the future is done at its end, whether somebody waits or not. Each kind slows the others alike."""
        del kind
        self._advance()
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._running.append(_Piece(cost_s, done))
        self._reschedule()
        return done

    def _rate(self) -> float:
        """Of each piece."""
        return 1.0 if len(self._running) == 1 else 2 * self.speed / len(self._running)

    def _advance(self) -> None:
        now_s = asyncio.get_running_loop().time()
        if self._running:
            had_s = (now_s - self._known_s) * self._rate()
            for piece in self._running:
                piece.left_s -= had_s
        self._known_s = now_s

    def _reschedule(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._running:
            next_s = max(0.0, min(piece.left_s for piece in self._running)) / self._rate()
            self._timer = asyncio.get_running_loop().call_later(next_s, self._finish)

    def _finish(self) -> None:
        self._advance()
        for piece in [piece for piece in self._running if piece.left_s <= _INSTANT_S]:
            self._running.remove(piece)
            if not piece.done.done():
                piece.done.set_result(None)
        self._reschedule()
