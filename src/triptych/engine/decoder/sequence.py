"""A sequence of the text engine, and the validation of requests."""

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from triptych.domain.sampling import SamplingParams
from triptych.engine.families.adapters import DecoderAdapter, PlacedItem, PromptPlan
from triptych.engine.tensors import embedding_tensors
from triptych.errors import ContextTooLong, InvalidRequest
from triptych.families.base import Span, filled_positions
from triptych.machine.text.prefix_hashes import KeyedItem, PrefixHashes
from triptych.machine.text.sequence import Sequence as Scheduled
from triptych.ports import EmbeddingInput, EngineRequest, TokenGrammar


@dataclass(eq=False, slots=True, kw_only=True)
class EngineSequence(Scheduled):
    """One choice of a request: its scheduling state, inputs, and sampling state."""

    plan: PromptPlan
    sampling: SamplingParams
    end_ids: frozenset[int]
    """Tokens that end the answer."""
    prompt_ids: npt.NDArray[np.intp]
    """Unique tokens of the prompt, for the repetition penalty; empty without a penalty."""
    grammar: TokenGrammar | None = None

    @property
    def is_early(self) -> bool:
        """Whether its next token must not be an end token."""
        return self.generated < self.sampling.min_tokens and bool(self.end_ids)

    @property
    def is_adjusted(self) -> bool:
        """Whether its logits are modified before sampling."""
        sampling = self.sampling
        penalized = sampling.repetition_penalty != 1 or sampling.frequency_penalty or sampling.presence_penalty
        return bool(penalized or sampling.logit_bias or self.grammar is not None or self.is_early)

    @property
    def takes_argmax(self) -> bool:
        """Whether its next token is the plain argmax of its logits."""
        return self.sampling.temperature <= 0 and self.sampling.logprobs is None and not self.is_adjusted


@dataclass(frozen=True, slots=True)
class Limits:
    context_length: int
    kv_blocks: int
    block_tokens: int
    blocks_for: Callable[[int], int]
    """Blocks for a sequence of a number of tokens."""
    max_sequences: int
    shares_prefixes: bool
    max_embedding_nbytes: int
    vocabulary: int
    """Tokens that can be sampled."""
    embeddings: int
    """Tokens with an embedding; includes placeholders that are never sampled."""
    placeholder_ids: AbstractSet[int]
    eos_ids: frozenset[int]


def accept(
    request: EngineRequest, adapter: DecoderAdapter, limits: Limits, device: torch.device
) -> tuple[list[EngineSequence], int]:
    """Validate a request and copy its tensors; returns a sequence per choice, and the bytes of the copies.

    Raises ContextTooLong, InvalidRequest for what can never run, EngineFailure for embeddings that are not finite.
    """
    sampling = request.sampling
    prompt, max_tokens = len(request.token_ids), sampling.max_tokens
    if max_tokens is None or max_tokens < 1:
        raise InvalidRequest(f"max_tokens is {max_tokens}, at least 1 is needed")
    if not prompt:
        raise InvalidRequest("the prompt is empty")
    if prompt + max_tokens > limits.context_length:
        raise ContextTooLong(
            f"a prompt of {prompt} tokens and {max_tokens} tokens to generate exceed the context of "
            f"{limits.context_length} tokens"
        )
    if not 1 <= sampling.n <= limits.max_sequences:
        raise InvalidRequest(f"n is {sampling.n}, must be from 1 to {limits.max_sequences} here", param="n")
    if sampling.n * limits.blocks_for(prompt + max_tokens) > limits.kv_blocks:
        times = f"{sampling.n} times " if sampling.n > 1 else ""
        raise InvalidRequest(
            f"{times}a prompt of {prompt} tokens and {max_tokens} tokens to generate exceed the KV cache of "
            f"{limits.kv_blocks * limits.block_tokens} tokens, in blocks of {limits.block_tokens}"
        )
    nbytes = sum(tensor.spec.nbytes for given in request.embeddings for tensor in given.tensors.values())
    if nbytes > limits.max_embedding_nbytes:
        raise InvalidRequest(
            f"the request's embeddings take {nbytes} bytes, the engine holds {limits.max_embedding_nbytes}"
        )
    for token in (*sampling.stop_token_ids, *(token for token, _ in sampling.logit_bias)):
        if not 0 <= token < limits.vocabulary:
            raise InvalidRequest(f"token {token} is outside of the vocabulary of {limits.vocabulary}")
    token_ids = list(request.token_ids)
    known = [token for token in token_ids if 0 <= token < limits.embeddings]
    foreign = [token for token in token_ids if not 0 <= token < limits.embeddings] if len(known) < prompt else []
    if any(token not in limits.placeholder_ids for token in foreign):
        outside = next(token for token in foreign if token not in limits.placeholder_ids)
        raise InvalidRequest(f"token {outside} of the prompt is outside of the vocabulary of {limits.embeddings}")
    items = _place(request.embeddings, token_ids, limits.placeholder_ids, adapter, device)
    plan = adapter.plan(token_ids, items)
    # Some vocabularies lack the placeholder; its embedding is replaced anyway.
    embeddable = [token if 0 <= token < limits.embeddings else 0 for token in token_ids]
    prefix_hashes = _prefix_hashes(request, embeddable, items, plan, limits)
    penalized = [token for token in known if token < limits.vocabulary] if sampling.repetition_penalty != 1 else []
    prompt_ids = np.unique(np.array(penalized, dtype=np.intp))
    end_ids = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else limits.eos_ids)
    sequences = [
        EngineSequence(
            request_id=request.request_id,
            choice=choice,
            token_ids=list(embeddable),
            prompt_tokens=prompt,
            max_tokens=max_tokens,
            turn=request.turn,
            bidirectional=plan.bidirectional,
            prefix_hashes=prefix_hashes.fork() if prefix_hashes is not None else None,
            plan=plan,
            sampling=sampling,
            end_ids=end_ids,
            prompt_ids=prompt_ids,
            grammar=request.grammar.fork() if request.grammar is not None else None,
        )
        for choice in range(sampling.n)
    ]
    return sequences, nbytes


def _prefix_hashes(
    request: EngineRequest, token_ids: Sequence[int], items: Sequence[PlacedItem], plan: PromptPlan, limits: Limits
) -> PrefixHashes | None:
    """None without prefix caching, or if an item has no identity."""
    keys = [given.key for given in request.embeddings]
    if not limits.shares_prefixes or not all(keys):
        return None
    keyed = [KeyedItem(key, item.positions) for key, item in zip(keys, items, strict=True)]
    salt = request.tenant_salt
    if plan.looks_ahead:
        salt = b"".join((salt, *(b"%d:" % len(key) + key for key in keys)))
    return PrefixHashes(limits.block_tokens, token_ids, keyed, salt=salt)


def _place(
    embeddings: Sequence[EmbeddingInput],
    token_ids: Sequence[int],
    placeholder_ids: AbstractSet[int],
    adapter: DecoderAdapter,
    device: torch.device,
) -> tuple[PlacedItem, ...]:
    """Match items with the placeholders that they fill, one to one."""
    items: list[PlacedItem] = []
    filled: set[int] = set()
    for given in embeddings:
        positions = filled_positions(token_ids, Span(given.start, given.tokens), placeholder_ids)
        if not filled.isdisjoint(positions):
            raise InvalidRequest(f"the item at position {given.start} of the prompt overlaps another")
        filled.update(positions)
        items.append(PlacedItem(positions, embedding_tensors(given, adapter.accepts, device)))
    empty = [at for at, token in enumerate(token_ids) if token in placeholder_ids and at not in filled]
    if empty:
        raise InvalidRequest(f"the placeholder at position {empty[0]} has no item")
    return tuple(items)
