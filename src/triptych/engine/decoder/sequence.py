"""A sequence of the text engine, and how a request becomes its sequences."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from triptych.domain.engine import EngineRequest
from triptych.domain.sampling import SamplingParams
from triptych.engine.families.adapters import DecoderAdapter, PlacedItem, PromptPlan
from triptych.engine.request_checks import PromptLimits, check_request
from triptych.engine.tensors import embedding_tensors
from triptych.errors import InvalidRequest
from triptych.machine.text.prefix_hashes import BlockHashes, KeyedItem, PrefixHashes, salt_of
from triptych.machine.text.sequence import Sequence as Scheduled
from triptych.ports import TokenGrammar


@dataclass(eq=False, slots=True, kw_only=True)
class EngineSequence(Scheduled):
    """Choice of a request: its scheduling state, inputs, and sampling state."""

    plan: PromptPlan
    sampling: SamplingParams
    end_ids: frozenset[int]
    """Tokens that end the answer."""
    prompt_ids: npt.NDArray[np.intp]
    """Unique tokens of the prompt, for the repetition penalty; empty without a penalty."""
    lora: str = ""
    """Digest of its LoRA adapter; empty without one."""
    grammar: TokenGrammar | None = None
    prefixes: PrefixHashes | None = None
    """Prefix hashes; None if an item has no identity."""

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

    def replay(self, token_ids: Sequence[int]) -> None:
        """Begin after tokens of its answer. Raises what the grammar raises."""
        for token in token_ids:
            if self.grammar is not None:
                self.grammar.accept(token)
            self.append(token)


@dataclass(frozen=True, slots=True)
class Limits:
    request: PromptLimits
    kv_blocks: int
    block_tokens: int
    blocks_for: Callable[[int], int]
    """Blocks for a sequence of a number of tokens."""
    max_sequences: int
    hashed_tokens: int | None
    """Tokens of each of a sequence's prefix hashes; None: prefixes are not shared."""
    eos_ids: frozenset[int]


def accept(
    request: EngineRequest, adapter: DecoderAdapter, limits: Limits, device: torch.device
) -> tuple[list[EngineSequence], int]:
    """Validate a request and copy its tensors; returns a sequence per choice to run, and the bytes of the copies.

    Raises ContextTooLong, InvalidRequest for what can never run, EngineFailure for embeddings that are not finite.
    """
    checked = check_request(request, limits.request)
    sampling, prompt, max_tokens = request.sampling, len(checked.token_ids), checked.max_tokens
    if not 1 <= sampling.n <= limits.max_sequences:
        raise InvalidRequest(f"n is {sampling.n}, must be from 1 to {limits.max_sequences} here", param="n")
    choices = len(request.begun)
    if choices * limits.blocks_for(prompt + max_tokens) > limits.kv_blocks:
        times = f"{choices} times " if choices > 1 else ""
        raise InvalidRequest(
            f"{times}a prompt of {prompt} tokens and {max_tokens} tokens to generate exceed the KV cache of "
            f"{limits.kv_blocks * limits.block_tokens} tokens, in blocks of {limits.block_tokens}"
        )
    items = tuple(
        PlacedItem(positions, embedding_tensors(given, adapter.accepts, device))
        for given, positions in zip(request.embeddings, checked.positions, strict=True)
    )
    plan = adapter.plan(list(request.token_ids), items)
    if plan.grammar is not None and request.grammar is not None:
        raise InvalidRequest("the model's answers have a form of their own", param="response_format")
    grammar = request.grammar if plan.grammar is None else plan.grammar
    keyed, salt = _identity(request, items, looks_ahead=adapter.looks_ahead)
    prefix_hashes = None
    if limits.hashed_tokens is not None and keyed is not None:
        prefix_hashes = BlockHashes(limits.hashed_tokens, checked.token_ids, keyed, salt=salt)
    tokens = request.token_ids if sampling.repetition_penalty != 1 else ()
    prompt_ids = np.unique(
        np.array([token for token in tokens if 0 <= token < limits.request.vocabulary], dtype=np.intp)
    )
    end_ids = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else limits.eos_ids)
    sequences = [
        EngineSequence(
            request_id=request.request_id,
            choice=choice,
            token_ids=list(checked.token_ids),
            prompt_tokens=prompt,
            max_tokens=max_tokens,
            queue_position=request.queue_position,
            bidirectional=plan.bidirectional,
            prefix_hashes=prefix_hashes.fork() if prefix_hashes is not None else None,
            plan=plan,
            sampling=sampling,
            end_ids=end_ids,
            prompt_ids=prompt_ids,
            lora=request.lora,
            grammar=grammar.fork() if grammar is not None else None,
            prefixes=PrefixHashes(keyed, salt=salt) if keyed is not None else None,
            arriving=request.arriving,
        )
        for choice in request.begun
    ]
    for sequence in sequences:
        sequence.replay(request.begun[sequence.choice])
        sequence.pauses = request.pauses
    return sequences, checked.nbytes


def _identity(
    request: EngineRequest, items: Sequence[PlacedItem], *, looks_ahead: bool
) -> tuple[list[KeyedItem] | None, bytes]:
    """Identity that its prefix hashes cover beside tokens: its items, None if one of them has no identity, and a salt."""
    keys = [given.key for given in request.embeddings]
    if not all(keys):
        return None, b""
    salt = salt_of(request.tenant_salt, request.lora)
    if looks_ahead:
        salt = b"".join((salt, *(b"%d:" % len(key) + key for key in keys)))
    return [KeyedItem(key, item.positions) for key, item in zip(keys, items, strict=True)], salt
