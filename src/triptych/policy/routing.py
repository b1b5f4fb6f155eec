"""Where work goes: items to encoders, requests to text instances. Pure functions over a snapshot.

Which instances can take it, is told here; which of them does, by a ``Routing``. The one that is taken unless another is
asked for is ModServe's (section 4.3, "Request Routing Across Instances"): each item goes to the encoder with the least
pending image tokens, so a request with many images spreads over the pool; a request whose items are all encoded goes to
the text instance with the least pending tokens (text and image together, for decoder-only families).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Protocol

from triptych.domain.embedding import GENERATION_NBYTES, TensorSpec, align, payload_nbytes
from triptych.domain.item_plan import Content
from triptych.domain.rng import Rng


@dataclass(frozen=True, slots=True)
class Candidate:
    """An instance at the stages of one pool, as the router believes it to be now.

    What the router has assigned since the instance's last report is included.
    """

    name: str
    """What the router calls it: its address."""
    usable: bool
    """Reachable, neither draining nor leaving, and serving the model."""
    pending_tokens: int
    pending: int
    """Items or requests."""
    arena_bytes: int = 0
    available_bytes: int = 0
    max_items: int = 0
    """Most items that it takes at the same time; 0 for no bound."""
    backoff: bool = False
    """Its engine failed lately: avoided while there is another."""
    instance_id: str = ""
    """What it calls itself, which is what tickets name their holder by."""

    def has_room(self, want: "Want") -> bool:
        """Whether the item fits in now, by bytes and by number."""
        takes_more = self.max_items == 0 or self.pending < self.max_items
        return takes_more and self.available_bytes >= want.nbytes

    def with_item(self, tokens: int, nbytes: int) -> "Candidate":
        """As it is once it has one more item."""
        return Candidate(
            self.name,
            self.usable,
            self.pending_tokens + tokens,
            self.pending + 1,
            self.arena_bytes,
            self.available_bytes - nbytes,
            self.max_items,
            self.backoff,
            self.instance_id,
        )


Candidates = Sequence[Candidate]


@dataclass(frozen=True, slots=True)
class Pool:
    """The instances that serve certain stages, in the order of their names.

    ``turn`` counts the decisions made over this pool: it rotates who wins a tie.
    """

    candidates: tuple[Candidate, ...] = ()
    turn: int = 0
    held: Mapping[Content, str] = field(default_factory=dict)
    """Which of them are believed to hold embeddings: hints, which may be stale."""

    @property
    def usable(self) -> list[Candidate]:
        return [candidate for candidate in self.candidates if candidate.usable]


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

    ROUTED = "chosen by the routing policy"
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


class Routing(Protocol):
    """Chooses among instances that can all take an item, or a request. There is at least one.

    They are in the order in which ties are to be decided: whoever is first now is last next time. ``holders`` are the
    instances (by their own ids) that hold the request's embeddings already.
    """

    def __call__(self, candidates: Candidates, *, holders: frozenset[str], rng: Rng) -> Candidate: ...


def least_loaded(candidates: Candidates, *, holders: frozenset[str], rng: Rng) -> Candidate:
    """The least pending tokens, then the least items or requests, then one that need not pull from another process."""
    del rng

    def load(one: Candidate) -> tuple[int, int, bool]:
        return one.pending_tokens, one.pending, one.instance_id not in holders

    return min(candidates, key=load) if len(candidates) > 1 else candidates[0]


def assign_items(pool: Pool, wants: Sequence[Want], routing: Routing, rng: Rng) -> tuple[Choice, ...] | Shortage:
    """Place all items of a request, or none: the largest first, each on what the ones before it left (LPT).

    Largest first keeps the longest queue within 4/3 of the shortest possible, and packs bytes well too. An encoder that
    holds an item's embedding is taken instead of the one that ``routing`` chose while it has at most the item's tokens more
    pending: if the hint is right the item costs nothing there, and if it is stale the wait is no longer than the encoding
    that a right one would have saved. One that fails everything is fast, and so always the least loaded: while one is in
    backoff, items rather wait for another that can take them.
    The same
    content again goes to the same encoder, which encodes and keeps it once. What is short is found by trying again on
    empty arenas, so that a request is told to wait only for what can come; that it never fits is said only when all
    encoders are known and no packing exists.
    """
    usable = {candidate.name for candidate in pool.usable}
    if not all(usable - want.exclude for want in wants) or not usable:
        return Shortage.NO_ENCODER
    choices = _place(pool, wants, routing, rng)
    if choices is None and routing is not least_loaded:
        choices = _place(pool, wants, least_loaded, rng)  # one that looks at loads may find room where another did not
    if choices is not None:
        return choices
    empty = _emptied(pool)
    if _place(empty, wants, least_loaded, rng) is not None:
        return Shortage.NO_CREDIT
    return _any_packing(pool, empty, wants)


def _any_packing(pool: Pool, empty: Pool, wants: Sequence[Want]) -> tuple[Choice, ...] | Shortage:
    """Largest first does not find every packing: look for one before anything is called impossible."""
    search = _Search()
    if (choices := search.pack(pool, wants)) is not None:
        return choices
    if search.pack(empty, wants) is not None:
        return Shortage.NO_CREDIT
    revived = _emptied(pool, revived=True)
    unknown = any(candidate.arena_bytes == 0 for candidate in pool.candidates)
    if unknown or search.pack(revived, wants) is not None or search.spent:
        return Shortage.NO_ENCODER
    return Shortage.NEVER_FITS


def choose_text(
    pool: Pool,
    routing: Routing,
    rng: Rng,
    *,
    avoid: frozenset[str] = frozenset(),
    holders: frozenset[str] = frozenset(),
) -> Candidate | None:
    """A usable text instance outside ``avoid``, not one in backoff while there is another; None when there is none."""
    able = [text for text in pool.usable if text.name not in avoid]
    able = [text for text in able if not text.backoff] or able
    return routing(_in_turn(able, pool.turn), holders=holders, rng=rng) if able else None


def _in_turn(candidates: list[Candidate], turn: int) -> list[Candidate]:
    first = turn % len(candidates)
    return candidates[first:] + candidates[:first]


def _able(candidates: Candidates, want: Want) -> list[Candidate]:
    """The usable ones that can have the item now; none that failed it before, or is in backoff, while there is another."""
    able = [one for one in candidates if one.arena_bytes >= want.nbytes and one.name not in want.exclude]
    able = [one for one in able if not one.backoff] or able
    roomy = [one for one in able if one.has_room(want)]
    return [one for one in roomy if one.name not in want.avoid] or roomy


def _place(pool: Pool, wants: Sequence[Want], routing: Routing, rng: Rng) -> tuple[Choice, ...] | None:
    candidates, turn = pool.usable, pool.turn
    choices: list[Choice] = []
    placed: dict[Content, str] = {}
    for want in sorted(wants, key=lambda want: (-want.tokens, want.item)):
        if want.content in placed:
            choices.append(Choice(want.item, placed[want.content], 0, 0, Why.SAME_CONTENT))
            continue
        able = _able(candidates, want)
        if not able:
            return None
        chosen = routing(_in_turn(able, turn), holders=frozenset(), rng=rng)
        why = Why.LAST_RESORT if chosen.name in want.avoid else Why.ROUTED
        holder = pool.held.get(want.content)
        for one in able if holder is not None else ():
            if one.name == holder and one.pending_tokens <= chosen.pending_tokens + want.tokens:
                chosen, why = one, Why.HOLDS_EMBEDDING
        choices.append(Choice(want.item, chosen.name, want.tokens, want.nbytes, why))
        placed[want.content] = chosen.name
        if len(choices) < len(wants):
            candidates[candidates.index(chosen)] = chosen.with_item(want.tokens, want.nbytes)
            turn += 1
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

    def pack(self, pool: Pool, wants: Sequence[Want]) -> tuple[Choice, ...] | None:
        firsts = {want.content: want for want in reversed(wants)}
        distinct = sorted(firsts.values(), key=lambda want: -want.nbytes)
        placed = self._fill(pool.usable, distinct)
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

    def _fill(self, candidates: list[Candidate], wants: list[Want]) -> dict[Content, str] | None:
        self._steps += 1
        if self.spent or sum(want.nbytes for want in wants) > sum(max(0, one.available_bytes) for one in candidates):
            return None
        if not wants:
            return {}
        want, *rest = wants
        for candidate in sorted(candidates, key=lambda candidate: candidate.available_bytes):
            if candidate.name in want.exclude or not candidate.has_room(want):
                continue
            left = [one.with_item(want.tokens, want.nbytes) if one is candidate else one for one in candidates]
            if (placed := self._fill(left, rest)) is not None:
                return placed | {want.content: candidate.name}
        return None


def _emptied(pool: Pool, *, revived: bool = False) -> Pool:
    """The encoders without any load; with ``revived``, all of them are usable."""
    candidates = tuple(
        replace(
            candidate,
            usable=candidate.usable or revived,
            pending_tokens=0,
            pending=0,
            available_bytes=candidate.arena_bytes,
        )
        for candidate in pool.candidates
    )
    return replace(pool, candidates=candidates)
