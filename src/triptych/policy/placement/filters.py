"""Filters of the instances that may get an item or a request. A filter keeps those places of a pool that pass it, in their order.

``Filter`` puts one into a row, ``Filters``. All are first tried together, which mostly leaves some; only where none is left does
their order matter, and preferences are given up.
"""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from triptych.domain.record import record
from triptych.policy.kv_transfer import has_room as has_kv_room
from triptych.policy.lending import MOST_MOVES, LenderState
from triptych.policy.placement.pool import Pool
from triptych.policy.placement.wants import Placeable, RequestWant, Want

Places = Sequence[int]
W_contra = TypeVar("W_contra", bound=Placeable, contravariant=True)
Keep = Callable[[Pool, W_contra, Places], Places]


@record
class Filter(Generic[W_contra]):
    """A filter as part of a row."""

    keep: Keep[W_contra]
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
        """A row with other filters in front of these."""
        return Filters(*filters, *self._filters) if filters else self


def each(passes: Callable[[Pool, W_contra, int], bool]) -> Keep[W_contra]:
    """A filter that looks at one place after the other."""
    return lambda pool, want, places: [place for place in places if passes(pool, want, place)]


# --- of any instance -------------------------------------------------------------------------------------------------

usable: Keep[Placeable] = each(lambda pool, _, place: pool.usable[place])
"""Reads whether it is reachable, neither drains nor leaves, and serves the model."""
not_in_backoff: Keep[Placeable] = each(lambda pool, _, place: not pool.backoff[place])
"""Reads whether it has failed lately."""


def not_excluded(pool: Pool, want: Placeable, places: Places) -> Places:
    """Reads which instances must not be used."""
    return [place for place in places if pool.name[place] not in want.exclude] if want.exclude else places


def not_avoided(pool: Pool, want: Placeable, places: Places) -> Places:
    """Reads which instances have failed it before."""
    return [place for place in places if pool.name[place] not in want.avoid] if want.avoid else places


def has_lora(pool: Pool, want: Placeable, places: Places) -> Places:
    """Reads which LoRA adapters it takes items or requests for."""
    return [place for place in places if want.lora in pool.text[place].loras] if want.lora else places


# --- of encoders -----------------------------------------------------------------------------------------------------

large_enough: Keep[Want] = each(lambda pool, want, place: pool.arena_bytes[place] >= want.nbytes)
"""Reads the size of its arena."""
has_slot: Keep[Want] = each(lambda pool, _, place: pool.has_slot(place))
"""Reads the number of its items and their limit."""
not_on_probation: Keep[Want] = each(lambda pool, _, place: not pool.probation[place])
"""Reads whether it is back from a backoff."""


def has_room(pool: Pool, want: Want, places: Places) -> Places:
    """Reads the bytes of its arena that are available."""
    if want.nbytes <= pool.least_available or want.nbytes <= pool.find_least_available():
        return places
    return [place for place in places if pool.available_bytes[place] >= want.nbytes]


# --- of text instances -----------------------------------------------------------------------------------------------

keeps_answers: Keep[RequestWant] = each(lambda pool, _, place: place not in pool.prefill_only)
"""Reads whether it goes on with what it prefills."""
goes_on: Keep[RequestWant] = each(lambda pool, _, place: pool.text[place].continues)
"""Reads whether it can go on with an answer that another one began."""
is_lending: Keep[RequestWant] = each(lambda pool, _, place: pool.lenders.get(pool.name[place]) is LenderState.LENDING)
"""Reads the states of those that encode first: nobody else passes."""


def computes_early(pool: Pool, want: RequestWant, places: Places) -> Places:
    """Reads, for the prefix of a prompt, whether it keeps it, keeps its answers, does not encode first, and has no other prompt."""
    if not want.early:
        return places
    able = [place for place in keeps_answers(pool, want, places) if pool.text[place].prefills_early]
    apart = [place for place in able if pool.name[place] not in pool.lenders]
    return [place for place in apart if not pool.text_load(place).prefill_tokens]


def answer_has_place(pool: Pool, want: RequestWant, places: Places) -> Places:
    """Reads, for one that only prefills, the KV memory of those that would take the answer."""
    if not pool.prefill_only:
        return places
    kinds = {pool.text[place].kv_kind: place for place in places if place in pool.prefill_only}
    roomy = {kind for kind, place in kinds.items() if want.first_in_line and receivers_have_room(pool, place, want)}
    return [place for place in places if place not in pool.prefill_only or pool.text[place].kv_kind in roomy]


def lends(pool: Pool, want: RequestWant, places: Places) -> Places:
    """Reads the states of those that encode first: they get nothing unless they lend, or there are no others."""
    if not pool.lenders or not _has_others_than_lenders(pool, want):
        return places
    takes = (None, LenderState.LENDING) if want.moves < MOST_MOVES else (None,)
    return [place for place in places if pool.lenders.get(pool.name[place]) in takes]


def lends_memory(pool: Pool, want: RequestWant, places: Places) -> Places:
    """Reads the KV memory of those that encode first, unless there are no others."""
    if not pool.lenders or not _has_others_than_lenders(pool, want):
        return places
    lenders = [place for place in places if pool.name[place] in pool.lenders]
    narrow = [place for place in lenders if pool.text_load(place).kv_room < want.kv_tokens]
    return [place for place in places if place not in narrow]


def _has_others_than_lenders(pool: Pool, want: RequestWant) -> bool:
    """Whether there is a usable instance that is no lender and has not failed the request."""
    others = [pool.places[name] for name in pool.places.keys() - pool.lenders - want.avoid]
    return any(pool.usable[place] and pool.text[place].has_lora(want.lora) for place in others)


def takes_kv(pool: Pool, want: RequestWant, places: Places) -> Places:
    """Reads, for an answer that is transferred, the kinds of keys and values, and who has failed it."""
    taking = receivers(pool, want.sender, want.sender_kv_kind, want.lora) if want.sender else ()
    return [place for place in not_avoided(pool, want, places) if place in taking] if taking else places


def has_kv_memory(pool: Pool, want: RequestWant, places: Places) -> Places:
    """Reads, for an answer that is transferred, the KV memory of those that take it."""
    taking = takes_kv(pool, want, places)
    if taking is places:  # nobody in particular takes it
        return places
    return [place for place in taking if pool.text_load(place).kv_room >= want.kv_tokens]


# --- who takes answers -----------------------------------------------------------------------------------------------


def receivers(answers: Pool, sender: str, kv_kind: str, lora: str = "", *, alike: bool = False) -> list[int]:
    """The places of those that go on with answers of ``sender`` with this adapter: if there are any (or with ``alike``), those that take
    its keys and values. Lenders that do not lend are among them only if there is no other.
    """
    able = [place for place in answers.all if answers.usable[place] and answers.text[place].continues]
    able = [place for place in able if answers.name[place] != sender and answers.text[place].has_lora(lora)]
    taking = [place for place in able if kv_kind and answers.text[place].kv_kind == kv_kind]
    found = taking if alike or taking else able
    return [place for place in found if not is_closed(answers, place)] or found


def receivers_have_room(pool: Pool, place: int, want: RequestWant) -> bool:
    """Whether those that would take the answer from this place have KV memory for it, beside what is promised."""
    taking = receivers(pool.answers, pool.name[place], pool.text[place].kv_kind, want.lora)
    rooms = [pool.answers.text_load(receiver).kv_room for receiver in taking]
    return has_kv_room(rooms, want.kv_tokens, want.promised_kv_tokens)


def is_closed(pool: Pool, place: int) -> bool:
    """Whether it encodes first and takes no request now."""
    return pool.lenders.get(pool.name[place], LenderState.LENDING) is not LenderState.LENDING


# --- rows ------------------------------------------------------------------------------------------------------------

ITEM_FILTERS = Filters[Want](
    Filter(usable, implied=True),
    Filter(has_lora),
    Filter(not_excluded),
    Filter(large_enough, implied=True),
    Filter(not_in_backoff, soft=True, implied=True),
    Filter(has_slot, implied=True),
    Filter(has_room),
    Filter(not_avoided, soft=True),
)
"""An encoder whose engine fails is fast and so looks least loaded: while it is in backoff, items wait for another that could take
them. One that failed the item is the last resort among those that have room.
"""
HEDGE_FILTERS = Filters[Want](
    Filter(usable, implied=True),
    Filter(has_lora),
    Filter(not_in_backoff, implied=True),
    Filter(not_on_probation),
    Filter(not_excluded),
    Filter(not_avoided),
    Filter(has_slot, implied=True),
    Filter(has_room),
)
PROMPT_FILTERS = Filters[RequestWant](
    Filter(usable, implied=True),
    Filter(has_lora),
    Filter(not_excluded),
    Filter(not_avoided),
    Filter(computes_early),
    Filter(lends),
    Filter(lends_memory),
    Filter(answer_has_place),
    Filter(not_in_backoff, soft=True, implied=True),
)
"""Nothing is prefilled that nobody can take."""
ANSWER_FILTERS = Filters[RequestWant](
    Filter(usable, implied=True),
    Filter(has_lora),
    Filter(goes_on),
    Filter(not_excluded),
    Filter(lends),
    Filter(lends_memory),
    Filter(not_avoided, soft=True),
    Filter(takes_kv, soft=True),
    Filter(has_kv_memory, soft=True),
    Filter(not_in_backoff, soft=True, implied=True),
)
"""Where keys and values can be used nothing is computed again; where there is no memory for them the answer waits."""
MOVE_FILTERS = Filters[RequestWant](
    Filter(usable, implied=True),
    Filter(has_lora),
    Filter(not_excluded),
    Filter(not_avoided),
    Filter(is_lending),
    Filter(lends_memory),
    Filter(keeps_answers),
    Filter(not_in_backoff, implied=True),
)
"""Of those that encode first and may take a request from where it waits."""
SUSPECT_FILTERS = Filters[RequestWant](
    Filter(usable, implied=True),
    Filter(has_lora),
    Filter(not_excluded),
    Filter(not_avoided),
    Filter(lends),
)
"""Whether a suspect has a place apart from others."""
