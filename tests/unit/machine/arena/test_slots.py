"""Slots."""

from triptych.domain.embedding import GENERATION_NBYTES
from triptych.machine.arena.slots import Slot


def test_a_slot_has_room_for_a_generation_at_both_ends_of_its_payload() -> None:
    slot = Slot(key=bytes(32), generation=1, offset=64, tensors=(), tokens=3, payload_nbytes=100)
    assert slot.slot_nbytes == 100 + 2 * GENERATION_NBYTES
