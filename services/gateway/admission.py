"""Admission control of the gateway: limits on running requests and on the bytes of their bodies."""

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager

from triptych.errors import Overloaded, TriptychError, Unavailable
from triptych.machine.turnover import Turnover
from triptych.policy.admission import most_of_one
from triptych.ports import Clock

from .lifetime import RequestLifetime


class Admission:
    """Owner of a gateway's running requests and the bytes of their bodies.

    It limits running requests and the bytes of their bodies.
    """

    def __init__(self, max_requests: int, max_bytes: int, clock: Clock, *, keys: int = 0) -> None:
        """Make the limits. With several ``keys`` none takes the last eighth of the requests."""
        self._max_requests = max_requests
        self._max_of_key = max_requests if keys < 2 else most_of_one(max_requests)
        self._of_key: Counter[str] = Counter()
        self._max_bytes = max_bytes
        self._bytes = 0
        self._clock = clock
        self._places, self._room = Turnover(), Turnover()
        """Turnover of requests, and of bytes."""
        self._running: dict[str, RequestLifetime] = {}
        self._closed: TriptychError | None = None

    @property
    def requests(self) -> int:
        return len(self._running)

    @property
    def nbytes(self) -> int:
        return self._bytes

    def is_running(self, request_id: str) -> bool:
        return request_id in self._running

    @contextmanager
    def request(self, request_id: str, lifetime: RequestLifetime, key: str = "") -> Generator["Hold"]:
        """Raises Overloaded when the limit is reached. ``request_id`` must not be running yet; ``key`` is a key's name."""
        if self._closed is not None:
            raise self._closed
        if len(self._running) >= self._max_requests:
            raise self._full(f"{self._max_requests} requests are running, which is the limit", key)
        if self._of_key[key] >= self._max_of_key:
            raise self._full(f"{self._max_of_key} requests of this key are running, more are left to others", key)
        hold = Hold(self)
        self._running[request_id] = lifetime
        self._of_key[key] += 1
        try:
            yield hold
        finally:
            del self._running[request_id]
            self._of_key[key] -= 1
            self._bytes -= hold.nbytes
            now_s = self._clock()
            self._places.free(1, now_s)
            self._room.free(hold.nbytes, now_s)
            if len(self._running) < self._max_requests // 2:
                self._places.rest()

    def _full(self, reason: str, key: str) -> Overloaded:
        return Overloaded(reason, retry_after_s=self._places.refuse(key, self._clock()))

    def take(self, nbytes: int) -> None:
        if self._bytes + nbytes > self._max_bytes:
            raise Overloaded(
                f"the bodies of running requests fill all {self._max_bytes} bytes of buffer",
                retry_after_s=self._room.after_s(nbytes, self._clock()),
            )
        self._bytes += nbytes

    def close(self) -> None:
        """End all running requests, and admit no more."""
        self._closed = Unavailable("the server is shutting down")
        for lifetime in self._running.values():
            lifetime.end(Unavailable("the server is shutting down"))


class Hold:
    """The body bytes that one request holds until it ends."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self.nbytes = 0

    def grow(self, nbytes: int) -> None:
        """Hold ``nbytes`` more. Raises Overloaded."""
        self.grow_to(self.nbytes + nbytes)

    def grow_to(self, nbytes: int) -> None:
        """Raises Overloaded when there is no room; bytes already held stay held."""
        if nbytes > self.nbytes:
            self._admission.take(nbytes - self.nbytes)
            self.nbytes = nbytes
