"""Brings the keys and values of a request to the engine from the instances that hold them, segment by segment."""

import asyncio
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from triptych.domain.embedding import Tensor, Ticket
from triptych.domain.generation import KvReport
from triptych.domain.kv_segment import KV, KvSegment
from triptych.errors import TriptychError
from triptych.policy.queueing import Turn
from triptych.ports import Clock, HandingTextEngine
from triptych.transport.receiver import TensorReceiver

from .engine_loop import EngineLoop
from .record import Record

logger = logging.getLogger(__name__)

_AT_ONCE = 4
"""Segments of a request that are pulled or wait to be copied at the same time."""


@dataclass(slots=True)
class Offered:
    """A segment that can be pulled, and the choices whose positions these are."""

    segment: KvSegment
    ticket: Ticket
    choices: tuple[int, ...]
    in_receiver: bool = False
    """The receiver releases the ticket's lease."""


@dataclass(slots=True)
class _Pull:
    offered: Offered
    choices: tuple[int, ...]
    """Those that still lack it."""
    request_id: str
    """At the receiver."""
    task: asyncio.Task[tuple[Tensor, int] | None]


class Arriving:
    """Run ``run`` once the request has its memory in the engine. It ends by itself, soon after ``stop``; the engine's copies are
    never interrupted, as they read what is pinned. Each ticket's lease is released once, whatever happens.
    """

    def __init__(
        self,
        request_id: str,
        offered: Sequence[Offered],
        ignored: Sequence[Ticket],
        *,
        lengths: Mapping[int, int],
        receiver: TensorReceiver,
        loop: EngineLoop,
        engine: HandingTextEngine | None,
        turn: Turn,
        clock: Clock,
        record: Record,
        is_prefix: bool = False,
    ) -> None:
        """``ignored``: tickets that this instance cannot use. ``lengths``: tokens of each choice that computes for itself.
        ``is_prefix``: they are of the beginning of a new prompt, and nothing was handed over.
        """
        self._request_id = request_id
        self._offered = offered
        self._ignored = ignored
        self._lengths = lengths
        self._covered = dict.fromkeys(lengths, 0)
        self._receiver = receiver
        self._loop = loop
        self._engine = engine
        self._turn = turn
        self._clock = clock
        self._record = record
        self._is_prefix = is_prefix
        self._pulls: deque[_Pull] = deque()
        self._is_running = False
        self._has_ended = False
        self._over = asyncio.Event()
        self.pulled = 0
        """Where the last segment ends that was pulled."""
        self._report = KvReport()

    @property
    def positions(self) -> int:
        """The most positions of a choice that can arrive."""
        return max((one.segment.end for one in self._offered), default=0)

    async def run(self) -> None:
        self._is_running = True
        began_s = self._clock()
        try:
            self._computed(len(self._ignored))
            if self._engine is not None and self._offered:
                await self._bring(self._engine)
        except TriptychError as error:
            logger.info("keys and values of request %s do not arrive: %s", self._request_id, error)
        finally:
            self._give_back()
            computed = sum(max(0, length - 1 - self._covered[choice]) for choice, length in self._lengths.items())
            self._report = replace(self._report, computed_tokens=computed, pull_s=self._clock() - began_s)
            self._over.set()

    def stop(self) -> None:
        """The request ends here."""
        self._end()
        if not self._is_running:
            self._give_back()

    async def over(self) -> KvReport:
        """Wait until nothing more will arrive."""
        await self._over.wait()
        return self._report

    async def _bring(self, engine: HandingTextEngine) -> None:
        computed, awaiting = await self._loop.between(partial(self._state, engine))
        for choice, positions in computed.items():
            self._cover(choice, positions)
        async with asyncio.TaskGroup() as group:
            for number, offered in enumerate(self._offered):
                if self._has_ended:
                    self._computed(len(self._offered) - number)
                    break
                end = offered.segment.end
                lacking = tuple([one for one in offered.choices if one in awaiting and computed[one] < end])
                if not lacking:
                    if any(computed[one] >= end for one in offered.choices):
                        self._found(offered.segment)
                    continue
                name = f"{self._request_id}/kv/{number}"
                task = group.create_task(self._pull(name, offered))
                self._pulls.append(_Pull(offered, lacking, name, task))
                if len(self._pulls) == _AT_ONCE:
                    await self._arrive(engine)
            while self._pulls:
                await self._arrive(engine)
        await self._loop.between(partial(engine.arrived, self._request_id))

    def _state(self, engine: HandingTextEngine) -> tuple[dict[int, int], set[int]]:
        """Runs in the engine's thread: the positions that each choice has already, and the choices that await more."""
        computed = {choice: engine.computed(self._request_id, choice) for choice in self._lengths}
        return computed, {choice for request_id, choice in engine.awaiting if request_id == self._request_id}

    async def _pull(self, name: str, offered: Offered) -> tuple[Tensor, int] | None:
        """The segment, and the bytes pulled for it; None if it is lost. It stays until the caller leaves the receiver."""
        offered.in_receiver = True
        try:
            tensors, nbytes = await self._receiver.acquire_transient(name, offered.ticket, self._turn)
        except TriptychError as error:
            logger.info("a segment of request %s is computed: %s", self._request_id, error)
            return None
        return tensors[KV], nbytes

    async def _arrive(self, engine: HandingTextEngine) -> None:
        """Copy in the next segment, and those behind it that have come as well: between the same two steps, as far as the loop copies so
        much at once. One that is lost is the last.
        """
        await asyncio.wait((self._pulls[0].task,))
        come: list[_Pull] = []
        while self._pulls and (not come or self._pulls[0].task.done()):
            come.append(self._pulls.popleft())
        try:
            copying = [self._begin_copies(engine, one) for one in come]
            copied = [await asyncio.gather(*copies, return_exceptions=True) for copies in copying]
            for pull, results in zip(come, copied, strict=True):
                if results:
                    self._copied(pull, results)
        finally:
            for pull in come:
                self._receiver.leave(pull.request_id)
                self._receiver.copies_gone(pull.request_id)

    def _begin_copies(self, engine: HandingTextEngine, pull: _Pull) -> list["asyncio.Future[bool]"]:
        """One for each choice; none if the segment is lost, or one before it."""
        segment = pull.offered.segment
        pulled = None if pull.task.cancelled() else pull.task.result()
        if pulled is None or self._has_ended:
            if not self._has_ended:
                self._count("lost", nbytes=segment.nbytes)
            self._end()
            return []
        memory = pulled[0].data
        return [
            self._loop.between(partial(engine.unpack, self._request_id, choice, segment, memory), segment.nbytes)
            for choice in pull.choices
        ]

    def _copied(self, pull: _Pull, results: Sequence[bool | BaseException]) -> None:
        segment, pulled = pull.offered.segment, pull.task.result()
        assert pulled is not None  # noqa: S101 - it was copied
        for choice, arrived in zip(pull.choices, results, strict=True):
            if isinstance(arrived, BaseException):
                raise arrived
            if arrived:
                self._cover(choice, segment.end)
        nbytes = pulled[1]
        if not any(results):  # it was preempted, or is gone
            self._end()
        elif nbytes:
            self._count("pulled", nbytes=segment.nbytes)
            self.pulled = segment.end
            report = self._report
            self._report = replace(
                report, pulled_tokens=report.pulled_tokens + segment.positions, nbytes=report.nbytes + nbytes
            )
        else:
            self._found(segment)

    def _count(self, outcome: str, count: int = 1, *, nbytes: int = 0) -> None:
        if self._is_prefix:
            self._record.prefix_segments(outcome, count)
        else:
            self._record.kv_segments(outcome, count, nbytes)

    def _computed(self, segments: int) -> None:
        if segments:
            self._count("computed", segments)

    def _found(self, segment: KvSegment) -> None:
        self._count("found", nbytes=segment.nbytes)
        self._report = replace(self._report, cached_tokens=self._report.cached_tokens + segment.positions)

    def _cover(self, choice: int, end: int) -> None:
        """The last token is always computed."""
        self._covered[choice] = max(self._covered[choice], min(end, self._lengths[choice] - 1))

    def _end(self) -> None:
        """Pull nothing more."""
        self._has_ended = True
        for pull in self._pulls:
            pull.task.cancel()

    def _give_back(self) -> None:
        """Release the leases that the receiver does not."""
        for ticket in (*self._ignored, *(one.ticket for one in self._offered if not one.in_receiver)):
            self._receiver.releases.add(ticket)
        self._ignored, self._offered = (), ()
