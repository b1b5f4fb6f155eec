"""Checks that every text engine makes of a request before it takes it."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from triptych.domain.engine import EmbeddingInput, EngineRequest
from triptych.errors import ContextTooLong, InvalidRequest
from triptych.families.base import Span, filled_positions

_ANY_TOKEN = 0
"""Stands for a placeholder that the vocabulary lacks; its embedding is replaced anyway."""


@dataclass(frozen=True, slots=True)
class PromptLimits:
    context_length: int
    """Most tokens of a prompt with its answer."""
    vocabulary: int
    """Tokens that can be sampled."""
    embeddings: int
    """Tokens with an embedding; includes placeholders that are never sampled."""
    placeholder_ids: AbstractSet[int]
    max_embedding_nbytes: int


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    token_ids: list[int]
    """The prompt; each token has an embedding."""
    max_tokens: int
    positions: tuple[tuple[int, ...], ...]
    """The prompt positions that each item fills, in the order of the request's embeddings."""
    nbytes: int
    """Bytes of the request's embeddings."""


def check_request(request: EngineRequest, limits: PromptLimits) -> CheckedRequest:
    """Raises ContextTooLong or InvalidRequest for what can never run."""
    sampling, prompt, max_tokens = request.sampling, len(request.token_ids), request.sampling.max_tokens
    if max_tokens is None or max_tokens < 1:
        raise InvalidRequest(f"max_tokens is {max_tokens}, at least 1 is needed")
    if not prompt:
        raise InvalidRequest("the prompt is empty")
    if prompt + max_tokens > limits.context_length:
        raise ContextTooLong(
            f"a prompt of {prompt} tokens and {max_tokens} tokens to generate exceed the context of "
            f"{limits.context_length} tokens"
        )
    nbytes = sum(tensor.spec.nbytes for given in request.embeddings for tensor in given.tensors.values())
    if nbytes > limits.max_embedding_nbytes:
        raise InvalidRequest(
            f"the request's embeddings take {nbytes} bytes, the engine holds {limits.max_embedding_nbytes}"
        )
    for token in (*sampling.stop_token_ids, *(token for token, _ in sampling.logit_bias)):
        if not 0 <= token < limits.vocabulary:
            raise InvalidRequest(f"token {token} is outside of the vocabulary of {limits.vocabulary}")
    for choice in request.continued:
        if not all(0 <= token < limits.vocabulary for token in choice.token_ids):
            raise InvalidRequest(f"choice {choice.choice} has a token outside of the vocabulary of {limits.vocabulary}")
    token_ids = [token if 0 <= token < limits.embeddings else _stand_in(token, limits) for token in request.token_ids]
    positions = _positions(request.embeddings, request.token_ids, limits.placeholder_ids)
    return CheckedRequest(token_ids, max_tokens, positions, nbytes)


def _stand_in(token: int, limits: PromptLimits) -> int:
    if token not in limits.placeholder_ids:
        raise InvalidRequest(f"token {token} of the prompt is outside of the vocabulary of {limits.embeddings}")
    return _ANY_TOKEN


def _positions(
    embeddings: Sequence[EmbeddingInput], token_ids: Sequence[int], placeholder_ids: AbstractSet[int]
) -> tuple[tuple[int, ...], ...]:
    """Match items with the placeholders that they fill, one to one."""
    result: list[tuple[int, ...]] = []
    filled: set[int] = set()
    for given in embeddings:
        positions = filled_positions(token_ids, Span(given.start, given.tokens), placeholder_ids)
        if not filled.isdisjoint(positions):
            raise InvalidRequest(f"the item at position {given.start} of the prompt overlaps another")
        filled.update(positions)
        result.append(positions)
    empty = next((at for at, token in enumerate(token_ids) if token in placeholder_ids and at not in filled), None)
    if empty is not None:
        raise InvalidRequest(f"the placeholder at position {empty} has no item")
    return tuple(result)
