"""Validates a request before any work is done for it."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from triptych.domain.embedding import TensorSpec, joined
from triptych.domain.generation import Placement, TextRequest
from triptych.errors import ContextTooLong, InvalidRequest, ModelNotFound, TransferFailed
from triptych.families.base import Span, filled_positions
from triptych.policy.admission import check_continued, check_parameters
from triptych.ports import TextEngine
from triptych.transport.slot import check_ticket


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
    if request.continued:
        check_continued(request.sampling, request.continued, model.context_length)
    if prompt + max_tokens > model.context_length:
        raise ContextTooLong(
            f"the prompt has {prompt} tokens and the answer up to {max_tokens}, the limit is {model.context_length}"
        )
    _check_layout(request, engine.placeholder_ids)
    for item in _items(request.placements):
        _check_tensors(item, engine)


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
    ordered = sorted(request.placements, key=lambda placement: placement.start)
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
    return ", ".join(f"{tensor.name} {tensor.dtype.value}{list(tensor.shape)}" for tensor in tensors[:8]) or "nothing"
