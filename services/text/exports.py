"""Keys and values of a request that leave this instance, copied to the arena segment by segment while the engine computes them.

    computed -> copied, between two steps -> sealed -> leased to a reader (``KvTransfer``), or a cache for others (``KvPrefix``)

The engine's copies are never interrupted, as they write to slots.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, count
from math import inf

from triptych.domain.embedding import LeaseId
from triptych.domain.kv_segment import KvSegment, SealedSegment, SegmentKind
from triptych.errors import LeaseLost, TriptychError
from triptych.machine.arena.slots import Slot
from triptych.ports import Clock, KvAccess
from triptych.runtime.tasks import TaskScope

from .engine_loop import EngineLoop
from .jobs import Job
from .kv_store import KvStore
from .record import Record

logger = logging.getLogger(__name__)

_MOST_UNCLAIMED_S = 0.1
"""Longest wait for a sign that the caller has got the leases of a transfer: one of them is released. The caller goes on at once."""


@dataclass(eq=False, slots=True)
class _Part:
    """A segment, the choices whose positions these are, and its place in the arena."""

    segment: KvSegment
    choices: tuple[int, ...]
    is_shared: bool = True
    """By all choices of the request."""
    slot: Slot | None = None
    """Reserved and not sealed."""
    key: bytes = b""
    pin: LeaseId | None = None
    """The lease that keeps it, once it is sealed."""


@dataclass(frozen=True, slots=True)
class Exporter:
    """Begins the exports of an instance's requests. Each runs by itself, and ends soon after its ``stop``."""

    store: KvStore
    loop: EngineLoop
    access: KvAccess
    scope: TaskScope
    clock: Clock
    record: Record

    async def transfer(self, job: Job) -> "KvTransfer":
        """Of all tokens that are known, before they are computed: once there is room for them, at the request's queue position."""
        parts = _parts(
            self.store.kind, job, {choice: len(token_ids) for choice, token_ids in job.request.begun.items()}
        )
        slots = await self.store.reserve([part.segment for part in parts], job.queue_position)
        return self._transfer(job, parts, slots)

    def transfer_now(self, job: Job, tokens: Mapping[int, int]) -> "KvTransfer | None":
        """In the middle of an answer. ``tokens``: of each choice, those after the prompt. None if there is no room for all now."""
        parts = _parts(self.store.kind, job, tokens)
        slots = self.store.reserve_now([part.segment for part in parts])
        if len(slots) < len(parts):
            self.store.abandon(slots)
            return None
        return self._transfer(job, parts, slots)

    def _transfer(self, job: Job, parts: Sequence[_Part], slots: Sequence[Slot]) -> "KvTransfer":
        for part, slot in zip(parts, slots, strict=False):
            part.slot = slot
        transfer = KvTransfer(job, parts[: len(slots)], self)
        self.scope.spawn(transfer.run(), name="kv-transfer")
        return transfer

    def keep_prefix(self, job: Job) -> "KvPrefix | None":
        """For prompts elsewhere that begin alike; None if this instance keeps nothing."""
        if self.store.published is None:
            return None
        prefix = KvPrefix(job, self)
        self.scope.spawn(prefix.run(), name="kv-prefix")
        return prefix


class _Export(ABC):
    """Copies segments of one request to the arena. Run ``run`` once."""

    outcome: str
    """Of a segment that was sealed, for the record."""

    def __init__(self, job: Job, choices: Collection[int], exporter: Exporter, pin_s: float | None = None) -> None:
        """``pin_s``: how long what is sealed is kept; None if the arena may evict it at once."""
        self._pin_s = pin_s
        self._request_id = job.job_id
        self._choices = tuple(choices)
        self._store = exporter.store
        self._loop = exporter.loop
        self._access = exporter.access
        self._record = exporter.record
        self._computed: Mapping[int, int] = {}
        self._awaited: float = inf
        """The least position that something waits for."""
        self._changed = asyncio.Event()
        self._is_ending = False
        """Nothing more will be computed."""
        self._is_stopped = False
        self._done = asyncio.Event()

    @abstractmethod
    async def _copy(self) -> None:
        """Copy what there is, as it is computed. Nothing is reserved at its end."""

    async def run(self) -> None:
        self._loop.follow(self._request_id, self._choices, self._tell)
        try:
            await self._copy()
        except* TriptychError as errors:
            logger.info("keys and values of request %s are not exported: %s", self._request_id, errors.exceptions[0])
        finally:
            self._loop.unfollow(self._request_id)
            self._done.set()

    def stop(self) -> None:
        """The request ends here."""
        self._is_stopped = True
        self._changed.set()

    async def wait_until_done(self) -> None:
        """Wait until nothing is copied any more."""
        await self._done.wait()

    def _tell(self, computed: Mapping[int, int]) -> None:
        self._computed = computed
        if max(computed.values(), default=0) >= self._awaited:
            self._awaited = inf
            self._changed.set()

    async def _is_computed(self, part: _Part) -> bool:
        """Wait until its positions are computed. False if that will not be."""
        end = part.segment.end
        while not self._is_stopped:
            if any(self._computed.get(choice, 0) >= end for choice in part.choices):
                return True
            if self._is_ending:
                return False
            self._awaited = min(self._awaited, end)
            self._changed.clear()
            await self._changed.wait()
        return False

    async def _name(self, parts: Sequence[_Part]) -> None:
        """Set the keys of these: that of the slot for contents without an identity."""
        hashes = await self._loop.between(partial(self._hashes, parts)) if parts else []
        for part, prefix_hash in zip(parts, hashes, strict=True):
            unnamed = b"" if part.slot is None else part.slot.key
            part.key = unnamed if prefix_hash is None else part.segment.key(prefix_hash)

    def _hashes(self, parts: Sequence[_Part]) -> list[bytes | None]:
        """Runs in the engine's thread."""
        found: list[bytes | None] = []
        for part in parts:
            hashes = (self._access.prefix_hash(self._request_id, choice, part.segment.end) for choice in part.choices)
            found.append(next((prefix_hash for prefix_hash in hashes if prefix_hash is not None), None))
        return found

    def _begin_copy(self, part: _Part) -> "asyncio.Future[bool]":
        return self._loop.between(partial(self._pack, part), part.segment.nbytes)

    def _pack(self, part: _Part) -> bool:
        """Runs in the engine's thread. False if it was preempted: what is computed is told anew."""
        assert part.slot is not None  # noqa: S101 - it is not sealed
        memory = self._store.window(part.slot)
        return any(self._access.pack(self._request_id, choice, part.segment, memory) for choice in part.choices)

    async def _seal(self, part: _Part, copied: "asyncio.Future[bool]") -> None:
        """Seal what ``_begin_copy`` has begun to copy."""
        assert part.slot is not None  # noqa: S101 - it is reserved
        try:
            while not await copied:
                if not await self._is_computed(part):
                    return
                copied = self._begin_copy(part)
            await self._store.seal(part.slot, part.key, part.segment)
            part.slot = None
            self._keep(part)
            self._record.kv_segments(self.outcome, nbytes=part.segment.nbytes)
        except TriptychError as error:
            logger.info("a segment of request %s is not exported: %s", self._request_id, error)
        except Exception:
            logger.exception("a segment of request %s could not be sealed", self._request_id)
        finally:
            self._free(part)

    def _keep(self, part: _Part) -> None:
        """Keep a part in the arena, if it is for a certain reader."""
        if self._pin_s is not None:
            part.pin = self._store.pin(part.key, self._pin_s)

    def _free(self, part: _Part) -> None:
        if part.slot is not None:
            self._store.abandon((part.slot,))
            part.slot = None


class KvTransfer(_Export):
    """Owner of what an answer goes on with elsewhere: all its positions, in slots that are reserved before."""

    outcome = "sealed"

    def __init__(self, job: Job, parts: Sequence[_Part], exporter: Exporter) -> None:
        choices = {choice for part in parts for choice in part.choices}
        super().__init__(job, choices, exporter, pin_s=job.deadline_s - exporter.clock())
        self._job = job
        self._parts = parts

    async def _copy(self) -> None:
        try:
            if self._store.kind.is_whole:
                await self._cut_at_the_end()
            await self._name(self._parts)
            for part in self._parts:
                if self._store.has(part.key, part.segment):
                    self._keep(part)
                    self._free(part)
                    self._record.kv_segments("cached", nbytes=part.segment.nbytes)
            async with asyncio.TaskGroup() as group:
                for part in self._parts:
                    if part.pin is None and await self._is_computed(part):
                        # Begun here, so that it is copied before the next step.
                        group.create_task(self._seal(part, self._begin_copy(part)))
        finally:
            for part in self._parts:
                self._free(part)
            if self._is_stopped:
                self._unpin()

    async def _cut_at_the_end(self) -> None:
        """Wait until nothing more is computed, and cut by what is: a step that ran when the answer was paused has added to its state."""
        while not (self._is_ending or self._is_stopped):
            self._changed.clear()
            await self._changed.wait()
        computed = await self._loop.between(self._computed_now)
        parts = _parts(self._store.kind, self._job, computed) if computed else []
        if [part.segment for part in parts] == [part.segment for part in self._parts]:
            for part, reserved in zip(parts, self._parts, strict=True):
                part.slot, reserved.slot = reserved.slot, None
        else:
            for reserved in self._parts:
                self._free(reserved)
            slots = self._store.reserve_now([part.segment for part in parts])
            for part, slot in zip(parts, slots, strict=False):
                part.slot = slot
        self._parts = [part for part in parts if part.slot is not None]

    def _computed_now(self) -> dict[int, int]:
        """Runs in the engine's thread: positions after the prompt of each choice that has computed this."""
        prompt = len(self._job.request.token_ids)
        computed = {choice: self._access.computed(self._request_id, choice) for choice in self._choices}
        return {choice: positions - prompt for choice, positions in computed.items() if positions >= prompt}

    def stop(self) -> None:
        """The request ends here, and what is sealed and not granted is for nobody."""
        super().stop()
        if self._done.is_set():
            self._unpin()

    async def sealed(self) -> None:
        """Nothing more will be computed: wait until all that is computed is sealed."""
        self._is_ending = True
        self._changed.set()
        await self.wait_until_done()

    @asynccontextmanager
    async def granted(self, choices: Collection[int], lease_s: float) -> AsyncIterator[tuple[SealedSegment, ...]]:
        """Leases on a prefix of each of these choices, as far as it is sealed without a gap, to be sent to the caller within.

        A caller that leaves before it has used one of them may not have got them: then they are released.
        """
        segments = self._grant(choices, lease_s)
        leases = [(segment.placement.ticket.lease_id, segment.router_lease) for segment in segments]
        lease_ids = [lease_id for pair in leases for lease_id in pair]
        try:
            with self._store.store.first_release(lease_ids) as claimed:
                yield segments
                if segments:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(_MOST_UNCLAIMED_S):
                            await claimed.wait()
        except BaseException:
            self._store.store.release(lease_ids)
            raise

    def _grant(self, choices: Collection[int], lease_s: float) -> tuple[SealedSegment, ...]:
        segments: list[SealedSegment] = []
        ended = set[int]()
        for part in self._parts:
            covered = [choice for choice in part.choices if choice in choices]
            if not covered or not ended.isdisjoint(covered):
                continue
            try:
                if part.pin is None:
                    raise LeaseLost("a segment could not be sealed")
                granted_to = () if part.is_shared else part.choices
                segments.append(self._store.grant(part.key, part.segment, granted_to, lease_s))
            except TriptychError as error:
                logger.info("request %s is transferred in part: %s", self._request_id, error)
                ended.update(covered)
        self._unpin()
        return tuple(segments)

    def _unpin(self) -> None:
        self._store.store.release([part.pin for part in self._parts if part.pin is not None])
        for part in self._parts:
            part.pin = None


class KvPrefix(_Export):
    """Owner of whole segments of a prompt and its answer, for requests elsewhere that begin alike.

    They have no lease: the arena evicts them when it needs the room. What it has no room for is not kept, and nothing waits for
    it.
    """

    outcome = "kept"

    def __init__(self, job: Job, exporter: Exporter) -> None:
        """Of the first choice: the positions of the prompt are the same for all."""
        choice, begun = next(iter(job.request.begun.items()))
        super().__init__(job, (choice,), exporter)
        self._tokens = len(job.request.token_ids) + len(begun)
        """Known at the start."""
        self._first = 0
        self._begun = asyncio.Event()

    def begin(self, first: int) -> None:
        """Keep what is from position ``first`` on: what lies before has been pulled from an instance that keeps it."""
        self._first = first
        self._begun.set()

    def stop(self) -> None:
        """The request ends here."""
        super().stop()
        self._begun.set()

    async def _copy(self) -> None:
        size = self._store.kind.segment_tokens
        # What is known is named now, so that it is copied right after the step that computes it: the answer may be short.
        known = list(map(self._part, range(0, self._tokens // size * size, size)))
        await self._name(known)
        await self._begun.wait()
        async with asyncio.TaskGroup() as group:
            for part in chain(known, map(self._part, count(len(known) * size, size))):
                if part.segment.first < self._first:
                    continue
                if not await self._is_computed(part):
                    return
                if not part.key:
                    await self._name((part,))
                if part.key and not self._store.has(part.key, part.segment):
                    part.slot = next(iter(self._store.reserve_now((part.segment,))), None)
                    if part.slot is not None:
                        group.create_task(self._seal(part, self._begin_copy(part)))

    def _part(self, first: int) -> _Part:
        kind = self._store.kind
        return _Part(KvSegment(kind, first, kind.segment_tokens), self._choices)


def _parts(kind: SegmentKind, job: Job, tokens: Mapping[int, int]) -> list[_Part]:
    """All positions of the prompt and of these tokens of each choice. Of several choices those of the prompt are shared; where segments are
    whole, if there are no others.
    """
    prompt, choices = len(job.request.token_ids), tuple(tokens)
    ends = {choice: prompt + length for choice, length in tokens.items()}
    common = max(ends.values()) if len(ends) == 1 else min(prompt, *ends.values())
    if kind.is_whole and any(end > common for end in ends.values()):
        common = 0
    parts = [_Part(segment, choices) for segment in kind.segments(0, common)]
    for choice, end in ends.items():
        parts += [_Part(segment, (choice,), is_shared=False) for segment in kind.segments(common, end)]
    return parts
