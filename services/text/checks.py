"""What a request must be before anything is spent on it."""

from collections.abc import Set as AbstractSet

from triptych.domain.embedding import TensorSpec
from triptych.domain.generation import TextRequest
from triptych.errors import ContextTooLong, InternalError, InvalidRequest, ModelNotFound
from triptych.families.base import Run, filled_positions
from triptych.ports import TextEngine
from triptych.transport.slot import check_ticket


def check_request(request: TextRequest, engine: TextEngine) -> None:
    """Raises ModelNotFound, ContextTooLong, InvalidRequest; TransferFailed for a ticket that contradicts itself.

    Raises InternalError when an encoder's embeddings are not what this engine takes: both pools must serve the same
    model in the same dtype, and no retry can change that.
    """
    model = engine.model
    if request.model != model.model_id:
        raise ModelNotFound(f"this instance serves {model.model_id!r}, not {request.model!r}")
    prompt, max_tokens = len(request.token_ids), request.sampling.max_tokens
    if not prompt:
        raise InvalidRequest("the prompt is empty")
    if max_tokens is None or max_tokens < 1:
        raise InvalidRequest(f"max_tokens is {max_tokens}, it must be at least 1")
    if prompt + max_tokens > model.context_length:
        raise ContextTooLong(
            f"the prompt has {prompt} tokens and the answer up to {max_tokens}, the limit is {model.context_length}"
        )
    _check_layout(request, engine.placeholder_ids)
    for placement in request.placements:
        check_ticket(placement.ticket)
        if not engine.accepts(placement.tokens, placement.ticket.tensors):
            raise InternalError(
                f"item {placement.item} comes as {_named(placement.ticket.tensors)}, "
                f"the model takes other tensors for {placement.tokens} positions"
            )


def _check_layout(request: TextRequest, placeholder_ids: AbstractSet[int]) -> None:
    """Each item has placeholders of its own, inside the prompt."""
    if len({placement.item for placement in request.placements}) != len(request.placements):
        raise InvalidRequest("an item is placed twice")
    end = 0
    for placement in sorted(request.placements, key=lambda one: one.start):
        if placement.tokens < 1:
            raise InvalidRequest(f"item {placement.item} has {placement.tokens} tokens, it needs at least 1")
        if placement.start < end:
            raise InvalidRequest(f"item {placement.item} starts at {placement.start}, before {end} where it may")
        filled = filled_positions(request.token_ids, Run(placement.start, placement.tokens), placeholder_ids)
        end = filled[-1] + 1


def _named(tensors: tuple[TensorSpec, ...]) -> str:
    return ", ".join(f"{one.name} {one.dtype.value}{list(one.shape)}" for one in tensors[:8]) or "nothing"
