"""Events exchanged by the router's two machines: an effect of one is an event of the other. A request is identified by
its number, a call by the number of its credit (an item at an encoder, or the request at a text instance).
"""

from collections.abc import Iterable, Mapping
from dataclasses import field
from math import inf

from triptych.domain.embedding import LeaseId
from triptych.domain.encoding import EncodeResult
from triptych.domain.kv_segment import KnownSegment
from triptych.domain.queue_position import FIRST_COME, QueuePosition
from triptych.domain.record import record
from triptych.errors import TriptychError
from triptych.machine.router.losses import Loss
from triptych.machine.router.prompt_identity import PromptIdentity
from triptych.policy.placement.wants import Want

# --- requests and answers
# ------------------------------------------------------------------------------------------------


@record
class CreditsWanted:
    """A request wants a credit for each item. Without ``wait`` it is answered at once.

    ``again``: what was lost or failed is redone, within the retry budget of the pool.
    """

    request: int
    wants: tuple[Want, ...]
    wait: bool
    queue_position: QueuePosition = FIRST_COME
    """Orders the waiting requests."""
    reason: str = ""
    again: bool = False
    suspect: bool = False
    """An instance ended while it worked on the request, which may be why: it wants encoders without other such requests."""


@record
class HedgeWanted:
    """An item takes longer than others of its size: the request wants another encoder for it as well.

    It is answered only if it is granted, which needs an encoder without work and a share of the budget for hedges.
    """

    request: int
    want: Want
    reason: str = ""


@record
class CreditsAbandoned:
    """The request no longer waits for credits."""

    request: int
    reason: str = ""


@record
class TextWanted:
    """A request wants a text instance for a prompt of ``tokens``.

    It is answered at once, unless its answer will be transferred and no instance that decodes has KV memory for it: then it waits.
    Instances in ``avoid`` are not chosen; one that goes on with an answer may return to them if there is no other, as its
    stream broke there for a reason that can pass.
    """

    request: int
    tokens: int
    avoid: frozenset[str] = frozenset()
    holders: Mapping[str, int] = field(default_factory=dict)
    """Bytes of its embeddings by the ids of the encoders that hold them."""
    reason: str = ""
    choices: int = 1
    max_tokens: int = 0
    """Most tokens of the answer, for each choice."""
    with_items: bool = False
    continues: bool = False
    """Whether some of its answer has been sent: the instance must be able to go on with it."""
    early: bool = False
    """For beginnings of its prompt, while items are missing: it is answered only if it is granted, by an instance that has no
    other prompt to compute."""
    kept_credit: int | None = None
    """What was granted for them, or when it was moved: granted again if its instance is still the better one, else returned."""
    kept_tokens: int = 0
    """Of the prompt, those that are computed there."""
    queue_position: QueuePosition = FIRST_COME
    """Orders those that wait."""
    sender: str = ""
    """The address of the instance that holds its keys and values, if one has handed them over ..."""
    covered_tokens: int = 0
    """... and of how many positions."""
    moves: int = 0
    """How often it has left an instance where it waited."""
    prompt: PromptIdentity | None = field(default=None, compare=False, repr=False)
    """Finds the prefix of its prompt at other instances; None if that is not wanted."""
    suspect: bool = False
    """As in CreditsWanted."""
    lora: str = ""
    """Digest of its LoRA adapter, which the instance must have; empty without one."""


@record
class Grant:
    """One credit: the instance, and why it was chosen."""

    credit: int
    item: int | None
    """None for the request's place at a text instance."""
    name: str
    """The instance's address."""
    instance_id: str
    """The id that the instance reports."""
    reason: str = ""
    hedge_after_s: float = inf
    """When to want a hedge for the item, if it is not encoded by then."""
    hedges: bool = False
    """Whether it is an answer to HedgeWanted: the call that takes long goes on."""
    transfers_kv: bool = False
    """The text instance computes the prompt only: the answer goes on elsewhere."""
    prefix: tuple[KnownSegment, ...] = ()
    """Segments of the prompt, from its beginning on, that it may pull from others."""


@record
class Granted:
    """All credits that the request wanted."""

    request: int
    grants: tuple[Grant, ...]


@record
class PlaceRefused:
    """The request cannot have what it wanted: not now if it did not wait, else not at all."""

    request: int
    error: TriptychError
    final: bool = False
    """Whether the request must not ask again, as waiting will not help."""


@record
class TextPoolLost:
    """No text instance has been usable for the whole grace period: requests that need one fail."""

    error: TriptychError
    begun: bool = True
    """Whether those whose answers have begun fail too: no instance is left that could go on with them."""


@record
class Moved:
    """The request is to leave the text instance of this credit, where it waits: that call is cancelled.

    ``grant`` is its place at another one; None if it is to want one anew.
    """

    request: int
    credit: int
    grant: Grant | None
    reason: str


Answer = Granted | PlaceRefused | TextPoolLost | Moved

# --- results of calls
# ----------------------------------------------------------------------------------------------------


@record
class ItemEncoded:
    """An encoder has encoded the item of this credit and holds its embedding."""

    credit: int
    name: str
    result: EncodeResult


@record
class CallFailed:
    """A call for this credit (encode, lease or generate) failed at the instance ``name``."""

    credit: int
    name: str
    error: TriptychError
    drains: bool = False
    """The instance drains, or has left: it ends for a reason that the request has no part in."""
    loss: Loss | None = None
    """The instance was lost, for a reason that the request may have a part in."""
    has_ended: bool = False
    """With ``loss``: its engine said that it has failed. Else the connection broke."""
    survivors: frozenset[Loss] = frozenset()
    """Instances that the request was thought to be lost with, and that still answer."""


@record
class Overtaken:
    """The hedge of this credit's item was answered first: the call of this credit is cancelled."""

    credit: int


@record
class FirstToken:
    """The text instance of this credit has produced its first token."""

    credit: int


# --- credits and embeddings ------------------------------------------------------------------------------------------


@record
class EmbeddingGone:
    """The encoder of this credit no longer has the embedding, or (``unusable``) nobody can use it."""

    credit: int
    unusable: bool = False


@record
class EmbeddingsRead:
    """A reader has the embeddings of these credits, or may read them from now on."""

    credits: tuple[int, ...]


@record
class CreditReturned:
    """The credit's leases are released or were never granted, or its text instance's call has ended."""

    credit: int


@record
class LeasesTaken:
    """Leases at the instance ``name`` that may be held from now on, and that no credit covers."""

    name: str
    lease_ids: tuple[LeaseId, ...]


@record
class LeasesReturned:
    """Leases are released, or left to expire, or another one releases them; and with them the credits that cover some of them."""

    name: str
    lease_ids: tuple[LeaseId, ...]
    credits: tuple[int, ...] = ()


@record
class Release:
    """Release leases at the instance ``name``, then return the credit. ``credit`` is None if already returned."""

    name: str
    credit: int | None
    lease_ids: tuple[LeaseId, ...]
    reason: str = ""


def released_together(releases: Iterable[Release]) -> tuple[tuple[LeaseId, ...], tuple[int, ...]]:
    """The leases and the credits of several releases at one instance, for one call."""
    lease_ids: list[LeaseId] = []
    credits_: list[int] = []
    for release in releases:
        lease_ids += release.lease_ids
        if release.credit is not None:
            credits_.append(release.credit)
    return tuple(lease_ids), tuple(credits_)
