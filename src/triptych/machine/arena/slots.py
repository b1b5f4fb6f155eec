"""Slots: the places of embeddings, and of other tensors, in an arena."""

from triptych.domain.embedding import GENERATION_NBYTES, TensorSpec
from triptych.domain.record import record

Key = bytes
"""Full digest of the identity of a slot's content."""


@record
class Slot:
    """An embedding's place: ``generation | payload | generation``, from ``offset`` on."""

    key: Key
    generation: int
    offset: int
    tensors: tuple[TensorSpec, ...]
    tokens: int
    payload_nbytes: int

    @property
    def slot_nbytes(self) -> int:
        return self.payload_nbytes + 2 * GENERATION_NBYTES
