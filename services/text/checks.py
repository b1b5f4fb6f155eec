"""Validates a request before any work is done for it."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from triptych.domain.embedding import TensorSpec, Ticket, joined
from triptych.domain.generation import Placement, TextRequest
from triptych.domain.kv_segment import KvKind, KvSegment
from triptych.errors import ContextTooLong, InvalidRequest, ModelNotFound, TransferFailed
from triptych.families.base import Span, filled_positions
from triptych.policy.admission import check_continued, check_parameters
from triptych.ports import TextEngine
from triptych.transport.slot import check_ticket

from .arriving import Offered


def check_request(request: TextRequest, engine: TextEngine) -> None:
    """Raises ModelNotFound, ContextTooLong, InvalidRequest. Raises TransferFailed, naming the item, for a ticket that
    is inconsistent or whose tensors the engine does not accept.
    """
    model = engine.model
    if request.model != model.model_id:
        raise ModelNotFound(f"this instance serves {model.model_id!r}, not {request.model!r}")
    prompt, max_tokens = len(request.token_ids), request.sampling.max_tokens
    if not prompt:
        raise InvalidRequest("the prompt is empty")
    if max_tokens is None:
        raise InvalidRequest("max_tokens is not set", param="max_tokens")
    check_parameters(request.sampling)
    check_continued(request.sampling, request.continued, model.context_length)
    if prompt + max_tokens > model.context_length:
        raise ContextTooLong(
            f"the prompt has {prompt} tokens and the answer up to {max_tokens}, the limit is {model.context_length}"
        )
    _check_layout(request, engine.placeholder_ids)
    for item in _items(request.placements):
        _check_tensors(item, engine)


def usable_segments(request: TextRequest, kind: KvKind | None) -> tuple[list[Offered], list[Ticket]]:
    """The keys and values that this instance can take, each with the choices that get it, and the tickets of the others: of
    another kind, contradictory, or behind such a one.

    Raises InvalidRequest if they do not cover a beginning of each choice without gap and overlap.
    """
    choices, arriving = tuple(request.begun), arriving_lengths(request)
    ends, broken = dict.fromkeys(choices, 0), set[int]()
    usable: list[Offered] = []
    ignored: list[Ticket] = []
    for placement in request.kv_segments:
        whose = [one for one in placement.choices or choices if one in ends]
        for one in whose:
            length = len(request.token_ids) + len(request.begun[one])
            if placement.first != ends[one] or not placement.first < placement.end <= length:
                raise InvalidRequest(
                    f"keys and values of positions {placement.first} to {placement.end} do not follow {ends[one]} within the "
                    f"{length} tokens of choice {one}",
                    param="kv_segments",
                )
            ends[one] = placement.end
        arrives = tuple([one for one in whose if one in arriving and one not in broken])
        segment = None if kind is None else KvSegment(kind, placement.first, placement.ticket.tokens)
        if arrives and segment is not None and _is_sealed_as(placement.ticket, segment):
            usable.append(Offered(segment, placement.ticket, arrives))
        else:
            ignored.append(placement.ticket)
            broken.update(whose)
    return usable, ignored


def arriving_lengths(request: TextRequest) -> dict[int, int]:
    """The tokens of each choice that keys and values can arrive for: of new choices the first, which computes for all."""
    prompt = len(request.token_ids)
    lengths = {choice: prompt + len(token_ids) for choice, token_ids in request.begun.items()}
    return lengths if request.continued else dict([next(iter(lengths.items()))])


def _is_sealed_as(ticket: Ticket, segment: KvSegment) -> bool:
    return ticket.tensors == (segment.spec,) and ticket.payload_nbytes == segment.nbytes


def _items(placements: Sequence[Placement]) -> list[list[Placement]]:
    """The placements of each item, one or one per shard. Raises InvalidRequest for a shard without an item."""
    items: list[list[Placement]] = []
    for placement in placements:
        if not placement.continues:
            items.append([placement])
        elif items:
            items[-1].append(placement)
        else:
            raise InvalidRequest(f"item {placement.item} continues a previous item, but there is none")
    return items


def _check_tensors(item: Sequence[Placement], engine: TextEngine) -> None:
    number, tokens = item[0].item, sum(placement.tokens for placement in item)
    numbers = tuple(placement.item for placement in item)
    for placement in item:
        try:
            check_ticket(placement.ticket)
        except TransferFailed as error:
            raise TransferFailed(f"item {placement.item}: {error.message}", items=(placement.item,)) from None
    try:
        whole = joined([placement.ticket.tensors for placement in item])
    except ValueError:
        message = f"the shards of item {number} have tensors that cannot be concatenated"
        raise TransferFailed(message, items=numbers) from None
    if not engine.accepts(tokens, whole):
        raise TransferFailed(
            f"item {number} has tensors {_named(whole)}, which the model does not accept for {tokens} positions",
            items=numbers,
        )


def _check_layout(request: TextRequest, placeholder_ids: AbstractSet[int]) -> None:
    """Check that each item has its own placeholders, inside the prompt."""
    if len({placement.item for placement in request.placements}) != len(request.placements):
        raise InvalidRequest("an item is placed twice")
    end = 0
    ordered = sorted(request.placements, key=lambda one: one.start)
    for placement, before in zip(ordered, (None, *ordered), strict=False):
        if placement.tokens < 1:
            raise InvalidRequest(f"item {placement.item} has {placement.tokens} tokens, it needs at least 1")
        if placement.start < end:
            raise InvalidRequest(f"item {placement.item} starts at {placement.start}, before {end} where it may")
        filled = filled_positions(request.token_ids, Span(placement.start, placement.tokens), placeholder_ids)
        if placement.continues and before is not None:
            run = Span(before.start, before.tokens + 1)
            if filled_positions(request.token_ids, run, placeholder_ids)[-1] != placement.start:
                raise InvalidRequest(f"item {placement.item} does not start where the one before it ends")
        end = filled[-1] + 1


def _named(tensors: tuple[TensorSpec, ...]) -> str:
    return ", ".join(f"{one.name} {one.dtype.value}{list(one.shape)}" for one in tensors[:8]) or "nothing"
