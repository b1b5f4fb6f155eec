"""Imports of a request from other instances: embeddings of its items, and keys and values of its tokens.

    tickets -- pull, queued --> receiver -- copy, between two steps --> engine

Keys and values are of an answer that another instance began, or of the prefix of a new prompt. Those that are lost are computed.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial

from triptych.domain.embedding import Tensor, Ticket
from triptych.domain.generation import KvReport, TextRequest
from triptych.domain.kv_segment import KV, KvSegment, SegmentKind
from triptych.errors import InvalidRequest, TriptychError
from triptych.ports import Clock, KvAccess
from triptych.runtime.tasks import TaskScope
from triptych.transport.receiver import Arrived, TensorReceiver

from .engine_loop import EngineLoop
from .jobs import Job
from .record import Record

logger = logging.getLogger(__name__)

_AT_ONCE = 4
"""Segments of a request that are pulled or wait to be copied at the same time."""


@dataclass(frozen=True, slots=True)
class Importer:
    """Collaborators with which the requests of an instance import."""

    receiver: TensorReceiver
    loop: EngineLoop
    access: KvAccess | None
    """Takes keys and values; None if the engine cannot."""
    scope: TaskScope
    clock: Clock
    record: Record


class Imports:
    """Owner of a request's tickets: each ticket's lease is released once, whatever happens, and at the latest by ``release``."""

    def __init__(self, job: Job, importer: Importer) -> None:
        self._job = job
        self._request = job.request
        self._importer = importer
        self._receiver = importer.receiver
        self._in_receiver = False
        """The receiver has the tickets of embeddings, and releases their leases."""
        self._kv: _KvImport | None = None
        """Has the tickets of keys and values, and releases their leases."""

    def check(self) -> None:
        """Raises InvalidRequest if its keys and values do not cover a prefix of each choice without gap and overlap."""
        if self._request.kv_segments:
            self._kv = _KvImport(self._job, self._importer)

    async def embeddings(self) -> tuple[Arrived, float]:
        """All embeddings, once they are here, and how long that took in seconds. Raises as ``TensorReceiver.acquire``."""
        if not self._request.placements:
            return Arrived((), ()), 0.0
        clock = self._importer.clock
        began_s = clock()
        self._in_receiver = True
        arrived = await self._receiver.acquire(self._job.job_id, self._request.placements, self._job.queue_position)
        return arrived, clock() - began_s

    @property
    def kv_positions(self) -> int:
        """The most positions of a choice whose keys and values can arrive."""
        return 0 if self._kv is None else self._kv.positions

    @property
    def pulled_positions(self) -> int:
        """Where the last segment ends that was pulled."""
        return 0 if self._kv is None else self._kv.pulled_positions

    async def keys_and_values(self) -> KvReport | None:
        """Bring them to the engine, which has memory for all positions. Returns once nothing more will arrive; None without any."""
        if self._kv is None:
            return None
        # The engine's copies read what is pinned, so a caller that leaves does not interrupt them.
        self._importer.scope.spawn(self._kv.run(), name="kv-import")
        return await self._kv.wait_until_done()

    def copied(self) -> None:
        """The engine has its copies of the embeddings, or does not want them."""
        self._receiver.leave(self._job.job_id)

    def copies_gone(self) -> None:
        """The engine has freed its copies."""
        self._receiver.copies_gone(self._job.job_id)

    def release(self, *, in_engine: bool) -> None:
        """Give back what the request still has. ``in_engine``: the engine has been told to cancel it; ``copied`` and
        ``copies_gone`` follow.
        """
        if not in_engine:
            self.copied()
            self.copies_gone()
        if not self._in_receiver:
            for placement in self._request.placements:
                self._receiver.releases.add(placement.ticket)
        if self._kv is not None:
            self._kv.stop()
        else:
            for segment in self._request.kv_segments:
                self._receiver.releases.add(segment.ticket)


@dataclass(slots=True)
class _Offered:
    """A segment that can be pulled, and the choices whose positions these are."""

    segment: KvSegment
    ticket: Ticket
    choices: tuple[int, ...]
    in_receiver: bool = False
    """The receiver releases the ticket's lease."""


@dataclass(slots=True)
class _Pull:
    offered: _Offered
    choices: tuple[int, ...]
    """Choices that still lack the segment."""
    name: str
    """At the receiver."""
    task: asyncio.Task[tuple[Tensor, int] | None]


class _KvImport:
    """Keys and values of one request. Run ``run`` once the engine has memory for them; it ends by itself, soon after ``stop``."""

    def __init__(self, job: Job, importer: Importer) -> None:
        """Raises InvalidRequest."""
        request = job.request
        self._request_id = job.job_id
        self._queue_position = job.queue_position
        self._by = importer
        self._receiver = importer.receiver
        self._is_prefix = not request.continued
        self._lengths = _lengths(request)
        kind = None if importer.access is None else importer.access.kind
        self._offered, self._ignored = _usable(request, kind, self._lengths.keys())
        self._covered = dict.fromkeys(self._lengths, 0)
        self._pulls: deque[_Pull] = deque()
        self._is_running = False
        self._has_ended = False
        self._done = asyncio.Event()
        self.pulled_positions = 0
        """Where the last segment ends that was pulled."""
        self._pulled_tokens = self._pulled_nbytes = self._found_tokens = 0

    @property
    def positions(self) -> int:
        """The most positions of a choice that can arrive."""
        return max((offered.segment.end for offered in self._offered), default=0)

    async def run(self) -> None:
        self._is_running = True
        try:
            self._computed(len(self._ignored))
            if self._by.access is not None and self._offered:
                await self._bring(self._by.access)
        except* TriptychError as errors:
            logger.info("keys and values of request %s do not arrive: %s", self._request_id, errors.exceptions[0])
        finally:
            self._give_back()
            self._done.set()

    def stop(self) -> None:
        """The request ends here."""
        self._end()
        if not self._is_running:
            self._give_back()

    async def wait_until_done(self) -> KvReport:
        """Wait until nothing more will arrive."""
        began_s = self._by.clock()
        await self._done.wait()
        computed = sum(max(0, length - 1 - self._covered[choice]) for choice, length in self._lengths.items())
        pull_s = self._by.clock() - began_s
        return KvReport(self._pulled_tokens, self._found_tokens, computed, self._pulled_nbytes, pull_s)

    async def _bring(self, access: KvAccess) -> None:
        computed, awaiting = await self._by.loop.between(partial(self._state, access))
        for choice, positions in computed.items():
            self._cover(choice, positions)
        async with asyncio.TaskGroup() as group:
            for number, offered in enumerate(self._offered):
                if self._has_ended:
                    self._computed(len(self._offered) - number)
                    break
                end = offered.segment.end
                lacking = tuple([choice for choice in offered.choices if choice in awaiting and computed[choice] < end])
                if not lacking:
                    if any(computed[choice] >= end for choice in offered.choices):
                        self._found(offered.segment)
                    continue
                name = f"{self._request_id}/kv/{number}"
                task = group.create_task(self._pull(name, offered))
                self._pulls.append(_Pull(offered, lacking, name, task))
                if len(self._pulls) == _AT_ONCE:
                    await self._copy_in(access)
            while self._pulls:
                await self._copy_in(access)
        await self._by.loop.between(partial(access.arrived, self._request_id))

    def _state(self, access: KvAccess) -> tuple[dict[int, int], set[int]]:
        """Runs in the engine's thread: the positions that each choice has already, and the choices that await more."""
        computed = {choice: access.computed(self._request_id, choice) for choice in self._lengths}
        return computed, {choice for request_id, choice in access.awaiting if request_id == self._request_id}

    async def _pull(self, name: str, offered: _Offered) -> tuple[Tensor, int] | None:
        """The segment, and the bytes pulled for it; None if it is lost. It stays until the caller leaves the receiver."""
        offered.in_receiver = True
        try:
            tensors, nbytes = await self._receiver.acquire_transient(name, offered.ticket, self._queue_position)
        except TriptychError as error:
            logger.info("a segment of request %s is computed: %s", self._request_id, error)
            return None
        return tensors[KV], nbytes

    async def _copy_in(self, access: KvAccess) -> None:
        """Copy in the next segment, and those behind it that have come as well: between the same two steps, as far as the loop copies so
        much at once. One that is lost is the last.
        """
        await asyncio.wait((self._pulls[0].task,))
        come: list[_Pull] = []
        while self._pulls and (not come or self._pulls[0].task.done()):
            come.append(self._pulls.popleft())
        try:
            copying = [self._begin_copies(access, pull) for pull in come]
            copied = [await asyncio.gather(*copies, return_exceptions=True) for copies in copying]
            for pull, results in zip(come, copied, strict=True):
                if results:
                    self._copied(pull, results)
        finally:
            for pull in come:
                self._receiver.leave(pull.name)
                self._receiver.copies_gone(pull.name)

    def _begin_copies(self, access: KvAccess, pull: _Pull) -> list["asyncio.Future[bool]"]:
        """Begin copies, one for each choice; none if the segment is lost, or one before it."""
        segment = pull.offered.segment
        pulled = None if pull.task.cancelled() else pull.task.result()
        if pulled is None or self._has_ended:
            if not self._has_ended:
                self._count("lost", nbytes=segment.nbytes)
            self._end()
            return []
        memory = pulled[0].data
        return [
            self._by.loop.between(partial(access.unpack, self._request_id, choice, segment, memory), segment.nbytes)
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
            self.pulled_positions = segment.end
            self._pulled_tokens += segment.positions
            self._pulled_nbytes += nbytes
        else:
            self._found(segment)

    def _count(self, outcome: str, count: int = 1, *, nbytes: int = 0) -> None:
        if self._is_prefix:
            self._by.record.prefix_segments(outcome, count)
        else:
            self._by.record.kv_segments(outcome, count, nbytes)

    def _computed(self, segments: int) -> None:
        if segments:
            self._count("computed", segments)

    def _found(self, segment: KvSegment) -> None:
        self._count("found", nbytes=segment.nbytes)
        self._found_tokens += segment.positions

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
        left = [offered.ticket for offered in self._offered if not offered.in_receiver]
        for ticket in (*self._ignored, *left):
            self._receiver.releases.add(ticket)
        self._ignored, self._offered = [], []


def _lengths(request: TextRequest) -> dict[int, int]:
    """The tokens of each choice that keys and values can arrive for: of new choices the first, which computes for all."""
    prompt = len(request.token_ids)
    lengths = {choice: prompt + len(token_ids) for choice, token_ids in request.begun.items()}
    return lengths if request.continued else dict([next(iter(lengths.items()))])


def _usable(
    request: TextRequest, kind: SegmentKind | None, arriving: Collection[int]
) -> tuple[list[_Offered], list[Ticket]]:
    """The segments that this instance can take, each with those of the choices ``arriving`` that get it, and the tickets of the
    others: of another kind, contradictory, or behind such a one.

    Raises InvalidRequest if they do not cover a prefix of each choice without gap and overlap.
    """
    choices = tuple(request.begun)
    ends, broken = dict.fromkeys(choices, 0), set[int]()
    usable: list[_Offered] = []
    ignored: list[Ticket] = []
    for placement in request.kv_segments:
        covered = [choice for choice in placement.choices or choices if choice in ends]
        for choice in covered:
            length = len(request.token_ids) + len(request.begun[choice])
            if placement.first != ends[choice] or not placement.first < placement.end <= length:
                raise InvalidRequest(
                    f"keys and values of positions {placement.first} to {placement.end} do not follow {ends[choice]} within the "
                    f"{length} tokens of choice {choice}",
                    param="kv_segments",
                )
            ends[choice] = placement.end
        arrives = tuple([choice for choice in covered if choice in arriving and choice not in broken])
        segment = None if kind is None else KvSegment(kind, placement.first, placement.ticket.tokens)
        ticket = placement.ticket
        if (
            arrives
            and segment is not None
            and (ticket.tensors, ticket.payload_nbytes) == ((segment.spec,), segment.nbytes)
        ):
            usable.append(_Offered(segment, ticket, arrives))
        else:
            ignored.append(ticket)
            broken.update(covered)
    return usable, ignored
