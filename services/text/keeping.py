"""Copies the keys and values of a request to the arena while it runs, for requests elsewhere that begin alike."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from functools import partial

from triptych.domain.kv_segment import KvSegment
from triptych.errors import TriptychError
from triptych.machine.arena.arena_events import Slot
from triptych.ports import HandingTextEngine

from .engine_loop import EngineLoop
from .kv_store import KvStore
from .record import Record

logger = logging.getLogger(__name__)


class Keeping:
    """Run ``run`` once; it ends by itself, soon after ``stop``. What the arena has no room for is not kept, and nothing waits for it.

    Only whole segments are kept, of the prompt and of the answer. They have no lease: the arena evicts them when it needs the room.
    """

    def __init__(
        self,
        request_id: str,
        choice: int,
        tokens: int,
        *,
        kv: KvStore,
        loop: EngineLoop,
        engine: HandingTextEngine,
        record: Record,
    ) -> None:
        """``choice``: whose positions; those of the prompt are the same for all. It has ``tokens`` at the start."""
        self._request_id = request_id
        self._choice = choice
        self._tokens = tokens
        self._keys: dict[int, bytes | None] = {}
        """By the ends of segments."""
        self._kv = kv
        self._loop = loop
        self._engine = engine
        self._record = record
        self._computed = 0
        self._first = 0
        self._has_begun = False
        self._is_stopped = False
        self._changed = asyncio.Event()
        self._over = asyncio.Event()

    @property
    def _size(self) -> int:
        return self._kv.kind.segment_tokens

    def begin(self, first: int) -> None:
        """Keep what is from position ``first`` on: what lies before has been pulled from an instance that keeps it."""
        self._first, self._has_begun = first, True
        self._changed.set()

    def stop(self) -> None:
        """The request ends here."""
        self._is_stopped = True
        self._changed.set()

    async def over(self) -> None:
        """Wait until nothing is copied any more. Call ``stop`` before."""
        await self._over.wait()

    async def run(self) -> None:
        self._loop.follow(self._request_id, (self._choice,), self._tell)
        try:
            kept = 0
            # What is known is named now, so that it is copied right after the step that computes it: the answer may be short.
            await self._name(self._kv.kind.segments(0, self._tokens // self._size * self._size))
            while (end := await self._next(kept)) > kept:
                wanted = self._kv.kind.segments(kept, end)
                kept = end
                await self._keep([one for one in wanted if one.first >= self._first])
        except TriptychError as error:
            logger.debug("request %s is not kept: %s", self._request_id, error)
        except Exception:
            logger.exception("request %s could not be kept", self._request_id)
        finally:
            self._loop.unfollow(self._request_id)
            self._over.set()

    async def _next(self, kept: int) -> int:
        """Wait for a whole segment more than ``kept`` positions. Returns the end of the last one; ``kept`` if there will be none."""
        size = self._size
        while not self._is_stopped:
            if self._has_begun and (end := self._computed // size * size) > kept:
                return end
            self._changed.clear()
            await self._changed.wait()
        return kept

    async def _keep(self, segments: Sequence[KvSegment]) -> None:
        """Those that the arena does not have. Their copies are all begun here, so that they are made before the next steps."""
        await self._name([one for one in segments if one.end not in self._keys])
        async with asyncio.TaskGroup() as group:
            for segment in segments:
                key = self._keys.get(segment.end)
                if key is None or self._kv.has(key, segment):
                    continue
                if not (slots := self._kv.reserve_now((segment,))):
                    break
                packed = self._loop.between(partial(self._pack, segment, slots[0]), segment.nbytes)
                group.create_task(self._seal(segment, slots[0], key, packed))

    async def _name(self, segments: Sequence[KvSegment]) -> None:
        if segments:
            hashes = await self._loop.between(partial(self._hashes, segments))
            for segment, prefix_hash in zip(segments, hashes, strict=True):
                self._keys[segment.end] = None if prefix_hash is None else segment.key(prefix_hash)

    async def _seal(self, segment: KvSegment, slot: Slot, key: bytes, packed: "asyncio.Future[bool]") -> None:
        is_sealed = False
        try:
            if await packed:
                await self._kv.seal(slot, key, segment)
                is_sealed = True
                self._record.kv_segments("kept", nbytes=segment.nbytes)
        except TriptychError as error:
            logger.debug("a segment of request %s is not kept: %s", self._request_id, error)
        except Exception:
            logger.exception("a segment of request %s could not be kept", self._request_id)
        finally:
            if not is_sealed:
                self._kv.abandon((slot,))

    def _tell(self, computed: Mapping[int, int]) -> None:
        size, before = self._size, self._computed
        self._computed = max(before, computed.get(self._choice, 0))
        if self._computed // size > before // size:
            self._changed.set()

    def _hashes(self, segments: Sequence[KvSegment]) -> list[bytes | None]:
        """Runs in the engine's thread."""
        return [self._engine.prefix_hash(self._request_id, self._choice, one.end) for one in segments]

    def _pack(self, segment: KvSegment, slot: Slot) -> bool:
        """Runs in the engine's thread. False if the request has ended, or was preempted."""
        return self._engine.pack(self._request_id, self._choice, segment, self._kv.window(slot))
