"""The slower model runner, for decoders with layers that are neither full nor sliding attention.

Convolutional, recurrent and other state is left to transformers' own caches, one per sequence. A pass computes one
sequence, and a prompt takes one pass where not every layer can resume within one. Memory is counted in blocks as
elsewhere: the cost of a token and of a sequence is measured at start.
"""

import copy
import inspect
import logging
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from transformers import DynamicCache

from triptych.engine.decoder.model_runner import (
    ForwardInput,
    ForwardOutput,
    Result,
    forward_outputs,
    lora_rows,
    positions,
    splice,
    turns_long,
)
from triptych.engine.families.adapters import DecoderAdapter, ForwardPart, UnprovenDecoderAdapter
from triptych.engine.lora import LoraLayers
from triptych.errors import EngineFailure

logger = logging.getLogger(__name__)

_NONE = nullcontext()

PROBE_TOKENS = (4, 36)
"""Lengths of two beginnings of a prompt, by which caches are measured and learned."""
_KEY_DIMS = 4
"""Of keys: [1, heads, positions, size]."""


class PerSequenceModelRunner:
    """``ModelRunner`` with one transformers cache per sequence."""

    def __init__(self, adapter: DecoderAdapter, *, device: torch.device) -> None:
        self.loras: LoraLayers | None = None
        """The LoRA adapters of inputs."""
        self.resumes = False
        """Whether several tokens at once go on from a state."""
        self._adapter = adapter
        self._decoder: Any = adapter.decoder
        self._embed_tokens = self._decoder.get_input_embeddings()
        self.device = device
        self._caches: dict[str, Any] = {}
        # Renamed by transformers 5.24.
        accepted = inspect.signature(self._decoder.forward).parameters
        self._cache_argument = "cache" if "cache" in accepted else "past_key_values"

    @property
    def is_divisible(self) -> bool:
        """Whether a part of a prompt needs nothing that only the whole one has.

        Attention that chooses its keys by scores (``index_topk``) would choose others where two are nearly equal: a part is rounded otherwise.
        """
        config = self._decoder.config
        if turns_long(config) or getattr(config.get_text_config(), "index_topk", None) is not None:
            return False
        return not isinstance(self._adapter, UnprovenDecoderAdapter) or self._adapter.is_packable

    def cache_nbytes(self, prompt: Sequence[int]) -> tuple[int, int]:
        """Bytes per token, and per sequence apart from its tokens; measured with two beginnings of a prompt."""
        few, many = PROBE_TOKENS
        sizes = [_nbytes(cache) for cache in self.probe_caches(prompt)]
        token = -(-max(0, sizes[1] - sizes[0]) // (many - few))
        return token, max(0, sizes[0] - few * token)

    def probe_caches(self, prompt: Sequence[int]) -> list[Any]:
        """Caches of the prompt's first ``PROBE_TOKENS``, each computed now."""
        for tokens in PROBE_TOKENS:
            self.probe(str(tokens), prompt[:tokens])
        return [self._caches.pop(str(tokens)) for tokens in PROBE_TOKENS]

    def probe(self, sequence_id: str, prompt: Sequence[int], first: int = 0) -> torch.Tensor:
        """Logits [vocabulary] after a prompt, of which the sequence has ``first`` tokens. Raises what transformers does."""
        plan = self._adapter.plan(prompt, [])
        output = self._forward(ForwardInput(sequence_id, prompt[first:], plan, first, (), False, True, True))
        assert output is not None  # noqa: S101 - it reaches the end
        assert output.logits is not None  # noqa: S101 - they are wanted
        return output.logits

    def cache(self, sequence_id: str) -> Any:
        """Transformers' cache of a sequence that has begun."""
        return self._caches[sequence_id]

    def take(self, sequence_id: str, cache: Any) -> None:
        """Let a sequence go on from a cache, which has no other owner."""
        self._caches[sequence_id] = cache

    def cached_shapes(self, sequence_id: str) -> list[tuple[int, ...]]:
        """Heads, and sizes of a key and a value, that each layer has in a sequence's cache; empty for other layers."""
        found: list[tuple[int, ...]] = []
        for layer in self._caches[sequence_id].layers:
            keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
            if isinstance(keys, torch.Tensor) and isinstance(values, torch.Tensor) and keys.dim() == _KEY_DIMS:
                found.append((keys.shape[1], keys.shape[3], values.shape[3]))
            else:
                found.append(())
        return found

    def run(self, inputs: Sequence[ForwardInput]) -> list[Result]:
        results: list[Result] = []
        for entry in inputs:
            try:
                results.append(self._forward(entry))
            except Exception:
                logger.exception("sequence %s fails", entry.sequence_id)
                results.append(EngineFailure("the engine failed on this request"))
        return results

    def fork(self, source: str, targets: Sequence[str]) -> None:
        for target in targets:
            self._caches[target] = copy.deepcopy(self._caches[source])

    def drop(self, sequence_ids: Iterable[str]) -> None:
        for sequence_id in sequence_ids:
            self._caches.pop(sequence_id, None)

    def weights_moved(self) -> None:
        """Do nothing: no address is kept."""

    @torch.inference_mode()
    def _forward(self, entry: ForwardInput) -> ForwardOutput | None:
        if entry.plan.bidirectional:
            raise ValueError("bidirectional spans need attention layers that are full or sliding")
        if not entry.first:
            self._caches[entry.sequence_id] = DynamicCache(config=self._decoder.config)
        # Of an answer that goes on, the prompt is computed as at first, and then its tokens one by one.
        whole = entry.plan.indivisible or entry.count
        if entry.first:
            whole = entry.count if self.resumes else 1
        if whole < entry.count:
            for first, count in ((entry.first, whole), *((at, 1) for at in range(entry.first + whole, entry.end - 1))):
                at = first - entry.first
                self._forward(
                    replace(entry, token_ids=entry.token_ids[at : at + count], first=first, reaches_end=False)
                )
            entry = replace(entry, token_ids=entry.token_ids[-1:], first=entry.end - 1)
        part = ForwardPart(entry.plan, entry.first, entry.token_ids, 0)
        embeds = self._embed_tokens(torch.tensor(entry.token_ids, device=self.device))
        splice(part, embeds)
        loras = self.loras if entry.lora else None
        with _NONE if loras is None else loras.applied(lora_rows([entry], [part]), entry.count, self.device):
            hidden = self._decoder(
                inputs_embeds=embeds[None],
                position_ids=positions([part], self.device),
                use_cache=True,
                **{self._cache_argument: self._caches[entry.sequence_id]},
                **self._adapter.inputs([part], entry.count),
            ).last_hidden_state[0]
        if not entry.reaches_end:
            return None
        return forward_outputs(self._adapter.logits(hidden[-1:]), [entry.wants_logits])[0]


def _nbytes(cache: Any) -> int:
    """Bytes of all tensors in a cache's layers."""
    held: list[Any] = [value for layer in cache.layers for value in vars(layer).values()]
    total = 0
    while held:
        value = held.pop()
        if isinstance(value, torch.Tensor):
            total += value.nbytes
        elif isinstance(value, dict):
            held += value.values()
        elif isinstance(value, list | tuple):
            held += value
    return total
