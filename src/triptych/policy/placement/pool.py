"""The instances of a pool as columns of numbers, so that one is chosen without a loop over objects: a router that decides 1,000 times
per second before 100 instances has 10 us for each decision.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from triptych.domain.record import record
from triptych.policy.backlog import Backlog, EncodeBacklog, Prices
from triptych.policy.lending import LenderState
from triptych.policy.placement.affinity import Having, nothing_held
from triptych.policy.placement.preferred import hash_of
from triptych.policy.placement.wants import Placeable

_PENDING_BITS = 32


@record
class TextTraits:
    """What a text instance is able to do."""

    prefill_only: bool = False
    """It hands over whatever it prefills."""
    continues: bool = True
    """It can go on with an answer that another one began."""
    prefills_early: bool = False
    """It keeps the prefix of a prompt until the rest comes."""
    hands_over: bool = False
    """It can hand over an answer that it could go on with itself."""
    kv_kind: str = ""
    """Of its keys and values; empty if nobody takes them."""


@record
class TextLoad:
    """What a text instance has to do, by stage, and the KV memory that is left."""

    prefill_tokens: int = 0
    decode_tokens: int = 0
    kv_room: int = 0
    """Tokens of further answers."""


class Candidate(NamedTuple):
    """One instance of a pool: a row of its columns.

    The load is the router's current estimate, which includes what it assigned since the instance's last report.
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
    text: TextTraits = TextTraits()


class Pool:
    """The instances that serve certain stages, by place: the order of their names. Policies read it; its owner keeps it up to date.

    A column has one value for each place. ``turn`` counts the decisions and rotates tie-breaking.
    """

    def __init__(
        self,
        candidates: Iterable[Candidate] = (),
        turn: int = 0,
        held: Having = nothing_held,
        shared: bool = False,
        *,
        text_load: Callable[[int], TextLoad] = lambda _: TextLoad(),
    ) -> None:
        self.turn = turn
        self.held = held
        """Which instances are believed to hold embeddings, or to be encoding them. These hints may be stale."""
        self.shared = shared
        """Other routers send much to them, of which this one learns late: if all chose the least loaded, they would choose the same."""
        self.hosts: Mapping[str, str] = {}
        """The hosts of instances, of this pool or not, by their ids, as far as they are known."""
        self.lenders: Mapping[str, LenderState] = {}
        """Of these text instances, those that encode first, by name."""
        self.answers = self
        """The pool in which answers go on that begin in this one."""
        self.text_load = text_load
        """What a text instance has to do, by its place: asked only where a decision needs it."""
        self._prices: tuple[Placeable, Prices] | None = None
        self.set(candidates)

    # --- for the owner -----------------------------------------------------------------------------------------------

    def set(self, candidates: Iterable[Candidate]) -> None:
        """Replace all rows."""
        rows = tuple(candidates)
        self.names = [row.name for row in rows]
        self.places = {name: place for place, name in enumerate(self.names)}
        self.ids = [row.instance_id for row in rows]
        self.hashes = [hash_of(row.instance_id or row.name) for row in rows]
        self.usable = [row.usable for row in rows]
        self.arenas = [row.arena_bytes for row in rows]
        self.most_items = [row.max_items for row in rows]
        self.texts = [row.text for row in rows]
        self.prefill_only = frozenset([place for place, row in enumerate(rows) if row.text.prefill_only])
        self.tokens = [0] * len(rows)
        self.pending = [0] * len(rows)
        self.loads = [0] * len(rows)
        """Tokens, then items or requests, in one number."""
        self.rooms = [0] * len(rows)
        """Bytes of the arena that are available."""
        self.backoff = [False] * len(rows)
        self.probation = [False] * len(rows)
        self.backlogs: list[Backlog | None] = [None] * len(rows)
        self._is_open = [False] * len(rows)
        self._open: Sequence[int] | None = None
        for place, row in enumerate(rows):
            self.put(
                place,
                row.pending_tokens,
                row.pending,
                row.available_bytes,
                row.backoff,
                row.probation,
                row.backlog,
            )

    def put(
        self,
        place: int,
        tokens: int,
        pending: int,
        room: int,
        backoff: bool,
        probation: bool,
        backlog: Backlog | None = None,
    ) -> None:
        """Replace what changes with an instance's load and health."""
        self.tokens[place], self.pending[place], self.rooms[place] = tokens, pending, room
        self.loads[place] = (tokens << _PENDING_BITS) + pending
        self.backoff[place], self.probation[place], self.backlogs[place] = backoff, probation, backlog
        self._check_open(place)

    def _check_open(self, place: int) -> None:
        is_open = self.usable[place] and not self.backoff[place] and self.has_slot(place)
        if is_open is not self._is_open[place]:
            self._is_open[place], self._open = is_open, None

    # --- for policies ------------------------------------------------------------------------------------------------

    @property
    def open(self) -> Sequence[int]:
        """The places of the usable instances that are not in backoff and take one more item."""
        if self._open is None:
            found = [place for place, is_open in enumerate(self._is_open) if is_open]
            self._open = range(len(found)) if len(found) == len(self.names) else found
        return self._open

    @property
    def all(self) -> range:
        """All places."""
        return range(len(self.names))

    def has_slot(self, place: int) -> bool:
        """Whether the number of its items allows one more."""
        most = self.most_items[place]
        return not most or self.pending[place] < most

    def prices(self, want: Placeable) -> Prices:
        """What it takes at instances of each speed: the same until another one is asked for."""
        if self._prices is None or self._prices[0] is not want:
            self._prices = want, Prices(want.work(self.hosts))
        return self._prices[1]

    @property
    def candidates(self) -> list[Candidate]:
        """All rows, made anew: for reading."""
        return [self.candidate(place) for place in self.all]

    def candidate(self, place: int) -> Candidate:
        """One row, made anew: for reading."""
        return Candidate(
            self.names[place],
            self.usable[place],
            self.tokens[place],
            self.pending[place],
            self.arenas[place],
            self.rooms[place],
            self.most_items[place],
            self.backoff[place],
            self.ids[place],
            self.probation[place],
            self.backlogs[place],
            self.texts[place],
        )

    # --- what would be -----------------------------------------------------------------------------------------------

    def copy(self) -> "Pool":
        """A pool with loads of its own, to count what a decision adds before it is complete."""
        made = Pool.__new__(Pool)
        made.__dict__.update(self.__dict__)
        for column in ("tokens", "pending", "loads", "rooms", "backoff", "backlogs", "_is_open"):
            setattr(made, column, getattr(self, column).copy())
        return made

    def add(self, place: int, want: Placeable, tokens: int, nbytes: int) -> None:
        """One more item, with so many tokens and bytes. ``want`` prices it in predicted seconds."""
        backlog = self.backlogs[place]
        if tokens and isinstance(backlog, EncodeBacklog):
            backlog = backlog.with_item(self.prices(want)[backlog.speed])
        self.put(
            place,
            self.tokens[place] + tokens,
            self.pending[place] + 1,
            self.rooms[place] - nbytes,
            self.backoff[place] or self.probation[place],
            self.probation[place],
            backlog,
        )
        self.turn += 1

    def emptied(self, *, revived: bool = False, uncounted: bool = False) -> "Pool":
        """The pool without load. ``revived``: every instance is usable; ``uncounted``: the number of items has no limit."""
        return Pool(
            [
                row._replace(
                    usable=row.usable or revived,
                    pending_tokens=0,
                    pending=0,
                    available_bytes=row.arena_bytes,
                    max_items=0 if uncounted else row.max_items,
                )
                for row in self.candidates
            ],
            self.turn,
            self.held,
        )
