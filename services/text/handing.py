"""Hands one request over: copies its positions to the arena while later ones are computed, and grants leases on them."""

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from triptych.domain.embedding import LeaseId
from triptych.domain.generation import HandedOver
from triptych.domain.kv_segment import KvKind, KvSegment, SealedSegment
from triptych.errors import LeaseLost, TriptychError
from triptych.machine.arena.arena_events import Slot
from triptych.ports import HandingTextEngine

from .engine_loop import EngineLoop
from .kv_store import KvStore
from .record import Record

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Positions to hand over, and the choices that have them; ``shared`` if all that go on do."""

    segment: KvSegment
    choices: tuple[int, ...]
    shared: bool


def stretches(kind: KvKind, prompt: int, ends: Mapping[int, int]) -> list[Stretch]:
    """All positions of each choice up to its end. Of several choices those of the prompt are shared."""
    choices = tuple(ends)
    common = max(ends.values()) if len(ends) == 1 else min(prompt, *ends.values())
    found = [Stretch(one, choices, shared=True) for one in kind.segments(0, common)]
    for choice, end in ends.items():
        found += [Stretch(one, (choice,), shared=False) for one in kind.segments(common, end)]
    return found


@dataclass(slots=True)
class _Part:
    stretch: Stretch
    slot: Slot | None
    """Reserved and not sealed."""
    key: bytes = b""
    pin: LeaseId | None = None
    """The lease that keeps it, once it is sealed."""


class Handing:
    """Run ``run`` once; it ends by itself, soon after ``end`` or ``stop``. The engine's copies are never interrupted, as they
    write to slots.
    """

    def __init__(
        self,
        request_id: str,
        wanted: Sequence[Stretch],
        slots: Sequence[Slot],
        *,
        kv: KvStore,
        loop: EngineLoop,
        engine: HandingTextEngine,
        pin_s: float,
        record: Record,
    ) -> None:
        """``slots``: reserved for the first of ``wanted``. ``pin_s``: how long sealed segments are kept for ``hand_over``."""
        self._request_id = request_id
        self._parts = [_Part(one, slot) for one, slot in zip(wanted, slots, strict=False)]
        self._kv = kv
        self._loop = loop
        self._engine = engine
        self._pin_s = pin_s
        self._record = record
        self._computed: Mapping[int, int] = {}
        self._changed = asyncio.Event()
        self._is_ending = False
        self._is_stopped = False
        self._over = asyncio.Event()

    async def run(self) -> None:
        choices = tuple({choice for part in self._parts for choice in part.stretch.choices})
        self._loop.follow(self._request_id, choices, self._tell)
        try:
            await self._name()
            async with asyncio.TaskGroup() as group:
                for part in self._parts:
                    if part.pin is None:
                        if not await self._is_computed(part):
                            continue  # parts of other choices may be
                        # Begun here, so that it is copied before the next step.
                        group.create_task(self._seal(part, self._begin_pack(part)))
        except TriptychError as error:
            logger.info("request %s is handed over without its keys and values: %s", self._request_id, error)
        finally:
            self._loop.unfollow(self._request_id)
            for part in self._parts:
                self._free(part)
            self._over.set()
            if self._is_stopped:
                self._unpin()

    def end(self) -> None:
        """Nothing more will be computed."""
        self._is_ending = True
        self._changed.set()

    def stop(self) -> None:
        """The request ends here, and what is sealed and not handed over is for nobody. Without effect after ``hand_over``."""
        self._is_stopped = True
        self._changed.set()
        if self._over.is_set():
            self._unpin()

    async def sealed(self) -> None:
        """Wait until all that is computed is sealed. Call ``end`` before."""
        await self._over.wait()

    def hand_over(self, choices: Collection[int], lease_s: float, *, prefill_s: float) -> HandedOver:
        """Grant leases on a beginning of each of these choices, as far as it is sealed without a gap. ``prefill_s`` is passed on."""
        segments: list[SealedSegment] = []
        ended = set[int]()
        for part in self._parts:
            whose = [choice for choice in part.stretch.choices if choice in choices]
            if not whose or not ended.isdisjoint(whose):
                continue
            try:
                segments.append(self._granted(part, lease_s))
            except TriptychError as error:
                logger.info("request %s is handed over in part: %s", self._request_id, error)
                ended.update(whose)
        self._unpin()
        return HandedOver(tuple(segments), prefill_s)

    def take_back(self, handed_over: HandedOver) -> None:
        """The caller has left without it."""
        for one in handed_over.segments:
            self._kv.store.release((one.placement.ticket.lease_id, one.router_lease))

    def _granted(self, part: _Part, lease_s: float) -> SealedSegment:
        if part.pin is None:
            raise LeaseLost("a segment could not be sealed")
        stretch = part.stretch
        return self._kv.hand_over(part.key, stretch.segment, () if stretch.shared else stretch.choices, lease_s)

    def _tell(self, computed: Mapping[int, int]) -> None:
        self._computed = computed
        self._changed.set()

    async def _name(self) -> None:
        """Learn the keys. What the arena has already is not copied again."""
        hashes = await self._loop.between(self._hashes)
        for part, prefix_hash in zip(self._parts, hashes, strict=True):
            assert part.slot is not None  # noqa: S101 - nothing is sealed yet
            part.key = part.slot.key if prefix_hash is None else part.stretch.segment.key(prefix_hash)
            if self._kv.has(part.key, part.stretch.segment):
                part.pin = self._kv.pin(part.key, self._pin_s)
                self._free(part)
                self._record.kv_segments("cached", nbytes=part.stretch.segment.nbytes)

    def _hashes(self) -> list[bytes | None]:
        """Runs in the engine's thread."""
        found: list[bytes | None] = []
        for part in self._parts:
            end = part.stretch.segment.end
            hashes = (self._engine.prefix_hash(self._request_id, one, end) for one in part.stretch.choices)
            found.append(next((one for one in hashes if one is not None), None))
        return found

    async def _is_computed(self, part: _Part) -> bool:
        """Wait until its positions are computed. False if that will not be."""
        while not self._is_stopped:
            if any(self._computed.get(one, 0) >= part.stretch.segment.end for one in part.stretch.choices):
                return True
            if self._is_ending:
                return False
            self._changed.clear()
            await self._changed.wait()
        return False

    def _begin_pack(self, part: _Part) -> "asyncio.Future[bool]":
        return self._loop.between(partial(self._pack, part), part.stretch.segment.nbytes)

    async def _seal(self, part: _Part, packed: "asyncio.Future[bool]") -> None:
        assert part.slot is not None  # noqa: S101 - it is reserved
        try:
            while not await packed:
                if not await self._is_computed(part):
                    return
                packed = self._begin_pack(part)
            await self._kv.seal(part.slot, part.key, part.stretch.segment)
            part.slot = None
            part.pin = self._kv.pin(part.key, self._pin_s)
            self._record.kv_segments("sealed", nbytes=part.stretch.segment.nbytes)
        except TriptychError as error:
            logger.info("a segment of request %s is not handed over: %s", self._request_id, error)
        except Exception:
            logger.exception("a segment of request %s could not be sealed", self._request_id)

    def _pack(self, part: _Part) -> bool:
        """Runs in the engine's thread. False if it was preempted: what is computed is told anew."""
        assert part.slot is not None  # noqa: S101 - it is not sealed
        segment, memory = part.stretch.segment, self._kv.window(part.slot)
        return any(self._engine.pack(self._request_id, choice, segment, memory) for choice in part.stretch.choices)

    def _free(self, part: _Part) -> None:
        if part.slot is not None:
            self._kv.abandon((part.slot,))
            part.slot = None

    def _unpin(self) -> None:
        self._kv.store.release([part.pin for part in self._parts if part.pin is not None])
        for part in self._parts:
            part.pin = None
