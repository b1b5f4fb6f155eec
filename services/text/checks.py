"""What a request must be before anything is spent on it."""

from triptych.domain.embedding import TensorSpec
from triptych.domain.generation import Placement, TextRequest
from triptych.errors import ContextTooLong, InternalError, InvalidRequest, ModelNotFound
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
    _check_layout(request)
    for placement in request.placements:
        check_ticket(placement.ticket)
        _check_tensors(placement, engine.expected(placement.tokens))


def _check_layout(request: TextRequest) -> None:
    """Each item has a run of its own, of one repeated placeholder id, inside the prompt."""
    if len({placement.item for placement in request.placements}) != len(request.placements):
        raise InvalidRequest("an item is placed twice")
    end = 0
    for placement in sorted(request.placements, key=lambda one: one.start):
        if placement.tokens < 1:
            raise InvalidRequest(f"item {placement.item} has {placement.tokens} tokens, it needs at least 1")
        if placement.start < end:
            raise InvalidRequest(f"item {placement.item} starts at {placement.start}, before {end} where it may")
        end = placement.start + placement.tokens
        if end > len(request.token_ids):
            raise InvalidRequest(
                f"item {placement.item} ends at position {end}, the prompt has {len(request.token_ids)}"
            )
        if len(set(request.token_ids[placement.start : end])) != 1:
            raise InvalidRequest(
                f"positions {placement.start} to {end - 1} are not one run of a placeholder for item {placement.item}"
            )


def _check_tensors(placement: Placement, expected: tuple[TensorSpec, ...]) -> None:
    if placement.ticket.tensors != expected:
        raise InternalError(
            f"item {placement.item} comes as {_named(placement.ticket.tensors)}, the model takes {_named(expected)}"
        )


def _named(tensors: tuple[TensorSpec, ...]) -> str:
    return ", ".join(f"{one.name} {one.dtype.value}{list(one.shape)}" for one in tensors[:8]) or "nothing"
