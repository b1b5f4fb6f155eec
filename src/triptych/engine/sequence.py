"""One sequence of the text engine: what it brings, how far it is, and what may not enter at all."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from triptych.domain.embedding import TensorSpec
from triptych.engine.halves import TextHalf
from triptych.engine.sampling import Sampler
from triptych.engine.tensors import from_bytes, is_finite
from triptych.errors import ContextTooLong, EngineFailure, InvalidRequest
from triptych.ports import EmbeddingInput, EngineRequest

_SPLICED = -1
"""Stands for a placeholder that has its item. It is embedded as token 0: some vocabularies lack the placeholder."""


@dataclass(frozen=True, slots=True)
class SplicedItem:
    """An item's tensors and the prompt positions ``start`` to ``end`` that they replace."""

    start: int
    end: int
    tensors: Mapping[str, torch.Tensor]


@dataclass(eq=False, slots=True)
class RunningSequence:
    """One choice of a request. ``token_ids`` are prompt and answer; the first ``computed`` of them have their keys and
    values in the KV cache, from ``first_slot`` on.
    """

    request_id: str
    choice: int
    sampler: Sampler
    max_tokens: int
    prompt_length: int
    token_ids: list[int]
    items: tuple[SplicedItem, ...]
    computed: int = 0
    first_slot: int | None = None

    @property
    def sequence_id(self) -> str:
        return f"{self.request_id}/{self.choice}"

    @property
    def answer(self) -> list[int]:
        return self.token_ids[self.prompt_length :]

    @property
    def generated(self) -> int:
        return len(self.token_ids) - self.prompt_length

    @property
    def uncomputed(self) -> int:
        """Prompt positions before the first token is out; then the one token that the next is computed from."""
        return len(self.token_ids) - self.computed

    @property
    def pending_tokens(self) -> int:
        return max(0, self.prompt_length - self.computed) + self.max_tokens - self.generated

    @property
    def slots(self) -> int:
        """KV slots that it can come to need: reserved as a whole, so that it never has to wait while it holds some."""
        return self.prompt_length + self.max_tokens


@dataclass(eq=False, slots=True)
class RunningRequest:
    """The choices of one request that are not over.

    They start together, or wait holding nothing. The first computes the prompt; the others take its keys and values
    over and begin with the same logits.
    """

    request_id: str
    sequences: list[RunningSequence]

    @property
    def pending_tokens(self) -> int:
        """The prompt's once, the answers' each."""
        return sum(sequence.pending_tokens for sequence in self.sequences) - sum(
            sequence.prompt_length - sequence.computed for sequence in self.followers
        )

    @property
    def leader(self) -> RunningSequence:
        return self.sequences[0]

    @property
    def followers(self) -> list[RunningSequence]:
        """Those that wait for the leader to get through the prompt."""
        return [sequence for sequence in self.sequences[1:] if not sequence.generated]


@dataclass(frozen=True, slots=True)
class Limits:
    context_length: int
    kv_slots: int
    max_sequences: int
    vocabulary: int
    placeholder_id: int
    eos_ids: frozenset[int]


def accept(request: EngineRequest, half: TextHalf, limits: Limits, device: torch.device) -> RunningRequest:
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
    if sampling.n * (prompt + max_tokens) > limits.kv_slots:
        times = f"{sampling.n} times " if sampling.n > 1 else ""
        raise InvalidRequest(
            f"{times}a prompt of {prompt} tokens and {max_tokens} tokens to generate exceed the KV cache of "
            f"{limits.kv_slots} tokens"
        )
    for token in (*sampling.stop_token_ids, *(token for token, _ in sampling.logit_bias)):
        if not 0 <= token < limits.vocabulary:
            raise InvalidRequest(f"token {token} is outside of the vocabulary of {limits.vocabulary}")
    token_ids = list(request.token_ids)
    foreign = [token for token in token_ids if not 0 <= token < limits.vocabulary and token != limits.placeholder_id]
    if foreign:
        raise InvalidRequest(f"token {foreign[0]} of the prompt is outside of the vocabulary of {limits.vocabulary}")
    items = _splice_plan(request.embeddings, token_ids, limits.placeholder_id, half, device)
    sequences = [
        RunningSequence(
            request_id=request.request_id,
            choice=choice,
            sampler=Sampler(
                sampling,
                prompt=[token for token in request.token_ids if 0 <= token < limits.vocabulary],
                eos_ids=limits.eos_ids,
                choice=choice,
                grammar=request.grammar.fork() if request.grammar is not None else None,
            ),
            max_tokens=max_tokens,
            prompt_length=prompt,
            token_ids=[0 if token == _SPLICED else token for token in token_ids],
            items=items,
        )
        for choice in range(sampling.n)
    ]
    return RunningRequest(request.request_id, sequences)


def _splice_plan(
    embeddings: Sequence[EmbeddingInput],
    token_ids: list[int],
    placeholder: int,
    half: TextHalf,
    device: torch.device,
) -> tuple[SplicedItem, ...]:
    """Match items with runs of placeholders, and mark those in ``token_ids``."""
    items: list[SplicedItem] = []
    for given in embeddings:
        end = given.start + given.tokens
        if given.start < 0 or given.tokens < 1 or any(t != placeholder for t in token_ids[given.start : end]):
            raise InvalidRequest(f"positions {given.start} to {end} of the prompt are not placeholders of one item")
        if end > len(token_ids):
            raise InvalidRequest(f"an item ends at position {end} of a prompt of {len(token_ids)} tokens")
        token_ids[given.start : end] = [_SPLICED] * given.tokens
        items.append(SplicedItem(given.start, end, _tensors(given, half.expected(given.tokens), device)))
    if placeholder in token_ids:
        raise InvalidRequest(f"the placeholder at position {token_ids.index(placeholder)} has no item")
    return tuple(items)


def _tensors(given: EmbeddingInput, expected: Sequence[TensorSpec], device: torch.device) -> Mapping[str, torch.Tensor]:
    specs = {spec.name: spec for spec in expected}
    if {name: tensor.spec for name, tensor in given.tensors.items()} != specs:
        raise InvalidRequest(f"the embedding at position {given.start} is not of the form {tuple(expected)}")
    tensors = {name: from_bytes(tensor, device) for name, tensor in given.tensors.items()}
    if not all(is_finite(tensor) for tensor in tensors.values()):
        raise EngineFailure(f"the embedding at position {given.start} is not finite")
    return tensors
