"""One sequence of the text engine: what it brings, and what may not enter at all."""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import torch

from triptych.engine.decoder.sampling import Sampler
from triptych.engine.families.adapters import DecoderAdapter, PlacedItem, PromptPlan
from triptych.engine.tensors import from_bytes, is_finite
from triptych.errors import ContextTooLong, EngineFailure, InvalidRequest
from triptych.families.base import Span, filled_positions
from triptych.machine.text.prefix_hashes import KeyedItem
from triptych.machine.text.running_batch import sequence_id
from triptych.ports import EmbeddingInput, EngineRequest


@dataclass(eq=False, slots=True)
class RunningSequence:
    """One choice of a request. ``token_ids`` are prompt and answer; how far it is says ``machine/text/running_batch.py``."""

    request_id: str
    choice: int
    sampler: Sampler
    prompt_length: int
    max_tokens: int
    token_ids: list[int]
    plan: PromptPlan

    @property
    def sequence_id(self) -> str:
        return sequence_id(self.request_id, self.choice)

    @property
    def answer(self) -> list[int]:
        return self.token_ids[self.prompt_length :]

    @property
    def generated(self) -> int:
        return len(self.token_ids) - self.prompt_length


@dataclass(frozen=True, slots=True)
class AcceptedRequest:
    sequences: tuple[RunningSequence, ...]
    plan: PromptPlan
    items: tuple[KeyedItem, ...] | None
    """What the identity of its prompt needs beside tokens; None where an item's is not known."""
    nbytes: int
    """Of the copies of its tensors."""


@dataclass(frozen=True, slots=True)
class Limits:
    context_length: int
    kv_blocks: int
    block_tokens: int
    blocks_for: Callable[[int], int]
    """Blocks that a sequence of so many tokens takes."""
    max_sequences: int
    max_embedding_nbytes: int
    vocabulary: int
    """Tokens that can be chosen."""
    embeddings: int
    """Tokens that have an embedding: a placeholder may, and yet never be chosen."""
    placeholder_ids: AbstractSet[int]
    eos_ids: frozenset[int]


def accept(request: EngineRequest, adapter: DecoderAdapter, limits: Limits, device: torch.device) -> AcceptedRequest:
    """Check a request and copy its tensors.

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
    # Some vocabularies lack the placeholder; what stands for an item is replaced anyway.
    embeddable = [token if 0 <= token < limits.embeddings else 0 for token in token_ids]
    sequences = tuple(
        RunningSequence(
            request_id=request.request_id,
            choice=choice,
            sampler=Sampler(
                sampling,
                prompt=[token for token in known if token < limits.vocabulary],
                eos_ids=limits.eos_ids,
                choice=choice,
                grammar=request.grammar.fork() if request.grammar is not None else None,
            ),
            prompt_length=prompt,
            max_tokens=max_tokens,
            token_ids=list(embeddable),
            plan=plan,
        )
        for choice in range(sampling.n)
    )
    keyed = tuple(
        KeyedItem(given.key, item.positions) for given, item in zip(request.embeddings, items, strict=True) if given.key
    )
    return AcceptedRequest(sequences, plan, keyed if len(keyed) == len(items) else None, nbytes)


def _place(
    embeddings: Sequence[EmbeddingInput],
    token_ids: Sequence[int],
    placeholder_ids: AbstractSet[int],
    adapter: DecoderAdapter,
    device: torch.device,
) -> tuple[PlacedItem, ...]:
    """Match items with the placeholders that they fill: each one's, and each once."""
    items: list[PlacedItem] = []
    filled: set[int] = set()
    for given in embeddings:
        positions = filled_positions(token_ids, Span(given.start, given.tokens), placeholder_ids)
        if not filled.isdisjoint(positions):
            raise InvalidRequest(f"the item at position {given.start} of the prompt overlaps another")
        filled.update(positions)
        items.append(PlacedItem(positions, _tensors(given, adapter, device)))
    empty = [at for at, token in enumerate(token_ids) if token in placeholder_ids and at not in filled]
    if empty:
        raise InvalidRequest(f"the placeholder at position {empty[0]} has no item")
    return tuple(items)


def _tensors(given: EmbeddingInput, adapter: DecoderAdapter, device: torch.device) -> Mapping[str, torch.Tensor]:
    specs = [tensor.spec for tensor in given.tensors.values()]
    if any(name != tensor.spec.name for name, tensor in given.tensors.items()) or not adapter.accepts(
        given.tokens, specs
    ):
        raise InvalidRequest(f"the embedding at position {given.start} is not of the form that the model takes")
    tensors = {name: from_bytes(tensor, device) for name, tensor in given.tensors.items()}
    if not all(is_finite(tensor) for tensor in tensors.values()):
        raise EngineFailure(f"the embedding at position {given.start} is not finite")
    return tensors
