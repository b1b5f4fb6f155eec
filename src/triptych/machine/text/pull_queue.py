"""Schedules pulls: which wait and which are running (ModServe section 4.3, many-to-one). Part of ``TensorCache``.

``policy.queueing.after_share`` orders them. Running bytes are limited in total and per holder; a pull above a limit
runs alone. A pull too large to start now is not overtaken by smaller ones, unless it waits for its own holder: a
hanging holder does not block pulls from others.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Annotated

from triptych.domain.bounds import Between
from triptych.domain.embedding import HolderRef
from triptych.domain.limits import Positive, check_limits
from triptych.domain.queue_position import QueuePosition
from triptych.policy.queueing import after_share


@dataclass(frozen=True, slots=True)
class PullLimits:
    """Limits of running pulls."""

    max_pulling_bytes: Positive = 64 << 20
    """Most bytes of embeddings being pulled at the same time; a larger one goes alone."""
    max_encoder_share: Annotated[float, Between(0, 1, above=True)] = 0.5
    """Largest share of these bytes for one encoder, so that a hanging one leaves room for others."""
    max_pulls_per_encoder: Annotated[int, Between(1, 1024)] = 8
    """Most pulls from one encoder at the same time."""

    def __post_init__(self) -> None:
        check_limits(self)

    @property
    def max_holder_nbytes(self) -> int:
        return int(self.max_pulling_bytes * self.max_encoder_share)


@dataclass(slots=True)
class _Pull:
    request_id: str
    queue_position: QueuePosition
    holder: HolderRef
    nbytes: int


class PullQueue:
    """Pulls are identified by number."""

    def __init__(self, limits: PullLimits) -> None:
        self._limits = limits
        self._waiting: dict[int, _Pull] = {}
        self._under_way: dict[int, _Pull] = {}
        self._pulls: Counter[HolderRef] = Counter()
        self._nbytes: Counter[HolderRef] = Counter()
        self._here: Counter[str] = Counter()
        """Number of pulls per request, waiting or running."""
        self._had: dict[str, int] = {}
        """Bytes of pulls started for a request, kept while it has pulls here."""
        self._nbytes_under_way = 0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def under_way(self) -> int:
        return len(self._under_way)

    @property
    def nbytes_under_way(self) -> int:
        return self._nbytes_under_way

    def waits(self, pull_id: int) -> bool:
        return pull_id in self._waiting

    def want(
        self, pull_id: int, request_id: str, queue_position: QueuePosition, holder: HolderRef, nbytes: int
    ) -> None:
        """Add a pull for a request, with the request's queue position."""
        self._waiting[pull_id] = _Pull(request_id, queue_position, holder, nbytes)
        self._here[request_id] += 1

    def hasten(self, pull_id: int, request_id: str, queue_position: QueuePosition) -> None:
        """Another request needs the same pull: use its queue position if the pull is waiting and the position is earlier."""
        pull = self._waiting.get(pull_id)
        if pull is not None and queue_position < pull.queue_position:
            former, pull.request_id, pull.queue_position = pull.request_id, request_id, queue_position
            self._here[request_id] += 1
            self._settle(former)

    def drop(self, pull_id: int) -> None:
        """Remove a waiting pull."""
        self._settle(self._waiting.pop(pull_id).request_id)

    def end(self, pull_id: int) -> None:
        """A running pull has ended, successfully or not."""
        pull = self._under_way.pop(pull_id)
        self._pulls[pull.holder] -= 1
        self._nbytes[pull.holder] -= pull.nbytes
        self._nbytes_under_way -= pull.nbytes
        if self._pulls[pull.holder] == 0:
            del self._pulls[pull.holder], self._nbytes[pull.holder]
        self._settle(pull.request_id)

    def begin(self, now_s: float) -> list[int]:
        """Start every pull that may run now."""
        begun: list[int] = []
        while self._waiting and (pull_id := self._next(now_s)) is not None:
            pull = self._under_way[pull_id] = self._waiting.pop(pull_id)
            self._pulls[pull.holder] += 1
            self._nbytes[pull.holder] += pull.nbytes
            self._nbytes_under_way += pull.nbytes
            self._had[pull.request_id] = self._had.get(pull.request_id, 0) + pull.nbytes
            begun.append(pull_id)
        return begun

    def _settle(self, request_id: str) -> None:
        """Count one pull less; a request's total is forgotten with its last pull."""
        self._here[request_id] -= 1
        if self._here[request_id] == 0:
            del self._here[request_id]
            self._had.pop(request_id, None)

    def _next(self, now_s: float) -> int | None:
        """The most urgent pull whose holder is below its limits, if its bytes fit."""
        ready: list[tuple[QueuePosition, int]] = []
        for pull_id, pull in self._waiting.items():
            nbytes = self._nbytes[pull.holder]
            fits = nbytes == 0 or nbytes + pull.nbytes <= self._limits.max_holder_nbytes
            if fits and self._pulls[pull.holder] < self._limits.max_pulls_per_encoder:
                ready.append((after_share(pull.queue_position.at(now_s), self._had.get(pull.request_id, 0)), pull_id))
        if not ready:
            return None
        _, first = min(ready)
        nbytes = self._nbytes_under_way
        return first if nbytes == 0 or nbytes + self._waiting[first].nbytes <= self._limits.max_pulling_bytes else None

    def validate(self) -> None:
        """Raises AssertionError if an invariant is violated."""
        limits, here = self._limits, self._under_way.values()
        assert self.under_way <= 1 or self.nbytes_under_way <= limits.max_pulling_bytes, "too many bytes"
        assert self.nbytes_under_way == sum(pull.nbytes for pull in here), "bytes do not add up"
        holders = {pull.holder for pull in here}
        assert self._pulls.keys() == self._nbytes.keys() == holders, "a holder without pulls is remembered"
        for holder in holders:
            sizes = [pull.nbytes for pull in here if pull.holder == holder]
            assert len(sizes) <= limits.max_pulls_per_encoder, "too many pulls from a holder"
            fits = len(sizes) == 1 or sum(sizes) <= limits.max_holder_nbytes
            assert fits, "too many bytes from a holder"
        known = Counter(pull.request_id for pull in (*self._waiting.values(), *here))
        assert known == self._here, "pulls of requests do not add up"
        assert self._here.keys() == known.keys() >= self._had.keys(), "a request that is gone is remembered"
        assert self.under_way or not self._waiting, "pulls wait although none is running"
