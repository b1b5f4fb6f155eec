"""Routing: items to encoders, requests to text instances. Pure functions over a snapshot.

This module determines which instances are eligible; a ``Routing`` chooses among them. The default is ModServe's
(section 4.3, "Request Routing Across Instances"): each item goes to the encoder with the fewest pending image tokens,
so a request with many images spreads over the pool; an encoded request goes to the text instance with the fewest
pending tokens (text and image together, for decoder-only families).
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, StrEnum
from types import MappingProxyType
from typing import NamedTuple, Protocol

from triptych.domain.embedding import GENERATION_NBYTES, TensorSpec, align, payload_nbytes
from triptych.domain.item_plan import Content
from triptych.domain.record import record
from triptych.domain.rng import Rng
from triptych.policy.affinity import Having, Holding, counted, nothing_held, pays
from triptych.policy.backlog import Backlog, EncodeBacklog, Held, Price, Speed, Work, ends_s
from triptych.policy.loads import ANY_NUMBER, Loads, less_loaded, preferred, preferred_two, two_of


class Candidate(NamedTuple):
    """An instance in one pool, with the router's current estimate of its load.

    The estimate includes what the router assigned since the instance's last report.
    """

    name: str
    """Its address."""
    usable: bool
    """Reachable, neither draining nor leaving, and serving the model."""
    pending_tokens: int
    pending: int
    """Items or requests."""
    arena_bytes: int = 0
    available_bytes: int = 0
    max_items: int = 0
    """Limit on concurrent items; 0 for none."""
    backoff: bool = False
    """It failed recently, or is tried again just now: avoided while there is another."""
    instance_id: str = ""
    """The id it reports, by which tickets name their holder."""
    probation: bool = False
    """It is back from a backoff: it gets one item or request at a time."""
    backlog: Backlog | None = None
    """The same in predicted seconds; None if nothing predicts them, or no policy of the router needs them."""

    def with_item(self, tokens: int, nbytes: int, backlog: Backlog | None = None) -> "Candidate":
        """A copy with one more item assigned, after which it has this backlog."""
        return Candidate(
            self.name,
            self.usable,
            self.pending_tokens + tokens,
            self.pending + 1,
            self.arena_bytes,
            self.available_bytes - nbytes,
            self.max_items,
            self.backoff or self.probation,
            self.instance_id,
            self.probation,
            backlog,
        )


Candidates = Sequence[Candidate]


@record
class Pool:
    """The instances that serve certain stages, in order of their names.

    ``turn`` counts the decisions over this pool and rotates tie-breaking.
    """

    candidates: Candidates = ()
    turn: int = 0
    held: Having = nothing_held
    """Which instances are believed to hold embeddings, or to be encoding them. These hints may be stale."""
    shared: bool = False
    """Other routers send much to them, of which this one learns late: if all chose the least loaded, they would choose the same."""
    kept: Callable[[], Loads] | None = None
    """Gives the loads of the candidates, where somebody keeps them."""

    @property
    def loads(self) -> Loads:
        """Not to be changed."""
        return _loads(self.candidates) if self.kept is None else self.kept()

    @property
    def usable(self) -> list[Candidate]:
        return [candidate for candidate in self.candidates if candidate.usable]


@record
class Want:
    """An item that needs an encoder. ``nbytes`` is the arena space of its embedding."""

    item: int
    tokens: int
    nbytes: int
    content: Content
    avoid: frozenset[str] = frozenset()
    """Encoders that failed this item: used only if there is no other."""
    exclude: frozenset[str] = frozenset()
    """Encoders that must not be used."""
    media_nbytes: int = 0
    pixels: int = 0
    """Of an image or of a video's frames; samples of a sound."""

    @property
    def work(self) -> Work:
        return Work(self.tokens, self.nbytes, self.media_nbytes, self.pixels)


def _loads(candidates: Candidates) -> Loads:
    loads = Loads([one.name for one in candidates], [one.instance_id for one in candidates])
    for place, one in enumerate(candidates):
        if one.usable and not one.backoff:
            left = one.max_items - one.pending if one.max_items else ANY_NUMBER
            left = min(left, 1) if one.probation else left
            loads.put(place, one.pending_tokens, one.pending, one.available_bytes, left)
    return loads


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


def slot_nbytes(tensors: tuple[TensorSpec, ...]) -> int:
    """Arena bytes of an embedding with these tensors, including generation words."""
    return align(payload_nbytes(tensors) + 2 * GENERATION_NBYTES)


class Routing(Protocol):
    """Chooses among eligible instances, of which there is at least one.

    They are ordered for tie-breaking: the first one moves to the end for the next decision. ``holders`` are the
    instances (by their own ids) that already hold the request's embeddings, or else those on the host with most of them.
    """

    def __call__(self, candidates: Candidates, *, holders: frozenset[str], rng: Rng, work: Work) -> Candidate: ...


def least_loaded(candidates: Candidates, *, holders: frozenset[str], rng: Rng, work: Work) -> Candidate:
    """Fewest pending tokens, then fewest items or requests, then one of ``holders``."""
    del rng, work
    least = _least_loaded(candidates)
    return next((one for one in least if one.instance_id in holders), least[0]) if holders else least[0]


def _least_loaded(candidates: Candidates) -> Candidates:
    """Those between which ``least_loaded`` sees no difference, in their order."""
    fewest = min([one.pending_tokens for one in candidates])
    least = [one for one in candidates if one.pending_tokens == fewest]
    if len(least) == 1:
        return least
    fewest = min([one.pending for one in least])
    return [one for one in least if one.pending == fewest]


def predicted(candidates: Candidates, *, holders: frozenset[str], rng: Rng, work: Work) -> Candidate:
    """The earliest predicted end of ``work``, then one of ``holders``; ``least_loaded`` where that of one is not known."""
    found = ends_s([one.backlog for one in candidates], work)
    if found is None:
        return least_loaded(candidates, holders=holders, rng=rng, work=work)
    ends, _ = found
    first_s = min(ends)
    first = [one for one, end_s in zip(candidates, ends, strict=True) if end_s == first_s]
    return next((one for one in first if one.instance_id in holders), first[0])


_BY_LOAD = (least_loaded, predicted)


def assign_items(pool: Pool, wants: Sequence[Want], routing: Routing, rng: Rng) -> tuple[Choice, ...] | Shortage:
    """Place all items of a request or none: the largest first, each given the load of those before it (LPT).

    Largest first keeps the longest queue within 4/3 of the optimum, and packs bytes well. An encoder that holds an
    item's embedding, or else one that is encoding it, is preferred over the one ``routing`` chose if that ``pays``
    (``policy.affinity``), in tokens, or to ``predicted`` in seconds. Between encoders that are equal to
    ``least_loaded`` and ``predicted`` the item's content decides (``policy.loads.preferred``). An encoder whose engine fails is fast and
    so looks least loaded; while it is in backoff, items wait for another that could take them. Items of equal content
    go to the same encoder, which encodes them once. The kind of shortage is found by placing on empty arenas: NO_CREDIT
    only if waiting can help; NEVER_FITS and TOO_MANY_ITEMS only if all encoders are known and no packing exists. Whether
    it is NO_ENCODER does not depend on the load.
    """
    if routing is least_loaded and (placed := _place_by_load(pool, wants)) is not None:
        return placed
    usable = pool.usable
    if not usable or any(_excludes_all(want, usable) for want in wants):
        return Shortage.NO_ENCODER
    choices = _place(pool, wants, routing, rng)
    if choices is None and routing is not least_loaded:
        choices = _place(pool, wants, least_loaded, rng)  # a load-based policy may find room where another did not
    if choices is not None:
        return choices
    empty = _emptied(pool)
    if _place(empty, wants, least_loaded, rng) is not None:
        return Shortage.NO_CREDIT
    return _any_packing(pool, empty, wants, rng)


def _excludes_all(want: Want, candidates: Candidates) -> bool:
    return bool(want.exclude) and all(one.name in want.exclude for one in candidates)


def _any_packing(pool: Pool, empty: Pool, wants: Sequence[Want], rng: Rng) -> tuple[Choice, ...] | Shortage:
    """Largest first does not find every packing: search for one before reporting that the items never fit."""
    search = _Search()
    if search.pack(empty, wants) is not None:
        return _Search().pack(pool, wants) or Shortage.NO_CREDIT
    revived = _emptied(pool, revived=True)
    unknown = any(candidate.arena_bytes == 0 for candidate in pool.candidates)
    if unknown or search.pack(revived, wants) is not None or search.spent:
        return Shortage.NO_ENCODER
    uncounted = Pool(tuple(one._replace(max_items=0) for one in revived.candidates), pool.turn, pool.held)
    return Shortage.NEVER_FITS if _place(uncounted, wants, least_loaded, rng) is None else Shortage.TOO_MANY_ITEMS


def choose_hedge(pool: Pool, want: Want, routing: Routing, rng: Rng) -> tuple[Candidate, int] | None:
    """A second encoder for an item that takes long at another, which ``want`` excludes, and the tokens that it adds there.

    It is one that has the embedding or is encoding it, or else one that has nothing to do; None if there is neither. Under
    overload all have, so that hedges do not add to it (Dean and Barroso, The Tail at Scale).
    """
    able = [one for one in _roomy(pool.usable, want.nbytes) if not one.backoff and not one.probation]
    able = [one for one in able if one.name not in want.exclude and one.name not in want.avoid]
    holdings = pool.held(want.content)
    if (having := _having(holdings, able, lambda at: (able[at].pending_tokens, 0, want.tokens))) is not None:
        chosen, holding = having
        return chosen, counted(holding, want.tokens)
    idle = [one for one in able if one.pending == 0]
    if not idle:
        return None
    return routing(_in_turn(idle, pool.turn), holders=frozenset(), rng=rng, work=want.work), want.tokens


def _having(
    holdings: Sequence[Holding], able: Candidates, costs: Callable[[int], tuple[float, float, float]]
) -> tuple[Candidate, Holding] | None:
    """The encoder with the item's embedding, or that is encoding it, where that ``pays``.

    ``costs``, of an encoder's place in ``able``, are what it has to do, what the chosen one has, and the item's own.
    """
    for holding in holdings:
        for at, one in enumerate(able):
            if one.name == holding.name and pays(holding, *costs(at)):
                return one, holding
    return None


def choose_text(
    pool: Pool,
    routing: Routing,
    rng: Rng,
    *,
    avoid: frozenset[str] = frozenset(),
    holders: Mapping[str, int] = MappingProxyType({}),
    hosts: Mapping[str, str] = MappingProxyType({}),
    tokens: int = 0,
    answer_tokens: int = 0,
) -> str | None:
    """The name of a usable text instance outside ``avoid``, preferring those not in backoff; None if there is none.

    ``tokens`` are the prompt's, ``answer_tokens`` those expected of each choice. ``holders`` are the bytes of the request's embeddings by the ids of their encoders, ``hosts`` the hosts of instances by
    their ids, as far as they are known.
    """
    if routing is least_loaded and not avoid:
        loads = pool.loads
        if equal := loads.least_of_two(rng) if pool.shared else loads.least_in_turn(pool.turn):
            return _nearest_of(loads, equal, holders, hosts)
    able = [text for text in pool.candidates if text.usable and text.name not in avoid]
    able = [text for text in able if not text.backoff] or able
    if not able:
        return None
    held = Held.of(holders, hosts) if holders and able[0].backlog is not None else None
    work = Work(tokens, answer_tokens=answer_tokens, held=held)
    near = _nearest([text.instance_id for text in able], holders, hosts)
    if pool.shared and routing in _BY_LOAD:
        found = ends_s([one.backlog for one in able], work) if routing is predicted else None
        able = [able[place] for place in two_of(_less_loaded(able, None if found is None else found[0]), rng)]
    else:
        able = _in_turn(able, pool.turn)
    return routing(able, holders=near, rng=rng, work=work).name


def _less_loaded(able: Candidates, ends: Sequence[float] | None) -> list[int]:
    """The places of the less loaded half, by these predicted ends if there are any."""
    return less_loaded([(one.pending_tokens, one.pending) for one in able]) if ends is None else less_loaded(ends)


def _nearest_of(loads: Loads, equal: list[int], holders: Mapping[str, int], hosts: Mapping[str, str]) -> str:
    """The first of these equally loaded ones, or that of them that is nearest to the embeddings."""
    if len(equal) > 1 and any(one in hosts or one in loads.ids for one in holders):
        near = _nearest(
            [loads.ids[place] for place, _ in enumerate(loads.ids) if loads.takes(place, 0)], holders, hosts
        )
        return loads.names[next((place for place in equal if loads.ids[place] in near), equal[0])]
    return loads.names[equal[0]]


def _nearest(ids: Sequence[str], holders: Mapping[str, int], hosts: Mapping[str, str]) -> frozenset[str]:
    """Those (of text instances) that hold embeddings themselves, else those on the host that has most bytes of them."""
    if not holders:
        return frozenset()
    own = frozenset([one for one in ids if one in holders])
    nbytes: Counter[str] = Counter()
    for holder, held in holders.items():
        if host := hosts.get(holder):
            nbytes[host] += held
    if own or not nbytes:
        return own
    most = max(nbytes.values())
    return frozenset([one for one in ids if nbytes[hosts.get(one, "")] == most])


def _in_turn(candidates: list[Candidate], turn: int) -> list[Candidate]:
    first = turn % len(candidates)
    return candidates[first:] + candidates[:first]


def _roomy(candidates: Candidates, nbytes: int) -> list[Candidate]:
    """Those in which an item of this size fits now, by bytes and by number."""
    return [
        one
        for one in candidates
        if one.available_bytes >= nbytes and (not one.max_items or one.pending < one.max_items)
    ]


def _able(candidates: Candidates, want: Want) -> list[Candidate]:
    """The encoders eligible for the item now, preferring those not in backoff and not in ``want.avoid``."""
    nbytes, exclude, avoid = want.nbytes, want.exclude, want.avoid
    if not (exclude or avoid) and (able := [one for one in _roomy(candidates, nbytes) if not one.backoff]):
        return able  # the ordinary case
    able = [one for one in candidates if one.arena_bytes >= nbytes]
    if exclude:
        able = [one for one in able if one.name not in exclude]
    able = [one for one in able if not one.backoff] or able
    roomy = _roomy(able, nbytes)
    return ([one for one in roomy if one.name not in avoid] or roomy) if avoid else roomy


def _place_by_load(pool: Pool, wants: Sequence[Want]) -> tuple[Choice, ...] | None:
    """What ``_place`` finds by ``least_loaded`` in the ordinary case: no item has failed anywhere, and all fit at once.

    Else None. It looks at the encoders with the least load, and at those that hold an item, but at no others.
    """
    loads = pool.loads if len(wants) == 1 else pool.loads.copy()
    choices: list[Choice] = []
    placed: dict[Content, str] = {}
    for want in wants if len(wants) == 1 else sorted(wants, key=_largest_first):
        content, tokens, nbytes, why = want.content, want.tokens, want.nbytes, Why.ROUTED
        if content in placed:
            choices.append(Choice(want.item, placed[content], 0, 0, Why.SAME_CONTENT))
            continue
        least = loads.less_of_two if pool.shared else loads.least
        chosen = None if want.exclude or want.avoid else least(nbytes, content)
        if chosen is None:
            return None
        for holding in pool.held(content):
            at = loads.places.get(holding.name)
            if at is None or not loads.takes(at, nbytes):
                continue
            if pays(holding, loads.tokens(at), loads.tokens(chosen), tokens):
                why = Why.ENCODES_ALREADY if holding.encoding else Why.HOLDS_EMBEDDING
                chosen, tokens = at, counted(holding, tokens)
                break
        name = placed[content] = loads.names[chosen]
        choices.append(Choice(want.item, name, tokens, nbytes, why))
        if len(choices) < len(wants):
            loads.add(chosen, tokens, nbytes)
    return tuple(sorted(choices, key=_by_item)) if len(choices) > 1 else tuple(choices)


def _largest_first(want: Want) -> tuple[int, int]:
    return -want.tokens, want.item


def _by_item(choice: Choice) -> int:
    return choice.item


def _place(pool: Pool, wants: Sequence[Want], routing: Routing, rng: Rng) -> tuple[Choice, ...] | None:
    candidates, turn = pool.usable, pool.turn
    choices: list[Choice] = []
    placed: dict[Content, str] = {}
    for want in sorted(wants, key=_largest_first):
        if want.content in placed:
            choices.append(Choice(want.item, placed[want.content], 0, 0, Why.SAME_CONTENT))
            continue
        able = _able(candidates, want)
        if not able:
            return None
        timed = ends_s([one.backlog for one in able], want.work) if routing is predicted else None
        if routing in _BY_LOAD:
            chosen = _by_load(able, None if timed is None else timed[0], want.content, shared=pool.shared)
        else:
            chosen = routing(_in_turn(able, turn), holders=frozenset(), rng=rng, work=want.work)
        why, tokens = Why.LAST_RESORT if chosen.name in want.avoid else Why.ROUTED, want.tokens
        if holdings := pool.held(want.content):
            costs = _tokens(able, chosen, want) if timed is None else _seconds(able, *timed)
            if (having := _having(holdings, able, costs)) is not None:
                chosen, holding = having
                why = Why.ENCODES_ALREADY if holding.encoding else Why.HOLDS_EMBEDDING
                tokens = counted(holding, want.tokens)
        choices.append(Choice(want.item, chosen.name, tokens, want.nbytes, why))
        placed[want.content] = chosen.name
        if len(choices) < len(wants):
            backlog = chosen.backlog
            if tokens and timed is not None and isinstance(backlog, EncodeBacklog):
                backlog = backlog.with_item(timed[1][backlog.speed])
            candidates[candidates.index(chosen)] = chosen.with_item(tokens, want.nbytes, backlog)
            turn += 1
    return tuple(sorted(choices, key=_by_item))


def _by_load(able: Candidates, ends: Sequence[float] | None, content: Content, *, shared: bool) -> Candidate:
    """The least loaded, by these predicted ends of the item if there are any, and of equal ones that which the content prefers.

    ``shared``: of the two that it prefers among the less loaded half.
    """
    places: Sequence[int] = range(len(able))
    if shared:
        half = _less_loaded(able, ends)
        places = [half[place] for place in preferred_two([_id(able[place]) for place in half], content)]
    if ends is None:
        least = _least_loaded([able[place] for place in places])
    else:
        first_s = min([ends[place] for place in places])
        least = [able[place] for place in places if ends[place] == first_s]
    return least[preferred([_id(one) for one in least], content)]


def _id(one: Candidate) -> str:
    return one.instance_id or one.name


def _tokens(able: Candidates, chosen: Candidate, want: Want) -> Callable[[int], tuple[float, float, float]]:
    return lambda at: (able[at].pending_tokens, chosen.pending_tokens, want.tokens)


def _seconds(
    able: Candidates, ends: Sequence[float], prices: Mapping[Speed, Price]
) -> Callable[[int], tuple[float, float, float]]:
    first_s = min(ends)

    def costs(at: int) -> tuple[float, float, float]:
        backlog = able[at].backlog
        item_s = backlog.tolerated_s(prices[backlog.speed]) if isinstance(backlog, EncodeBacklog) else 0.0
        return ends[at] - item_s, first_s - item_s, item_s

    return costs


_MAX_SEARCH_STEPS = 500


class _Search:
    """Searches for any packing, regardless of load, in a bounded number of steps."""

    def __init__(self) -> None:
        self._steps = 0

    @property
    def spent(self) -> bool:
        """Whether the search gave up, so that finding nothing proves nothing."""
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
        return tuple(sorted(choices, key=_by_item))

    def _fill(self, candidates: list[Candidate], wants: list[Want]) -> dict[Content, str] | None:
        self._steps += 1
        if self.spent or sum(want.nbytes for want in wants) > sum(max(0, one.available_bytes) for one in candidates):
            return None
        if all(one.max_items for one in candidates) and len(wants) > sum(map(_free_places, candidates)):
            return None
        if not wants:
            return {}
        want, *rest = wants
        for candidate in sorted(_roomy(candidates, want.nbytes), key=lambda candidate: candidate.available_bytes):
            if candidate.name in want.exclude:
                continue
            left = [one.with_item(want.tokens, want.nbytes) if one is candidate else one for one in candidates]
            if (placed := self._fill(left, rest)) is not None:
                return placed | {want.content: candidate.name}
        return None


def _free_places(candidate: Candidate) -> int:
    return max(0, candidate.max_items - candidate.pending)


def _emptied(pool: Pool, *, revived: bool = False) -> Pool:
    """The pool without load; with ``revived``, with every encoder usable."""
    candidates = tuple(
        candidate._replace(
            usable=candidate.usable or revived,
            pending_tokens=0,
            pending=0,
            available_bytes=candidate.arena_bytes,
        )
        for candidate in pool.candidates
    )
    return Pool(candidates, pool.turn, pool.held)
