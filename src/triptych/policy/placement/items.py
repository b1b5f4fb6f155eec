"""Items to encoders: all of a request or none.

The default is ModServe's (section 4.3, "Request Routing Across Instances"): each item goes to the encoder with the fewest pending
image tokens, so a request with many images spreads over the pool. An encoder that has the same content comes first, where that pays.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from enum import Enum, StrEnum

from triptych.domain.item_plan import Content
from triptych.domain.record import record
from triptych.domain.rng import Rng
from triptych.policy.backlog import EncodeBacklog, ends_s
from triptych.policy.placement.affinity import Holding, counted, pays
from triptych.policy.placement.filters import (
    HEDGE_FILTERS,
    ITEM_FILTERS,
    Filter,
    Places,
    has_lora,
    not_excluded,
    usable,
)
from triptych.policy.placement.policy import LEAST_LOADED, PlacementPolicy, in_turn
from triptych.policy.placement.pool import Pool
from triptych.policy.placement.wants import Placeable, Want


class Why(StrEnum):
    """Why an encoder was chosen."""

    ROUTED = "chosen by the routing policy"
    HOLDS_EMBEDDING = "holds the embedding"
    ENCODES_ALREADY = "is encoding the same content already"
    ONLY_PACKING = "the items fit in no simpler way"
    SAME_CONTENT = "encodes the same content for this request"
    LAST_RESORT = "the only one, though it failed this item before"
    HEDGE = "has nothing to do, while the item takes long elsewhere"


@record
class Choice:
    """The encoder chosen for an item, the load it adds, and the reason."""

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
    TOO_MANY_ITEMS = "more items than the encoders take at once"
    NO_LORA = "no encoder has the LoRA adapter"


def place_items(
    pool: Pool, wants: Sequence[Want], placement: PlacementPolicy, rng: Rng
) -> tuple[Choice, ...] | Shortage:
    """Place all items of a request or none: the largest first, each given the load of those before it (LPT).

    Largest first keeps the longest queue within 4/3 of the optimum, and packs bytes well. An encoder that holds an
    item's embedding, or else one that is encoding it, is preferred over the one that ``placement`` chose if that ``pays``
    (``affinity``). Items of equal content go to the same encoder, which encodes them once. The kind of shortage is found by placing on
    empty arenas: NO_CREDIT only if waiting can help; NEVER_FITS and TOO_MANY_ITEMS only if all encoders are known and no packing
    exists. Whether it is NO_ENCODER or NO_LORA does not depend on the load.
    """
    choices = _place(pool, wants, placement, rng)
    if choices is not None:
        return choices
    by_load = replace(LEAST_LOADED, filters=placement.filters)
    if placement != by_load and (choices := _place(pool, wants, by_load, rng)) is not None:
        return choices  # where another policy found no room
    if any(want.lora and not has_lora(pool, want, pool.all) for want in wants):
        return Shortage.NO_LORA
    able = usable(pool, wants[0], pool.all)
    if any(want.exclude.issuperset(pool.name[place] for place in has_lora(pool, want, able)) for want in wants):
        return Shortage.NO_ENCODER
    empty = pool.emptied()
    if _place(empty, wants, by_load, rng) is not None:
        return Shortage.NO_CREDIT
    return _any_packing(pool, empty, wants, by_load, rng)


def _place(pool: Pool, wants: Sequence[Want], placement: PlacementPolicy, rng: Rng) -> tuple[Choice, ...] | None:
    filters = ITEM_FILTERS.after(placement.filters)
    if len(wants) > 1:
        pool, wants = pool.copy(), sorted(wants, key=_largest_first)
    choices: list[Choice] = []
    placed: dict[Content, str] = {}
    for want in wants:
        content, tokens = want.content, want.tokens
        if content in placed:
            choices.append(Choice(want.item, placed[content], 0, 0, Why.SAME_CONTENT))
            continue
        places = filters.passing(pool, want)
        if not places:
            return None
        chosen = placement.pick(pool, want, places, placement.scores, rng)
        why = Why.LAST_RESORT if pool.name[chosen] in want.avoid else Why.ROUTED
        if holdings := pool.held(content):
            weighed = _in_seconds if placement.predicts else _in_tokens
            if (found := _holder(pool, holdings, places, weighed(pool, want, places, chosen))) is not None:
                chosen, holding = found
                why = Why.ENCODES_ALREADY if holding.encoding else Why.HOLDS_EMBEDDING
                tokens = counted(holding, tokens)
        name = placed[content] = pool.name[chosen]
        choices.append(Choice(want.item, name, tokens, want.nbytes, why))
        if len(choices) < len(wants):
            pool.add(chosen, want, tokens, want.nbytes)
    return tuple(choices) if len(choices) == 1 else _in_order(choices)


def _largest_first(want: Want) -> tuple[int, int]:
    return -want.tokens, want.item


def _in_order(choices: list[Choice]) -> tuple[Choice, ...]:
    return tuple(sorted(choices, key=lambda choice: choice.item))


def _any_packing(
    pool: Pool, empty: Pool, wants: Sequence[Want], by_load: PlacementPolicy, rng: Rng
) -> tuple[Choice, ...] | Shortage:
    """Largest first does not find every packing: search for one before reporting that the items never fit."""
    search = _Search(by_load.filters)
    if search.pack(empty, wants) is not None:
        encoders = _Search(by_load.filters).pack(pool, wants)
        return Shortage.NO_CREDIT if encoders is None else _packed(wants, encoders)
    unknown = 0 in pool.arena_bytes
    if unknown or search.pack(pool.emptied(revived=True), wants) is not None or search.spent:
        return Shortage.NO_ENCODER
    uncounted = pool.emptied(revived=True, uncounted=True)
    return Shortage.NEVER_FITS if _place(uncounted, wants, by_load, rng) is None else Shortage.TOO_MANY_ITEMS


def _packed(wants: Iterable[Want], encoders: dict[Content, str]) -> tuple[Choice, ...]:
    choices: list[Choice] = []
    packed: set[Content] = set()
    for want in wants:
        encoder = encoders[want.content]
        if want.content in packed:
            choices.append(Choice(want.item, encoder, 0, 0, Why.SAME_CONTENT))
        else:
            choices.append(Choice(want.item, encoder, want.tokens, want.nbytes, Why.ONLY_PACKING))
            packed.add(want.content)
    return _in_order(choices)


def place_hedge(pool: Pool, want: Want, placement: PlacementPolicy, rng: Rng) -> tuple[str, int] | None:
    """A second encoder for an item that takes long at another, which ``want`` excludes, and the tokens that it adds there.

    It is one that has the embedding or is encoding it, or else one that has nothing to do; None if there is neither. Under
    overload all have, so that hedges do not add to it (Dean and Barroso, The Tail at Scale).
    """
    places = HEDGE_FILTERS.after(placement.filters).passing(pool, want)
    found = _holder(pool, pool.held(want.content), places, lambda place: (pool.pending_tokens[place], 0, want.tokens))
    if found is not None:
        place, holding = found
        return pool.name[place], counted(holding, want.tokens)
    idle = [place for place in places if not pool.pending[place]]
    return (pool.name[in_turn(pool, want, idle, placement.scores, rng)], want.tokens) if idle else None


# --- encoders that have the embedding --------------------------------------------------------------------------------

Costs = Callable[[int], tuple[float, float, float]]
"""Of a place: what it has to do, what the chosen one has, and the item's own; all in tokens or all in seconds."""


def _holder(pool: Pool, holdings: Iterable[Holding], places: Sequence[int], costs: Costs) -> tuple[int, Holding] | None:
    """The first of these places with the item's embedding, or that is encoding it, where that ``pays``."""
    for holding in holdings:
        place = pool.places.get(holding.name)
        if place is not None and place in places and pays(holding, *costs(place)):
            return place, holding
    return None


def _in_tokens(pool: Pool, want: Want, places: Sequence[int], chosen: int) -> Costs:
    del places
    return lambda place: (pool.pending_tokens[place], pool.pending_tokens[chosen], want.tokens)


def _in_seconds(pool: Pool, want: Want, places: Sequence[int], chosen: int) -> Costs:
    """In tokens where the seconds of one place are not known."""
    prices = pool.prices(want)
    ends = ends_s([pool.backlog[place] for place in places], prices)
    if ends is None:
        return _in_tokens(pool, want, places, chosen)
    by_place, first_s = dict(zip(places, ends, strict=True)), min(ends)

    def costs(place: int) -> tuple[float, float, float]:
        backlog = pool.backlog[place]
        item_s = backlog.tolerated_s(prices[backlog.speed]) if isinstance(backlog, EncodeBacklog) else 0.0
        return by_place[place] - item_s, first_s - item_s, item_s

    return costs


# --- any packing -----------------------------------------------------------------------------------------------------

_MAX_STEPS = 500
_ANY_NUMBER = 1 << 31
"""Of items, where their number has no limit."""


class _Search:
    """Searches for packings in a bounded number of steps, which count together."""

    def __init__(self, filters: Sequence[Filter[Placeable]] = ()) -> None:
        """``filters`` are those of the policy."""
        self._filters = [condition.keep for condition in filters if not condition.soft]
        self._steps = 0

    @property
    def spent(self) -> bool:
        """Whether the search gave up, so that finding nothing proves nothing."""
        return self._steps >= _MAX_STEPS

    def pack(self, pool: Pool, wants: Sequence[Want]) -> dict[Content, str] | None:
        """The encoder of each content; None if none was found."""
        firsts = {want.content: want for want in reversed(wants)}
        distinct = sorted(firsts.values(), key=lambda want: -want.nbytes)
        rooms = {place: pool.available_bytes[place] for place in usable(pool, distinct[0], pool.all)}
        slots = {place: self._slots(pool, place) for place in rooms}
        found = self._fill([(want, self._able(pool, want)) for want in distinct], rooms, slots)
        return None if found is None else {content: pool.name[place] for content, place in found.items()}

    def _able(self, pool: Pool, want: Want) -> Places:
        places = has_lora(pool, want, not_excluded(pool, want, usable(pool, want, pool.all)))
        for keep in self._filters:
            places = keep(pool, want, places)
        return places

    @staticmethod
    def _slots(pool: Pool, place: int) -> int:
        most = pool.max_items[place]
        return max(0, most - pool.pending[place]) if most else _ANY_NUMBER

    def _fill(
        self, wants: list[tuple[Want, Places]], rooms: dict[int, int], slots: dict[int, int]
    ) -> dict[Content, int] | None:
        """``wants`` with the places that may take them; ``rooms`` and ``slots`` are what is left, and left as they were."""
        self._steps += 1
        if self.spent or sum(want.nbytes for want, _ in wants) > sum(max(0, room) for room in rooms.values()):
            return None
        if len(wants) > sum(slots.values()):
            return None
        if not wants:
            return {}
        (want, able), *rest = wants
        fitting = [place for place in able if rooms[place] >= want.nbytes and slots[place]]
        for place in sorted(fitting, key=lambda place: rooms[place]):
            rooms[place] -= want.nbytes
            slots[place] -= 1
            placed = self._fill(rest, rooms, slots)
            rooms[place] += want.nbytes
            slots[place] += 1
            if placed is not None:
                return placed | {want.content: place}
        return None
