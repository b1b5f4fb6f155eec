"""Requests to text instances: for a prompt, and where its answer goes on.

The default is ModServe's (section 4.3, "Request Routing Across Instances"): a request goes to the text instance with the fewest
pending tokens, text and image together for decoder-only families.
"""

from enum import Enum

from triptych.domain.record import record
from triptych.domain.rng import Rng
from triptych.policy.backlog import Prices, Work, ends_s
from triptych.policy.kv_transfer import TransferRule
from triptych.policy.placement.filters import (
    ANSWER_FILTERS,
    MOVE_FILTERS,
    PROMPT_FILTERS,
    SUSPECT_FILTERS,
    is_closed,
    receivers,
    receivers_have_room,
)
from triptych.policy.placement.policy import PlacementPolicy
from triptych.policy.placement.pool import Pool
from triptych.policy.placement.wants import RequestWant


@record
class RequestPlace:
    """The text instance chosen for a request."""

    name: str
    """Address of the instance."""
    transfers_kv: bool = False
    """Whether it computes the prompt only: the answer goes on elsewhere."""


class RequestShortage(Enum):
    """Why a request cannot be placed now."""

    NO_INSTANCE = "no text instance is available"
    NO_LORA = "no text instance has its LoRA adapter"
    TO_COME = "the KV memory for its answer is taken, or the instances may end with another request"


def place_request(
    prompts: Pool, want: RequestWant, placement: PlacementPolicy, kv_transfer: TransferRule | None, rng: Rng
) -> RequestPlace | RequestShortage:
    """A place for a prompt in this pool, or for the rest of an answer in that where answers go on. Without ``kv_transfer`` only those that
    must transfer do.
    """
    pool, filters = (prompts.answers, ANSWER_FILTERS) if want.continues else (prompts, PROMPT_FILTERS)
    places = filters.after(placement.filters).passing(pool, want)
    if not places:
        return _shortage(prompts, want)
    place = placement.pick(pool, want, places, placement.scores, rng)
    return RequestPlace(pool.name[place], not want.continues and _transfers_kv(pool, want, place, kv_transfer))


def _transfers_kv(pool: Pool, want: RequestWant, place: int, kv_transfer: TransferRule | None) -> bool:
    if place in pool.prefill_only:
        return True
    if kv_transfer is None or want.early or not want.first_in_line or not pool.text[place].transfers_kv:
        return False
    taking = receivers(pool.answers, pool.name[place], pool.text[place].kv_kind, want.lora, alike=True)
    return (
        bool(taking)
        and kv_transfer(
            expected_tokens=want.answer_tokens,
            here_tokens=pool.text_load(place).decode_tokens,
            there_tokens=min([pool.answers.text_load(receiver).decode_tokens for receiver in taking]),
        )
        and receivers_have_room(pool, place, want)
    )


def _shortage(prompts: Pool, want: RequestWant) -> RequestShortage:
    """Whether waiting helps: until KV memory is free, or what may end with another request has computed something of that."""
    kept_out = any(
        pool.usable[pool.places[name]]
        for pool in (prompts, prompts.answers)
        for name in want.exclude
        if name in pool.places
    )
    for_memory = not want.continues and any(
        prompts.usable[place] and prompts.name[place] not in want.avoid and _may_prefill(prompts, place, want)
        for place in prompts.prefill_only
    )
    return RequestShortage.TO_COME if kept_out or for_memory else RequestShortage.NO_INSTANCE


def _may_prefill(prompts: Pool, place: int, want: RequestWant) -> bool:
    """Whether an instance that only prefills can compute the prompt once there is memory: with an adapter, others must have that too."""
    if not want.lora:
        return True
    traits = prompts.text[place]
    return traits.has_lora(want.lora) and bool(
        receivers(prompts.answers, prompts.name[place], traits.kv_kind, want.lora)
    )


def is_kept_apart(prompts: Pool, want: RequestWant) -> bool:
    """Whether a request that may end its instance waits for others that may: nobody else waits for these."""
    return want.continues or not SUSPECT_FILTERS.passing(prompts, want)


def place_at_lender(
    prompts: Pool, want: RequestWant, waits_at: str, placement: PlacementPolicy, rng: Rng
) -> str | None:
    """A lender for a request that waits at ``waits_at``, the last of those that do; None if none would be done with it earlier.

    What it asks for is part of the load where it waits. Ends are compared in predicted seconds, or in tokens where these are not
    known.
    """
    here, places = prompts.places.get(waits_at), MOVE_FILTERS.after(placement.filters).passing(prompts, want)
    if here is None or not places:
        return None
    there = placement.pick(prompts, want, places, placement.scores, rng)
    end_here = ends_s([prompts.backlog[here]], Prices(Work(0, answer_tokens=want.all_answer_tokens)))
    end_there = ends_s([prompts.backlog[there]], Prices(Work(want.tokens, answer_tokens=want.all_answer_tokens)))
    if end_here is None or end_there is None:
        earlier = prompts.pending_tokens[there] + want.tokens + want.all_answer_tokens < prompts.pending_tokens[here]
    else:
        earlier = end_there[0] < end_here[0]
    return prompts.name[there] if earlier else None


def is_faster_elsewhere(prompts: Pool, name: str, tokens: int, kept_tokens: int, lora: str = "") -> bool:
    """Whether another instance would have computed a prompt of ``tokens`` before this one, which keeps some of them, has computed the
    rest.
    """
    waits = [
        prompts.text_load(place).prefill_tokens
        for place in prompts.all
        if prompts.usable[place] and prompts.name[place] != name and not is_closed(prompts, place)
        if prompts.text[place].has_lora(lora)
    ]
    here = prompts.text_load(prompts.places[name]).prefill_tokens
    return bool(waits) and min(waits) + tokens < here - kept_tokens
