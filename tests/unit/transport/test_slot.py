"""A slot that was written in place is the same as one that was written by ``seal``."""

import pytest

from triptych.domain.embedding import DType, Tensor, TensorSpec, Ticket
from triptych.transport.arena import HEADER_NBYTES, HostArena
from triptych.transport.slot import seal, seal_in_place, tensors, verify


def test_a_payload_is_sealed_where_it_lies() -> None:
    spec = TensorSpec("t", DType.U8, (100,))
    arena = HostArena(HEADER_NBYTES + 1024, instance_id="one", epoch=1)
    offset = HEADER_NBYTES + 512
    written = seal(arena, HEADER_NBYTES, 7, (Tensor(spec, memoryview(bytes(range(100)))),))
    arena.window(offset + 8, 100)[:] = bytes(range(100))
    assert seal_in_place(arena, offset, 7, 100) == written
    assert arena.read(offset, 116) == arena.read(HEADER_NBYTES, 116)
    ticket = Ticket(b"k", "one", 1, offset, 100, 7, written, (spec,), 3, b"l", 1.0)
    verify(arena, offset, ticket)
    assert bytes(tensors(arena, offset, ticket)["t"].data) == bytes(range(100))


def test_a_payload_outside_of_the_slots_is_refused() -> None:
    arena = HostArena(HEADER_NBYTES + 1024, instance_id="one", epoch=1)
    for offset, nbytes in ((0, 8), (HEADER_NBYTES, 1009)):
        with pytest.raises(ValueError, match="is not inside the arena"):
            seal_in_place(arena, offset, 7, nbytes)
