"""Events and effects of a holder's arena, and its slots."""

from enum import Enum

from triptych.domain.embedding import GENERATION_NBYTES, LeaseId, TensorSpec, Ticket
from triptych.domain.record import record
from triptych.errors import TriptychError

Key = bytes
"""Full digest of an embedding's identity."""


class SlotState(Enum):
    WRITING = "writing"
    READY = "ready"


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


# --- events ----------------------------------------------------------------------------------------------------------


@record
class Reserve:
    """Reserve memory for an embedding to be computed. Answered by Reserved, Present or ReservationRefused."""

    key: Key
    tensors: tuple[TensorSpec, ...]
    tokens: int


@record
class Commit:
    """The embedding is written to its slot and sealed. Answered by Present if there is another slot of its name."""

    key: Key
    generation: int
    checksum: int
    named: Key | None = None
    """The slot's key, where that was not known when the slot was reserved, under another. Without effect if that has a slot: then this
    one is freed."""


@record
class Abandon:
    """The embedding will not be made, and nothing writes to its slot any more."""

    key: Key
    generation: int


@record
class GrantLease:
    """A lease for another reader, or an extension. Answered by LeaseGranted or ReservationRefused.

    ``lease_id``: 16 random bytes chosen by the caller. ``generation`` comes from the reader's old ticket; None accepts
    any. ``router_lease``: a second one, which is granted with it; either both are or none.
    """

    key: Key
    lease_id: LeaseId
    lease_s: float
    generation: int | None = None
    router_lease: LeaseId | None = None


@record
class ReleaseLeases:
    """Readers are done. Unknown or expired ids are ignored."""

    lease_ids: tuple[LeaseId, ...]


@record
class ArenaTick:
    """Time has passed: expire leases."""


Event = Reserve | Commit | Abandon | GrantLease | ReleaseLeases | ArenaTick

# --- effects ---------------------------------------------------------------------------------------------------------


@record
class Reserved:
    """The caller may fill the slot; Commit or Abandon must follow."""

    slot: Slot


@record
class Present:
    """The key already has a slot: READY, or still WRITING by another caller."""

    slot: Slot
    state: SlotState


@record
class LeaseGranted:
    ticket: Ticket


@record
class ReservationRefused:
    """``error`` is for the caller: ArenaFull (not now), InvalidMedia (never), LeaseLost, Overloaded, InvalidRequest."""

    key: Key
    error: TriptychError


@record
class SlotEvicted:
    """The embedding is gone: withdraw hints about it."""

    slot: Slot
    reason: str


@record
class Lapsed:
    """A lease expired without a release: its reader died or lost the ticket."""

    key: Key
    reason: str


Effect = Reserved | Present | LeaseGranted | ReservationRefused | SlotEvicted | Lapsed
