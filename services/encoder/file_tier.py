"""The second tier under the arena: embeddings that were computed are kept in files, and read back when they are wanted again.

It never makes an item fail or wait for long. What cannot be read is encoded; what cannot be written is not kept.
"""

import asyncio
import logging
from collections.abc import Sequence
from math import inf

from triptych.domain.embedding import Tensor
from triptych.errors import TriptychError
from triptych.machine.arena.slots import Slot
from triptych.ports import Clock, Offload
from triptych.runtime.tasks import TaskScope
from triptych.transport.arena_store import ArenaStore

from .embedding_files import DamagedFile, EmbeddingFiles, StoredEmbedding
from .record import Record

logger = logging.getLogger(__name__)

READ_PATIENCE_S = 1.0
"""How long an item waits for its file before it is encoded."""
PAUSE_S = 30.0
"""For which nothing is read after a read that took too long, and nothing written after a failure."""
_WRITING_SHARE = 4
"""The part of the arena's size that waits to be written at most, unless it is a single embedding."""


class _Read:
    """One file being read into the arena, for all callers that want it."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self.waiters = 0
        """Callers."""
        self.placing = False
        """Whether the embedding has a slot, to which it is being copied."""
        self.given_up = False
        self.left = False
        """Given up as all callers have left."""


class FileTier:
    """Single-threaded, on the event loop; ``reads`` and ``writes`` run what blocks."""

    def __init__(
        self,
        files: EmbeddingFiles,
        store: ArenaStore,
        *,
        scope: TaskScope,
        reads: Offload,
        writes: Offload,
        clock: Clock,
        record: Record,
    ) -> None:
        self._files = files
        self._store = store
        self._scope = scope
        self._reads_pool = reads
        self._writes_pool = writes
        self._clock = clock
        self._record = record
        self._reads: dict[bytes, _Read] = {}
        self._read_s = -inf
        """When a file was read last."""
        self._no_reads_until_s = -inf
        self._no_writes_until_s = -inf
        self._writing_nbytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all files, when this process looked last."""
        return self._files.nbytes

    async def restore(self, key: bytes) -> None:
        """Read the embedding into the arena, if there is a file of it, and room. It may still not be there afterwards.

        When this returns nobody reads it, until the caller gives control away. Nobody may encode it meanwhile.
        """
        looked = False
        while (read := self._reads.get(key)) is not None or not looked:
            if read is None:
                if self._clock() < self._no_reads_until_s:
                    return
                read = self._reads[key] = _Read()
                self._scope.spawn(self._restore(key, read), name="restore")
            looked = True
            await self._wait(key, read)

    async def _wait(self, key: bytes, read: _Read) -> None:
        read.waiters += 1
        try:
            await self._wait_for_its_end(key, read)
        finally:
            read.waiters -= 1
            if not (read.waiters or read.placing or read.ended.is_set()):
                read.given_up = read.left = True
                self._end(key, read)

    async def _wait_for_its_end(self, key: bytes, read: _Read) -> None:
        try:
            async with asyncio.timeout(READ_PATIENCE_S):
                await read.ended.wait()
        except TimeoutError:
            if read.placing:  # a copy in memory
                await read.ended.wait()
            elif not read.given_up:
                now_s = self._clock()
                if now_s - self._read_s >= READ_PATIENCE_S:  # else there are only too many to read
                    logger.warning("no file is read within %g s: none is for %g s", READ_PATIENCE_S, PAUSE_S)
                    self._no_reads_until_s = now_s + PAUSE_S
                read.given_up = True
                self._end(key, read)

    def _end(self, key: bytes, read: _Read) -> None:
        if self._reads.get(key) is read:
            del self._reads[key]
        read.ended.set()

    async def _restore(self, key: bytes, read: _Read) -> None:
        outcome = "failed"
        try:
            stored = await self._reads_pool.run(self._read, key, read)
            self._read_s = self._clock()
            if read.given_up:
                outcome = "left" if read.left else "failed"
                return
            if stored is None:
                outcome = "miss"
                return
            read.placing = True
            await self._place(stored)
            outcome = "hit"
        except DamagedFile as error:
            logger.warning("the file of an embedding was removed: %s", error)
            outcome = "damaged"
        except (OSError, TriptychError) as error:
            logger.debug("an embedding could not be read from its file: %s", _reason(error))
        finally:
            self._end(key, read)
            self._record.file_read(outcome)

    def _read(self, key: bytes, read: _Read) -> StoredEmbedding | None:
        """Runs in a thread."""
        return None if read.given_up else self._files.read(key, self._store.memory.capacity_bytes)

    async def _place(self, stored: StoredEmbedding) -> None:
        """Raises TriptychError if there is no room now."""
        slot = self._store.reserve(stored.key, tuple([tensor.spec for tensor in stored.tensors]), stored.tokens)
        try:
            await self._store.fill(slot, stored.tensors)
        except Exception:
            self._store.abandon(slot)
            raise

    def keep(self, slot: Slot, tensors: Sequence[Tensor]) -> None:
        """Write an embedding to a file, later; not if too much waits already, or after a failure."""
        stored = StoredEmbedding(slot.key, slot.tokens, tuple(tensors))
        most = self._store.memory.capacity_bytes // _WRITING_SHARE
        too_many = self._writing_nbytes > 0 and self._writing_nbytes + stored.nbytes > most
        if too_many or self._clock() < self._no_writes_until_s:
            self._record.file_written("dropped")
            return
        self._writing_nbytes += stored.nbytes
        self._scope.spawn(self._write(stored), name="keep")

    async def _write(self, stored: StoredEmbedding) -> None:
        outcome = "failed"
        try:
            written = await self._writes_pool.run(self._files.write, stored)
            outcome = "written" if written else "dropped"
        except OSError as error:
            if self._clock() >= self._no_writes_until_s:
                logger.warning("embeddings cannot be kept in files, and are not for %g s: %s", PAUSE_S, _reason(error))
            self._no_writes_until_s = self._clock() + PAUSE_S
        finally:
            self._writing_nbytes -= stored.nbytes
            self._record.file_written(outcome)


def _reason(error: Exception) -> str:
    """Without the file's name, which is the key and so as secret as the item."""
    reason = error.strerror if isinstance(error, OSError) else None
    return reason or str(error)
