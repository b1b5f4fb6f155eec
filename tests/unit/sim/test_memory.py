"""Arenas without contents: sealed slots are verified as in real ones."""

from dataclasses import replace
from random import Random

import pytest

from triptych.domain.embedding import GENERATION_NBYTES, DType, Tensor, TensorSpec, Ticket, payload_nbytes
from triptych.errors import LeaseLost, TransferFailed
from triptych.sim.memory import SparseArena, zeros
from triptych.transport.slot import seal, seal_in_place, tensors, verify

SPECS = (TensorSpec("embeddings", DType.F32, (40, 16)),)
PAYLOAD_NBYTES = payload_nbytes(SPECS)
NBYTES = PAYLOAD_NBYTES + 2 * GENERATION_NBYTES


def arena(nbytes: int = 1 << 40) -> SparseArena:
    return SparseArena(nbytes, instance_id="encoder", epoch=1)


def sealed(holder: SparseArena, offset: int, generation: int) -> Ticket:
    checksum = seal(holder, offset, generation, [Tensor(spec, zeros(spec.nbytes)) for spec in SPECS])
    return Ticket(
        key=b"k",
        holder="encoder",
        epoch=1,
        generation=generation,
        offset=offset,
        tensors=SPECS,
        payload_nbytes=PAYLOAD_NBYTES,
        checksum=checksum,
        lease_id=bytes(16),
        lease_s=1.0,
        tokens=40,
    )


def test_a_terabyte_takes_no_memory_and_a_pulled_slot_is_verified() -> None:
    holder, reader = arena(), arena(1 << 30)
    ticket = sealed(holder, (1 << 39) + 64, 7)
    reader.write(8192, holder.read(ticket.offset, NBYTES))
    verify(reader, 8192, ticket)
    assert bytes(tensors(reader, 8192, ticket)["embeddings"].data) == bytes(SPECS[0].nbytes)


def test_a_slot_that_was_used_again_is_another() -> None:
    holder, reader = arena(), arena()
    old = sealed(holder, 8192, 7)
    sealed(holder, 8192, 8)
    reader.write(8192, holder.read(8192, NBYTES))
    with pytest.raises(LeaseLost):
        verify(reader, 8192, old)


def test_words_of_earlier_slots_are_not_in_later_ones() -> None:
    holder, rng = arena(), Random(0)
    for generation in range(1, 300):
        offset = 8192 + rng.randrange(4 * NBYTES)
        if rng.random() < 0.5:
            ticket = sealed(holder, offset, generation)
        else:
            window = holder.window(offset + 8, PAYLOAD_NBYTES)
            assert not any(window)
            ticket = replace(
                sealed(holder, offset, generation), checksum=seal_in_place(holder, offset, generation, PAYLOAD_NBYTES)
            )
        verify(holder, offset, ticket)


def test_a_damaged_slot_is_noticed() -> None:
    holder = arena()
    ticket = sealed(holder, 8192, 7)
    with pytest.raises(TransferFailed, match="checksum"):
        verify(holder, 8192, replace(ticket, checksum=ticket.checksum ^ 1))
