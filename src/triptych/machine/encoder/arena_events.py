"""What a holder's memory is told, what it says is to be done, and the slots that both speak of."""

from dataclasses import dataclass
from enum import Enum

from triptych.domain.embedding import GENERATION_NBYTES, LeaseId, TensorSpec, Ticket, payload_nbytes
from triptych.errors import TriptychError

Key = bytes
"""Whole digest of an embedding's identity."""


class SlotState(Enum):
    WRITING = "writing"
    READY = "ready"


@dataclass(frozen=True, slots=True)
class Slot:
    """An embedding's place: ``generation | payload | generation``, from ``offset`` on."""

    key: Key
    generation: int
    offset: int
    tensors: tuple[TensorSpec, ...]
    tokens: int

    @property
    def payload_nbytes(self) -> int:
        return payload_nbytes(self.tensors)

    @property
    def slot_nbytes(self) -> int:
        return self.payload_nbytes + 2 * GENERATION_NBYTES


# --- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reserve:
    """Memory for an embedding that is about to be made. Answer: Reserved, Present or Refused."""

    key: Key
    tensors: tuple[TensorSpec, ...]
    tokens: int


@dataclass(frozen=True, slots=True)
class Commit:
    """The embedding stands in its slot, sealed."""

    key: Key
    generation: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Abandon:
    """The embedding will not be made, and nothing writes to its slot any more."""

    key: Key
    generation: int


@dataclass(frozen=True, slots=True)
class Grant:
    """A lease for one more reader, or more time for one that is out. Answer: Granted or Refused.

    ``lease_id``: 16 random bytes from outside. ``generation`` is what a further reader's old ticket says; None for
    whatever is there.
    """

    key: Key
    lease_id: LeaseId
    lease_s: float
    generation: int | None = None


@dataclass(frozen=True, slots=True)
class Release:
    """Readers are done; ids that are unknown or over are fine."""

    lease_ids: tuple[LeaseId, ...]


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: sweep the leases."""


Event = Reserve | Commit | Abandon | Grant | Release | Tick

# --- effects ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reserved:
    """The slot is the caller's to fill; Commit or Abandon must follow."""

    slot: Slot


@dataclass(frozen=True, slots=True)
class Present:
    """The key has a slot already: READY to be granted, or still WRITING by somebody else."""

    slot: Slot
    state: SlotState


@dataclass(frozen=True, slots=True)
class Granted:
    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Refused:
    """``error`` is for the caller: ArenaFull (not now), InvalidMedia (never), LeaseLost, Overloaded, InvalidRequest."""

    key: Key
    error: TriptychError


@dataclass(frozen=True, slots=True)
class Evicted:
    """The embedding is no longer here: hints about it can be withdrawn."""

    slot: Slot
    reason: str


@dataclass(frozen=True, slots=True)
class Lapsed:
    """A reader never gave its lease back: it died, or lost the ticket."""

    key: Key
    reason: str


Effect = Reserved | Present | Granted | Refused | Evicted | Lapsed
