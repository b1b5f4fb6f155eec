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
_CHANGING = ("pending_tokens", "pending", "available_bytes", "backoff", "backlog", "loads", "_is_open")
"""Columns that change with one more item."""


@record
class TextTraits:
    """Abilities of a text instance; of an encoder only its adapters."""

    prefill_only: bool = False
    """Whether it transfers whatever it prefills."""
    continues: bool = True
    """Whether it can go on with an answer that another one began."""
    prefills_early: bool = False
    """Whether it keeps the prefix of a prompt until the rest comes."""
    transfers_kv: bool = False
    """Whether it can transfer an answer that it could go on with itself."""
    kv_kind: str = ""
    """Of its keys and values; empty if nobody takes them."""
    loras: frozenset[str] = frozenset()
    """Digests of the LoRA adapters that it takes requests or items for."""

    def has_lora(self, digest: str) -> bool:
        """Whether it takes requests with this adapter; an empty digest stands for none."""
        return not digest or digest in self.loras


@record
class TextLoad:
    """Work that a text instance has to do, by stage, and the KV memory that is left."""

    prefill_tokens: int = 0
    decode_tokens: int = 0
    kv_room: int = 0
    """Tokens of further answers."""


class Candidate(NamedTuple):
    """One instance of a pool: a row of its columns.

    The load is the router's current estimate, which includes what it assigned since the instance's last report.
    """

    name: str
    """Address of the instance."""
    usable: bool
    """Reachable, neither draining nor leaving, and serving the model."""
    pending_tokens: int = 0
    pending: int = 0
    """Items or requests."""
    arena_bytes: int = 0
    available_bytes: int = 0
    max_items: int = 0
    """Limit on concurrent items; 0 for none."""
    backoff: bool = False
    """Whether it failed recently, or is tried again just now: avoided while there is another."""
    instance_id: str = ""
    """The id it reports, by which tickets name their holder."""
    probation: bool = False
    """Whether it is back from a backoff: it gets one item or request at a time."""
    backlog: Backlog | None = None
    """The same in predicted seconds; None if nothing predicts them, or no policy of the router needs them."""
    text: TextTraits = TextTraits()


class Pool:
    """The instances that serve certain stages, by place: the order of their names. Policies read it; its owner keeps it up to date.

    It has a column for each field of ``Candidate``, with one value for each place. ``turn`` counts the decisions and rotates
    tie-breaking.
    """

    name: list[str]
    usable: list[bool]
    pending_tokens: list[int]
    pending: list[int]
    arena_bytes: list[int]
    available_bytes: list[int]
    max_items: list[int]
    backoff: list[bool]
    instance_id: list[str]
    probation: list[bool]
    backlog: list[Backlog | None]
    text: list[TextTraits]

    def __init__(
        self,
        candidates: Iterable[Candidate] = (),
        turn: int = 0,
        held: Having = nothing_held,
        shared: bool = False,
        text_load: Callable[[int], TextLoad] = lambda _: TextLoad(),
    ) -> None:
        self.turn = turn
        self.held = held
        """Instances that are believed to hold an embedding, or to be encoding it. These hints may be stale."""
        self.shared = shared
        """Other routers send much to them, of which this one learns late: if all chose the least loaded, they would choose the same."""
        self.text_load = text_load
        """What a text instance has to do, by its place: asked only where a decision needs it."""
        self.hosts: Mapping[str, str] = {}
        """The hosts of instances, of this pool or not, by their ids, as far as they are known."""
        self.lenders: Mapping[str, LenderState] = {}
        """Of these text instances, those that encode first, by name."""
        self.answers = self
        """The pool in which answers go on that begin in this one."""
        self._prices: tuple[Placeable, Prices] | None = None
        self.set(candidates)

    # --- for the owner -----------------------------------------------------------------------------------------------

    def set(self, candidates: Iterable[Candidate]) -> None:
        """Replace all rows."""
        rows = tuple(candidates)
        for field in Candidate._fields:
            setattr(self, field, [getattr(row, field) for row in rows])
        self.places = {row.name: place for place, row in enumerate(rows)}
        self.hashes = [hash_of(row.instance_id or row.name) for row in rows]
        self.prefill_only = frozenset([place for place, row in enumerate(rows) if row.text.prefill_only])
        self.loads = [(row.pending_tokens << _PENDING_BITS) + row.pending for row in rows]
        """Tokens, then items or requests, in one number."""
        self.least_available = min(self.available_bytes, default=0)
        """No instance has less available, though all may have more."""
        self._is_open = [False] * len(rows)
        self._open: Sequence[int] | None = None
        self.by_id = {row.instance_id: place for place, row in enumerate(rows)}
        self.all = range(len(rows))
        """All places."""
        for place in self.all:
            self._check_open(place)

    def put(
        self,
        place: int,
        tokens: int,
        pending: int,
        available: int,
        backoff: bool,
        probation: bool,
        backlog: Backlog | None = None,
    ) -> None:
        """Replace what changes with an instance's load and health."""
        self.pending_tokens[place], self.pending[place], self.available_bytes[place] = tokens, pending, available
        self.loads[place] = (tokens << _PENDING_BITS) + pending
        self.backoff[place], self.probation[place], self.backlog[place] = backoff, probation, backlog
        self.least_available = min(self.least_available, available)
        self._check_open(place)

    def _check_open(self, place: int) -> None:
        most = self.max_items[place]
        is_open = self.usable[place] and not self.backoff[place] and (not most or self.pending[place] < most)
        if is_open is not self._is_open[place]:
            self._is_open[place], self._open = is_open, None

    # --- for policies ------------------------------------------------------------------------------------------------

    @property
    def open(self) -> Sequence[int]:
        """The places of the usable instances that are not in backoff and take one more item."""
        if self._open is None:
            found = [place for place, is_open in enumerate(self._is_open) if is_open]
            self._open = self.all if len(found) == len(self.name) else found
        return self._open

    def has_slot(self, place: int) -> bool:
        """Whether the number of its items allows one more."""
        most = self.max_items[place]
        return not most or self.pending[place] < most

    def find_least_available(self) -> int:
        """The least that is available at any instance."""
        self.least_available = min(self.available_bytes, default=0)
        return self.least_available

    def prices(self, want: Placeable) -> Prices:
        """What it takes at instances of each speed: the same until another one is asked for."""
        if self._prices is None or self._prices[0] is not want:
            self._prices = want, Prices(want.work(self.hosts))
        return self._prices[1]

    def candidate(self, place: int) -> Candidate:
        """One row, made anew: for reading."""
        return Candidate(*[getattr(self, field)[place] for field in Candidate._fields])

    @property
    def candidates(self) -> list[Candidate]:
        """All rows, made anew: for reading."""
        return [self.candidate(place) for place in self.all]

    # --- what would be -----------------------------------------------------------------------------------------------

    def copy(self) -> "Pool":
        """A pool with loads of its own, to count what a decision adds before it is complete."""
        made, columns = Pool.__new__(Pool), self.__dict__
        made.__dict__ |= columns | {column: columns[column].copy() for column in _CHANGING}
        return made

    def add(self, place: int, want: Placeable, tokens: int, nbytes: int) -> None:
        """One more item, with so many tokens and bytes. ``want`` prices it in predicted seconds."""
        backlog = self.backlog[place]
        if tokens and isinstance(backlog, EncodeBacklog):
            self.backlog[place] = backlog.with_item(self.prices(want)[backlog.speed])
        self.pending_tokens[place] += tokens
        self.pending[place] += 1
        self.available_bytes[place] -= nbytes
        self.least_available = min(self.least_available, self.available_bytes[place])
        self.loads[place] += (tokens << _PENDING_BITS) + 1
        self.backoff[place] = self.backoff[place] or self.probation[place]
        self._check_open(place)
        self.turn += 1

    def emptied(self, *, revived: bool = False, uncounted: bool = False) -> "Pool":
        """The pool without load. ``revived``: every instance is usable; ``uncounted``: the number of items has no limit."""
        rows = [row._replace(pending_tokens=0, pending=0, available_bytes=row.arena_bytes) for row in self.candidates]
        rows = [row._replace(usable=True) for row in rows] if revived else rows
        rows = [row._replace(max_items=0) for row in rows] if uncounted else rows
        return Pool(rows, self.turn, self.held)
