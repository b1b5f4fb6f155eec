"""Which instances may get an item or a request. A filter keeps those places of a pool that pass it, in their order.

``Filter`` puts one into a row, ``Filters``. All are first tried together, which mostly leaves some; only where none is left does
their order matter, and preferences are given up.
"""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from triptych.domain.record import record
from triptych.policy.handoff import has_room as has_kv_room
from triptych.policy.lending import MOST_MOVES, LenderState
from triptych.policy.placement.pool import Pool
from triptych.policy.placement.wants import Placeable, RequestWant, Want

Places = Sequence[int]
W_contra = TypeVar("W_contra", bound=Placeable, contravariant=True)


@record
class Filter(Generic[W_contra]):
    """A filter as part of a row."""

    keep: Callable[[Pool, W_contra, Places], Places]
    soft: bool = False
    """A preference: where none passes, all that have passed the filters before it remain."""
    implied: bool = False
    """``Pool.open`` or another filter of the row implies it, unless preferences are given up."""


class Filters(Generic[W_contra]):
    """A row of filters."""

    def __init__(self, *filters: Filter[W_contra]) -> None:
        self._filters = filters
        self._together = tuple([condition.keep for condition in filters if not condition.implied])

    def passing(self, pool: Pool, want: W_contra) -> Places:
        """The places that pass all filters; else those that pass all but preferences, of which earlier ones go first."""
        places = pool.open
        for keep in self._together:
            places = keep(pool, want, places)
        if places:
            return places
        places = pool.all
        for condition in self._filters:
            kept = condition.keep(pool, want, places)
            places = kept if kept or not condition.soft else places
        return places

    def after(self, filters: Sequence[Filter[W_contra]]) -> "Filters[W_contra]":
        """This row behind other filters."""
        return Filters(*filters, *self._filters) if filters else self


# --- of any instance -------------------------------------------------------------------------------------------------


def usable(pool: Pool, want: Placeable, places: Places) -> Places:
    """Reads whether it is reachable, neither drains nor leaves, and serves the model."""
    del want
    return [place for place in places if pool.usable[place]]


def not_in_backoff(pool: Pool, want: Placeable, places: Places) -> Places:
    """Reads whether it has failed lately."""
    del want
    return [place for place in places if not pool.backoff[place]]


def not_excluded(pool: Pool, want: Placeable, places: Places) -> Places:
    """Reads which instances must not be used."""
    return [place for place in places if pool.name[place] not in want.exclude] if want.exclude else places


def not_avoided(pool: Pool, want: Placeable, places: Places) -> Places:
    """Reads which instances have failed it before."""
    return [place for place in places if pool.name[place] not in want.avoid] if want.avoid else places


# --- of encoders -----------------------------------------------------------------------------------------------------


def large_enough(pool: Pool, want: Want, places: Places) -> Places:
    """Reads the size of its arena."""
    return [place for place in places if pool.arena_bytes[place] >= want.nbytes]


def has_room(pool: Pool, want: Want, places: Places) -> Places:
    """Reads the bytes of its arena that are available."""
    return (
        places
        if pool.all_have(want.nbytes)
        else [place for place in places if pool.available_bytes[place] >= want.nbytes]
    )


def has_slot(pool: Pool, want: Want, places: Places) -> Places:
    """Reads the number of its items and their limit."""
    del want
    return [place for place in places if pool.has_slot(place)]


def not_on_probation(pool: Pool, want: Want, places: Places) -> Places:
    """Reads whether it is back from a backoff."""
    del want
    return [place for place in places if not pool.probation[place]]


# --- of text instances -----------------------------------------------------------------------------------------------


def keeps_answers(pool: Pool, want: RequestWant, places: Places) -> Places:
    """Reads whether it only prefills."""
    del want
    return [place for place in places if place not in pool.prefill_only]


def answer_has_place(pool: Pool, want: RequestWant, places: Places) -> Places:
    """Reads, for one that only prefills, the KV memory of those that would take the answer."""
    if not pool.prefill_only:
        return places
    by_kind: dict[str, bool] = {}

    def has_place(place: int) -> bool:
        kind = pool.text[place].kv_kind
        if kind not in by_kind:
            by_kind[kind] = want.first_in_line and receivers_have_room(pool, place, want)
        return by_kind[kind]

    return [place for place in places if place not in pool.prefill_only or has_place(place)]


def computes_early(pool: Pool, want: RequestWant, places: Places) -> Places:
    """Reads, for the prefix of a prompt, whether it keeps it, keeps its answers, does not encode first, and has no other prompt."""
    if not want.early:
        return places
    return [
        place
        for place in keeps_answers(pool, want, places)
        if pool.text[place].prefills_early
        and pool.name[place] not in pool.lenders
        and not pool.text_load(place).prefill_tokens
    ]


def lends(pool: Pool, want: RequestWant, places: Places) -> Places:
    """Reads the states of those that encode first: they get nothing unless they lend, or there are no others."""
    if not _has_others_than_lenders(pool, want):
        return places
    may_move = want.moves < MOST_MOVES
    return [
        place for place in places if pool.name[place] not in pool.lenders or (may_move and not is_closed(pool, place))
    ]


def lends_memory(pool: Pool, want: RequestWant, places: Places) -> Places:
    """Reads the KV memory of those that encode first, unless there are no others."""
    if not _has_others_than_lenders(pool, want):
        return places
    return [
        place
        for place in places
        if pool.name[place] not in pool.lenders or pool.text_load(place).kv_room >= want.kv_tokens
    ]


def is_lending(pool: Pool, want: RequestWant, places: Places) -> Places:
    """Reads the states of those that encode first: nobody else passes."""
    del want
    return [place for place in places if pool.lenders.get(pool.name[place]) is LenderState.LENDING]


def _has_others_than_lenders(pool: Pool, want: RequestWant) -> bool:
    """Whether there are lenders, and a usable instance that is none and has not failed the request."""
    return bool(pool.lenders) and any(
        is_usable and name not in pool.lenders and name not in want.avoid
        for name, is_usable in zip(pool.name, pool.usable, strict=True)
    )


def goes_on(pool: Pool, want: RequestWant, places: Places) -> Places:
    """Reads whether it can go on with an answer that another one began."""
    del want
    return [place for place in places if pool.text[place].continues]


def takes_kv(pool: Pool, want: RequestWant, places: Places) -> Places:
    """Reads, for an answer that is handed over, the kinds of keys and values, and who has failed it."""
    return _kept_receivers(pool, want, places, 0)


def has_kv_memory(pool: Pool, want: RequestWant, places: Places) -> Places:
    """Reads, for an answer that is handed over, the KV memory of those that take it."""
    return _kept_receivers(pool, want, places, want.kv_tokens)


def _kept_receivers(pool: Pool, want: RequestWant, places: Places, kv_tokens: int) -> Places:
    if not want.sender:
        return places
    taking = receivers(pool, want.sender, want.sender_kv_kind)
    roomy = {place for place in taking if not kv_tokens or pool.text_load(place).kv_room >= kv_tokens}
    return [place for place in not_avoided(pool, want, places) if place in roomy] if taking else places


# --- who takes answers -----------------------------------------------------------------------------------------------


def receivers(answers: Pool, sender: str, kv_kind: str, *, alike: bool = False) -> list[int]:
    """The places of those that go on with answers of ``sender``: if there are any (or with ``alike``), those that take its keys and
    values. Lenders that do not lend are among them only if there is no other.
    """
    able = [
        place
        for place in answers.all
        if answers.usable[place] and answers.text[place].continues and answers.name[place] != sender
    ]
    taking = [place for place in able if kv_kind and answers.text[place].kv_kind == kv_kind]
    found = taking if alike or taking else able
    return [place for place in found if not is_closed(answers, place)] or found


def receivers_have_room(pool: Pool, place: int, want: RequestWant) -> bool:
    """Whether those that would take the answer from this place have KV memory for it, beside what is promised."""
    taking = receivers(pool.answers, pool.name[place], pool.text[place].kv_kind)
    rooms = [pool.answers.text_load(receiver).kv_room for receiver in taking]
    return has_kv_room(rooms, want.kv_tokens, want.promised_kv_tokens)


def is_closed(pool: Pool, place: int) -> bool:
    """Whether it encodes first and takes no request now."""
    return pool.lenders.get(pool.name[place], LenderState.LENDING) is not LenderState.LENDING
