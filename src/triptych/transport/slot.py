"""Slots: how tensors stand in an arena, how a reader knows that it read what it was promised.

    generation (8 bytes, little endian) | payload | generation

In the payload each tensor starts at a multiple of 64 bytes; the gaps are zero. The checksum is XXH3-64 over all of
the payload, gaps included. Copying and hashing run at memory speed: above about 1 MB callers do it off the event
loop.
"""

from collections.abc import Sequence

from xxhash import xxh3_64, xxh3_64_intdigest

from triptych.domain.embedding import (
    GENERATION_NBYTES,
    Tensor,
    Ticket,
    payload_nbytes,
    tensor_offsets,
)
from triptych.errors import LeaseLost, TransferFailed
from triptych.ports import Arena


def seal(arena: Arena, offset: int, generation: int, tensors: Sequence[Tensor]) -> int:
    """Write an embedding into its slot and return the payload's checksum.

    The slot begins at ``offset`` and is as long as the tensors need. Raises ValueError when it does not lie where slots
    may lie.
    """
    specs = tuple(tensor.spec for tensor in tensors)
    start = offset + GENERATION_NBYTES
    end = start + payload_nbytes(specs)
    if not arena.holds(offset, end + GENERATION_NBYTES - offset):
        raise ValueError(f"a slot of {end + GENERATION_NBYTES - offset} bytes at {offset} is not inside the arena")
    word = generation.to_bytes(GENERATION_NBYTES, "little")
    checksum = xxh3_64()
    arena.write(offset, word)
    at = start
    for tensor, tensor_offset in zip(tensors, tensor_offsets(specs), strict=True):
        begin = start + tensor_offset
        gap = bytes(begin - at)
        parts = (gap, tensor.data.cast("B")) if tensor.spec.nbytes else (gap,)
        for part in parts:
            arena.write(at, part)
            checksum.update(part)
            at += len(part)
    arena.write(end, word)
    return checksum.intdigest()


def check_ticket(ticket: Ticket) -> None:
    """Raises TransferFailed when a ticket contradicts itself: it came from a peer."""
    if ticket.payload_nbytes != payload_nbytes(ticket.tensors):
        raise TransferFailed(
            f"the ticket speaks of {ticket.payload_nbytes} payload bytes, its tensors take "
            f"{payload_nbytes(ticket.tensors)}"
        )


def verify(arena: Arena, offset: int, ticket: Ticket) -> None:
    """Check that the slot pulled to ``offset`` is the one that the ticket promised.

    Raises LeaseLost when the holder had put another embedding there, TransferFailed when the bytes are damaged.
    """
    check_ticket(ticket)
    if not arena.holds(offset, ticket.slot_nbytes):
        raise TransferFailed(f"a slot of {ticket.slot_nbytes} bytes at {offset} is not inside the arena")
    pulled = arena.read(offset, ticket.slot_nbytes)
    word = ticket.generation.to_bytes(GENERATION_NBYTES, "little")
    if pulled[:GENERATION_NBYTES] != word or pulled[-GENERATION_NBYTES:] != word:
        raise LeaseLost(f"generation {ticket.generation} of the embedding is no longer in its slot")
    if xxh3_64_intdigest(pulled[GENERATION_NBYTES:-GENERATION_NBYTES]) != ticket.checksum:
        raise TransferFailed(f"the embedding's {ticket.payload_nbytes} bytes do not have the checksum of its ticket")


def tensors(arena: Arena, offset: int, ticket: Ticket) -> dict[str, Tensor]:
    """The tensors of a verified slot, by name: read-only, valid while the slot is pinned.

    Views into host memory, copies out of a device's.
    """
    start = offset + GENERATION_NBYTES
    return {
        spec.name: Tensor(spec, arena.read(start + tensor_offset, spec.nbytes))
        for spec, tensor_offset in zip(ticket.tensors, ticket.tensor_offsets, strict=True)
    }
