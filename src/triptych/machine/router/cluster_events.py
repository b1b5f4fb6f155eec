"""What the router's memory of its instances is told, and what it says is to be done."""

from dataclasses import dataclass

from triptych.domain.instance import EncoderLoad, InstanceInfo, TextLoad
from triptych.errors import TriptychError
from triptych.policy.routing import Content, Want

# --- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class InstanceSeen:
    """An instance answered; it is reachable again."""

    name: str
    info: InstanceInfo


@dataclass(frozen=True, slots=True)
class LoadReported:
    name: str
    load: EncoderLoad | TextLoad


@dataclass(frozen=True, slots=True)
class InstanceSuspected:
    """A call to it failed in a way that says it is down: it gets nothing more until it is seen again."""

    name: str


@dataclass(frozen=True, slots=True)
class CreditsWanted:
    """A run asks for a place for each item. With ``wait`` False it is answered at once, for or against.

    Of runs that wait, those of the lowest ``priority`` are served first.
    """

    run: int
    wants: tuple[Want, ...]
    wait: bool
    priority: int = 0


@dataclass(frozen=True, slots=True)
class CreditsAbandoned:
    """The run no longer waits."""

    run: int


@dataclass(frozen=True, slots=True)
class ItemEnded:
    """The encoder no longer works on the item of this credit; its bytes are still taken."""

    credit: int


@dataclass(frozen=True, slots=True)
class CreditReturned:
    """The leases of this credit are released, or its item never got any."""

    credit: int


@dataclass(frozen=True, slots=True)
class ArenaRefused:
    """An encoder had no memory although its credits said so (fragmentation, other routers)."""

    name: str


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """An instance's engine failed a request before there was anything of it: it may fail all."""

    name: str


@dataclass(frozen=True, slots=True)
class TextWorked:
    """A text instance gave a first token."""

    name: str


@dataclass(frozen=True, slots=True)
class EmbeddingHeld:
    name: str
    content: Content


@dataclass(frozen=True, slots=True)
class EmbeddingGone:
    name: str
    content: Content


@dataclass(frozen=True, slots=True)
class TextWanted:
    """A run asks for a text instance for ``tokens`` (prompt with images, and answer), whose embeddings ``holders`` hold."""

    run: int
    tokens: int
    avoid: frozenset[str] = frozenset()
    holders: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class TextReturned:
    """The dispatch of this credit has ended."""

    credit: int


@dataclass(frozen=True, slots=True)
class Tick:
    """The time that a WakeAt named has come."""


ClusterEvent = (
    InstanceSeen
    | LoadReported
    | InstanceSuspected
    | CreditsWanted
    | CreditsAbandoned
    | ItemEnded
    | CreditReturned
    | ArenaRefused
    | EngineFailed
    | TextWorked
    | EmbeddingHeld
    | EmbeddingGone
    | TextWanted
    | TextReturned
    | Tick
)

# --- effects ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Grant:
    """One item's place: the encoder, why it was chosen, and the credit to return."""

    credit: int
    item: int
    encoder: str
    reason: str


@dataclass(frozen=True, slots=True)
class Granted:
    run: int
    grants: tuple[Grant, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """The run's CreditsWanted cannot be met (now, if it did not want to wait; at all, if it did)."""

    run: int
    error: TriptychError


@dataclass(frozen=True, slots=True)
class TextGranted:
    run: int
    text: str
    credit: int


@dataclass(frozen=True, slots=True)
class TextRefused:
    run: int
    error: TriptychError


@dataclass(frozen=True, slots=True)
class TextPoolLost:
    """There has been no text instance for the whole grace: whoever still needs one will not get it."""

    error: TriptychError


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Send a Tick at that time; replaces the one asked for before."""

    at_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class Noticed:
    """For the log."""

    name: str
    what: str


ClusterEffect = Granted | Refused | TextGranted | TextRefused | TextPoolLost | WakeAt | Noticed
