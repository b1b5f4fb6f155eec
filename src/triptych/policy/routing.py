"""Where work goes: items to encoders, requests to text instances. Pure functions over a snapshot.

ModServe section 4.3 ("Request Routing Across Instances"): each item goes to the encoder with the least pending image
tokens, so a request with many images spreads over the pool; a request whose items are all encoded goes to the text
instance with the least pending tokens (text and image together, for decoder-only families).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from triptych.domain.embedding import GENERATION_NBYTES, TensorSpec, align, payload_nbytes
from triptych.domain.item_plan import Content


@dataclass(frozen=True, slots=True)
class EncoderView:
    """An encoder as the router believes it to be now, its own assignments since the last report included."""

    name: str
    usable: bool
    """Reachable, not draining, and serving the model."""
    pending_tokens: int
    pending_items: int
    arena_bytes: int
    available_bytes: int
    max_items: int = 0
    """Most items that it takes at the same time; 0 for no bound."""
    backoff: bool = False
    """Its engine failed lately: avoided while there is another."""

    def has_room(self, want: "Want") -> bool:
        """Whether the item fits in now, by bytes and by number."""
        takes_more = self.max_items == 0 or self.pending_items < self.max_items
        return takes_more and self.available_bytes >= want.nbytes


@dataclass(frozen=True, slots=True)
class TextView:
    """A text instance as the router believes it to be now."""

    name: str
    usable: bool
    pending_tokens: int
    pending_requests: int
    backoff: bool = False
    """Its engine failed lately: avoided while there is another."""
    instance_id: str = ""
    """What it calls itself, which is what tickets name their holder by."""


@dataclass(frozen=True, slots=True)
class ClusterView:
    """All instances. The turns count decisions, for each pool its own: they rotate who wins a tie."""

    encoders: tuple[EncoderView, ...] = ()
    texts: tuple[TextView, ...] = ()
    encoder_turn: int = 0
    text_turn: int = 0
    held: Mapping[Content, str] = field(default_factory=dict)
    """The encoders that are believed to hold embeddings: hints, which may be stale."""


@dataclass(frozen=True, slots=True)
class Want:
    """An item that needs an encoder. ``nbytes`` is what its embedding takes in an arena."""

    item: int
    tokens: int
    nbytes: int
    content: Content
    avoid: frozenset[str] = frozenset()
    """Encoders that failed this item before: taken only when there is no other."""
    exclude: frozenset[str] = frozenset()
    """Encoders that must not get it."""


class Why(Enum):
    """Why a placement was chosen."""

    LEAST_LOADED = "least pending tokens"
    HOLDS_EMBEDDING = "holds the embedding"
    ONLY_PACKING = "the items fit in no simpler way"
    SAME_CONTENT = "encodes the same content for this request"
    LAST_RESORT = "the only one, though it failed this item before"


@dataclass(frozen=True, slots=True)
class Choice:
    """An item's encoder, what it adds to the load there, and why it was chosen."""

    item: int
    encoder: str
    tokens: int
    nbytes: int
    why: Why


class Shortage(Enum):
    """Why items cannot be placed now."""

    NO_ENCODER = "no encoder, or not enough of them, is available"
    NO_CREDIT = "the encoders' arenas are full"
    NEVER_FITS = "larger than the encoders' arenas"


def slot_nbytes(tensors: tuple[TensorSpec, ...]) -> int:
    """Arena bytes of an embedding that consists of these tensors, generation words included."""
    return align(payload_nbytes(tensors) + 2 * GENERATION_NBYTES)


def choose_encoder(view: ClusterView, want: Want) -> Choice | None:
    """The encoder with the least pending tokens among those that are usable and have room for the item, if any.

    Equal loads go by number of items, then by name, rotated by ``view.encoder_turn`` so that requests with one image
    do not all start at the first. The encoder that holds the embedding is taken instead while it has at most
    ``want.tokens`` more pending than the best: if the hint is right the item costs nothing there, and if it is stale
    the wait is no longer than the encoding that a right one would have saved.

    An encoder that fails everything is fast, and so always the least loaded: while one is in backoff, items rather wait
    for another that can take them.
    """
    able = [encoder for encoder in view.encoders if encoder.usable and encoder.arena_bytes >= want.nbytes]
    able = [encoder for encoder in able if encoder.name not in want.exclude]
    able = [encoder for encoder in able if not encoder.backoff] or able
    roomy = [encoder for encoder in able if encoder.has_room(want)]
    candidates = [encoder for encoder in roomy if encoder.name not in want.avoid] or roomy
    if not candidates:
        return None
    rank = _rotation([encoder.name for encoder in view.encoders], view.encoder_turn)
    best = min(candidates, key=lambda encoder: (encoder.pending_tokens, encoder.pending_items, rank[encoder.name]))
    holder = view.held.get(want.content)
    for encoder in candidates:
        if encoder.name == holder and encoder.pending_tokens <= best.pending_tokens + want.tokens:
            return Choice(want.item, encoder.name, want.tokens, want.nbytes, Why.HOLDS_EMBEDDING)
    why = Why.LAST_RESORT if best.name in want.avoid else Why.LEAST_LOADED
    return Choice(want.item, best.name, want.tokens, want.nbytes, why)


def assign_items(view: ClusterView, wants: Sequence[Want]) -> tuple[Choice, ...] | Shortage:
    """Place all items of a request, or none: the largest first, each on what the ones before it left (LPT).

    Largest first keeps the longest queue within 4/3 of the shortest possible, and packs bytes well too. The same
    content again goes to the same encoder, which encodes and keeps it once. What is short is found by trying again on
    empty arenas, so that a request is told to wait only for what can come; that it never fits is said only when all
    encoders are known and no packing exists.
    """
    usable = {encoder.name for encoder in view.encoders if encoder.usable}
    if not all(usable - want.exclude for want in wants) or not usable:
        return Shortage.NO_ENCODER
    choices = _place(view, wants)
    if choices is not None:
        return choices
    empty = _emptied(view)
    if _place(empty, wants) is not None:
        return Shortage.NO_CREDIT
    return _any_packing(view, empty, wants)


def _any_packing(view: ClusterView, empty: ClusterView, wants: Sequence[Want]) -> tuple[Choice, ...] | Shortage:
    """Largest first does not find every packing: look for one before anything is called impossible."""
    search = _Search()
    if (choices := search.pack(view, wants)) is not None:
        return choices
    if search.pack(empty, wants) is not None:
        return Shortage.NO_CREDIT
    revived = _emptied(view, revived=True)
    unknown = any(encoder.arena_bytes == 0 for encoder in view.encoders)
    if unknown or search.pack(revived, wants) is not None or search.spent:
        return Shortage.NO_ENCODER
    return Shortage.NEVER_FITS


def choose_text(
    view: ClusterView, *, avoid: frozenset[str] = frozenset(), holders: frozenset[str] = frozenset()
) -> str | None:
    """The usable text instance with the least pending tokens outside ``avoid``, or None when there is none.

    Ties go by number of requests, then to one that is among the ``holders`` of the request's embeddings, for it encodes as
    well and need not pull them from another process; then by name, rotated as for encoders.
    """
    usable = [text for text in view.texts if text.usable and text.name not in avoid]
    usable = [text for text in usable if not text.backoff] or usable
    if not usable:
        return None
    rank = _rotation([text.name for text in view.texts], view.text_turn)

    def load(text: TextView) -> tuple[int, int, bool, int]:
        return text.pending_tokens, text.pending_requests, text.instance_id not in holders, rank[text.name]

    return min(usable, key=load).name


def _rotation(names: list[str], turn: int) -> dict[str, int]:
    ordered = sorted(names)
    return {name: (position - turn) % len(ordered) for position, name in enumerate(ordered)}


def _place(view: ClusterView, wants: Sequence[Want]) -> tuple[Choice, ...] | None:
    choices: list[Choice] = []
    placed: dict[Content, str] = {}
    for want in sorted(wants, key=lambda want: (-want.tokens, want.item)):
        if want.content in placed:
            choices.append(Choice(want.item, placed[want.content], 0, 0, Why.SAME_CONTENT))
            continue
        choice = choose_encoder(view, want)
        if choice is None:
            return None
        choices.append(choice)
        placed[want.content] = choice.encoder
        view = _with_load(view, choice)
    return tuple(sorted(choices, key=lambda choice: choice.item))


_MAX_SEARCH_STEPS = 500


class _Search:
    """Looks for any packing at all, load aside, in a bounded number of steps."""

    def __init__(self) -> None:
        self._steps = 0

    @property
    def spent(self) -> bool:
        """Whether it gave up: then nothing found means nothing."""
        return self._steps >= _MAX_SEARCH_STEPS

    def pack(self, view: ClusterView, wants: Sequence[Want]) -> tuple[Choice, ...] | None:
        firsts = {want.content: want for want in reversed(wants)}
        distinct = sorted(firsts.values(), key=lambda want: -want.nbytes)
        usable = replace(view, encoders=tuple(encoder for encoder in view.encoders if encoder.usable))
        placed = self._fill(usable, distinct)
        if placed is None:
            return None
        choices: list[Choice] = []
        for want in wants:
            if firsts[want.content] is want:
                choice = Choice(want.item, placed[want.content], want.tokens, want.nbytes, Why.ONLY_PACKING)
            else:
                choice = Choice(want.item, placed[want.content], 0, 0, Why.SAME_CONTENT)
            choices.append(choice)
        return tuple(sorted(choices, key=lambda choice: choice.item))

    def _fill(self, view: ClusterView, wants: list[Want]) -> dict[Content, str] | None:
        self._steps += 1
        if self.spent or sum(want.nbytes for want in wants) > sum(max(0, e.available_bytes) for e in view.encoders):
            return None
        if not wants:
            return {}
        want, *rest = wants
        for encoder in sorted(view.encoders, key=lambda encoder: encoder.available_bytes):
            if encoder.name in want.exclude or not encoder.has_room(want):
                continue
            choice = Choice(want.item, encoder.name, want.tokens, want.nbytes, Why.ONLY_PACKING)
            if (placed := self._fill(_with_load(view, choice), rest)) is not None:
                return placed | {want.content: encoder.name}
        return None


def _emptied(view: ClusterView, *, revived: bool = False) -> ClusterView:
    """The encoders without any load; with ``revived``, all of them."""
    encoders = tuple(
        replace(
            encoder,
            usable=encoder.usable or revived,
            pending_tokens=0,
            pending_items=0,
            available_bytes=encoder.arena_bytes,
        )
        for encoder in view.encoders
    )
    return replace(view, encoders=encoders)


def _with_load(view: ClusterView, choice: Choice) -> ClusterView:
    encoders = tuple(
        replace(
            encoder,
            pending_tokens=encoder.pending_tokens + choice.tokens,
            pending_items=encoder.pending_items + 1,
            available_bytes=encoder.available_bytes - choice.nbytes,
        )
        if encoder.name == choice.encoder
        else encoder
        for encoder in view.encoders
    )
    return replace(view, encoders=encoders, encoder_turn=view.encoder_turn + 1)
