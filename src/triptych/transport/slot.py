"""Slots: the layout of tensors in an arena, and how a reader verifies what it pulled.

    generation (8 bytes, little endian) | payload | generation

Each tensor starts at a multiple of 64 bytes in the payload; gaps are zero. The checksum is XXH3-64 over the whole
payload. Above about 1 MB callers copy and hash off the event loop.
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
    """Write an embedding into the slot at ``offset`` and return the payload's checksum.

    Raises ValueError when the slot does not lie inside the arena.
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
        for part in (bytes(begin - at), tensor.data.cast("B") if tensor.spec.nbytes else b""):
            if not part:
                continue
            arena.write(at, part)
            checksum.update(part)
            at += len(part)
    arena.write(end, word)
    return checksum.intdigest()


def seal_in_place(arena: Arena, offset: int, generation: int, payload_nbytes: int) -> int:
    """Seal a payload that lies in the slot at ``offset`` already, and return its checksum.

    Raises ValueError when the slot does not lie inside the arena.
    """
    if not arena.holds(offset, payload_nbytes + 2 * GENERATION_NBYTES):
        raise ValueError(f"a payload of {payload_nbytes} bytes at {offset} is not inside the arena")
    start, word = offset + GENERATION_NBYTES, generation.to_bytes(GENERATION_NBYTES, "little")
    arena.write(offset, word)
    arena.write(start + payload_nbytes, word)
    return xxh3_64_intdigest(arena.read(start, payload_nbytes))


def check_ticket(ticket: Ticket) -> None:
    """Raises TransferFailed when a peer's ticket contradicts itself."""
    if ticket.payload_nbytes != payload_nbytes(ticket.tensors):
        raise TransferFailed(
            f"the ticket names {ticket.payload_nbytes} payload bytes, its tensors take {payload_nbytes(ticket.tensors)}"
        )


def verify(arena: Arena, offset: int, ticket: Ticket) -> None:
    """Check that the slot pulled to ``offset`` is the one that the ticket names, which has passed ``check_ticket``.

    Raises LeaseLost when the slot had been reused, TransferFailed when the bytes are damaged.
    """
    nbytes = ticket.slot_nbytes
    if not arena.holds(offset, nbytes):
        raise TransferFailed(f"a slot of {nbytes} bytes at {offset} is not inside the arena")
    pulled = arena.read(offset, nbytes)
    word = ticket.generation.to_bytes(GENERATION_NBYTES, "little")
    if pulled[:GENERATION_NBYTES] != word or pulled[-GENERATION_NBYTES:] != word:
        raise LeaseLost(f"generation {ticket.generation} of the embedding is no longer in its slot")
    if xxh3_64_intdigest(pulled[GENERATION_NBYTES:-GENERATION_NBYTES]) != ticket.checksum:
        raise TransferFailed(f"the embedding's {ticket.payload_nbytes} bytes do not have the checksum of its ticket")


def tensors(arena: Arena, offset: int, ticket: Ticket) -> dict[str, Tensor]:
    """The tensors of a verified slot by name, read-only, valid while the slot is pinned.

    Views of host memory, copies of device memory.
    """
    start = offset + GENERATION_NBYTES
    return {
        spec.name: Tensor(spec, arena.read(start + tensor_offset, spec.nbytes))
        for spec, tensor_offset in zip(ticket.tensors, tensor_offsets(ticket.tensors), strict=True)
    }
