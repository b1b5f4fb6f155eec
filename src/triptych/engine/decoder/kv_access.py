"""Keys and values of the running sequences, copied out of KV blocks and into them."""

from abc import ABC, abstractmethod

from triptych.domain.kv_segment import KvKind, KvSegment, SegmentKind
from triptych.engine.decoder.kv_mover import KvMover
from triptych.engine.decoder.sequence import EngineSequence
from triptych.machine.text.running_batch import RunningBatch


class BatchKvAccess(ABC):
    """``ports.KvAccess`` to the sequences of a batch, wherever their keys and values are."""

    def __init__(self, batch: RunningBatch[EngineSequence]) -> None:
        self._batch = batch

    @property
    @abstractmethod
    def kind(self) -> SegmentKind: ...

    @abstractmethod
    def _pack(self, sequence: EngineSequence, segment: KvSegment, memory: memoryview) -> None:
        """Copy positions that are computed."""

    @abstractmethod
    def _unpack(self, sequence: EngineSequence, segment: KvSegment, memory: memoryview) -> bool:
        """Copy the positions in that the sequence does not have. False, changing nothing, if it cannot take them."""

    @property
    def awaiting(self) -> frozenset[tuple[str, int]]:
        return self._batch.arriving

    def pause(self, request_id: str) -> None:
        self._batch.pause(request_id)

    def computed(self, request_id: str, choice: int) -> int:
        sequence = self._batch.running_choice(request_id, choice)
        return sequence.computed if sequence is not None else 0

    def prefix_hash(self, request_id: str, choice: int, end: int) -> bytes | None:
        sequence = next((sequence for sequence in self._batch.choices(request_id) if sequence.choice == choice), None)
        if sequence is None or sequence.prefixes is None:
            return None
        return sequence.prefixes.hash_before(end, sequence.token_ids)

    def pack(self, request_id: str, choice: int, segment: KvSegment, memory: memoryview) -> bool:
        sequence = self._batch.running_choice(request_id, choice)
        if sequence is None or sequence.computed < segment.end:
            return False
        self._pack(sequence, segment, memory)
        return True

    def unpack(self, request_id: str, choice: int, segment: KvSegment, memory: memoryview) -> bool:
        sequence = self._batch.running_choice(request_id, choice)
        if sequence is None or (request_id, choice) not in self._batch.arriving:
            return False
        if segment.first > sequence.computed or segment.end > sequence.length:
            return False
        if sequence.computed < segment.end:
            if not self._unpack(sequence, segment, memory):
                return False
            self._batch.arrive(sequence, segment.end)
        return True

    def arrived(self, request_id: str) -> None:
        self._batch.end_arrival(request_id)


class BlockKvAccess(BatchKvAccess):
    """``ports.KvAccess`` to the blocks of a batch."""

    def __init__(self, batch: RunningBatch[EngineSequence], mover: KvMover) -> None:
        super().__init__(batch)
        self._mover = mover

    @property
    def kind(self) -> KvKind:
        return self._mover.cache.kind

    def _pack(self, sequence: EngineSequence, segment: KvSegment, memory: memoryview) -> None:
        self._mover.pack(self._batch.blocks.table(sequence.sequence_id), segment, memory)

    def _unpack(self, sequence: EngineSequence, segment: KvSegment, memory: memoryview) -> bool:
        self._mover.unpack(self._batch.blocks.table(sequence.sequence_id), segment, memory, first=sequence.computed)
        return True
