"""Slots: how tensors stand in an arena, how a reader knows that it read what it was promised.

    generation (8 bytes, little endian) | payload | generation

In the payload each tensor starts at a multiple of 64 bytes; the gaps are zero. The checksum is XXH3-64 over all of
the payload, gaps included. Copying and hashing run at memory speed: above about 1 MB callers do it off the event
loop.
"""

from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from triptych.domain.embedding import (
    GENERATION_NBYTES,
    Tensor,
    Ticket,
    payload_nbytes,
    tensor_offsets,
)
from triptych.errors import LeaseLost, TransferFailed


def seal(memory: memoryview, offset: int, generation: int, tensors: Sequence[Tensor]) -> int:
    """Write an embedding into its slot and return the payload's checksum.

    ``memory`` is the whole arena; the slot begins at ``offset`` and is as long as the tensors need. Raises ValueError
    when it does not lie inside.
    """
    specs = tuple(tensor.spec for tensor in tensors)
    start = offset + GENERATION_NBYTES
    end = start + payload_nbytes(specs)
    if offset < 0 or end + GENERATION_NBYTES > len(memory):
        raise ValueError(f"a slot of {end + GENERATION_NBYTES - offset} bytes at {offset} is not inside the arena")
    word = generation.to_bytes(GENERATION_NBYTES, "little")
    memory[offset:start] = word
    at = start
    for tensor, tensor_offset in zip(tensors, tensor_offsets(specs), strict=True):
        begin = start + tensor_offset
        memory[at:begin] = bytes(begin - at)
        at = begin + tensor.spec.nbytes
        if tensor.spec.nbytes:
            memory[begin:at] = tensor.data.cast("B")
    memory[end : end + GENERATION_NBYTES] = word
    return xxh3_64_intdigest(memory[start:end])


def check_ticket(ticket: Ticket) -> None:
    """Raises TransferFailed when a ticket contradicts itself: it came from a peer."""
    if ticket.payload_nbytes != payload_nbytes(ticket.tensors):
        raise TransferFailed(
            f"the ticket speaks of {ticket.payload_nbytes} payload bytes, its tensors take "
            f"{payload_nbytes(ticket.tensors)}"
        )


def verify(memory: memoryview, offset: int, ticket: Ticket) -> None:
    """Check that the slot pulled to ``offset`` is the one that the ticket promised.

    Raises LeaseLost when the holder had put another embedding there, TransferFailed when the bytes are damaged.
    """
    check_ticket(ticket)
    start = offset + GENERATION_NBYTES
    end = start + ticket.payload_nbytes
    if offset < 0 or end + GENERATION_NBYTES > len(memory):
        raise TransferFailed(f"a slot of {ticket.slot_nbytes} bytes at {offset} is not inside the arena")
    word = ticket.generation.to_bytes(GENERATION_NBYTES, "little")
    if memory[offset:start] != word or memory[end : end + GENERATION_NBYTES] != word:
        raise LeaseLost(f"generation {ticket.generation} of the embedding is no longer in its slot")
    if xxh3_64_intdigest(memory[start:end]) != ticket.checksum:
        raise TransferFailed(f"the embedding's {ticket.payload_nbytes} bytes do not have the checksum of its ticket")


def tensors(memory: memoryview, offset: int, ticket: Ticket) -> dict[str, Tensor]:
    """The tensors of a verified slot, by name: read-only views into the arena, valid while the slot is pinned."""
    start = offset + GENERATION_NBYTES
    found: dict[str, Tensor] = {}
    for spec, tensor_offset in zip(ticket.tensors, ticket.tensor_offsets, strict=True):
        begin = start + tensor_offset
        found[spec.name] = Tensor(spec, memory[begin : begin + spec.nbytes].toreadonly())
    return found
