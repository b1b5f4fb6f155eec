"""Decoder with few, compiled operations between its matrix products (``cpu_kernels``): float32 on a CPU.

It stands in for transformers' decoders of Llama's structure: token embeddings, layers, a last normalization and rotary
positions. Each layer has two root mean square normalizations, attention, whose heads may be normalized, and a gated MLP
with SiLU. A structure does not say what is computed, so passes are compared before they are used.

A pass of few rows is short, so what Python does between products counts. A layer makes four calls of kernels and four
of products, in memory that the pass allocates once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from triptych.engine import cpu_kernels, prompt_kernel
from triptych.engine.decoder.attention import AttentionCall, Chunk, DecodeRows, PackedBatch
from triptych.engine.decoder.kv_cache import KvCache
from triptych.engine.decoder.model_runner import rotary_axes
from triptych.engine.joined_layers import JoinedLinear
from triptych.engine.vectors import Floats, Integers
from triptych.engine.worker_threads import WorkerThreads

_JOINED = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("mlp.gate_proj", "mlp.up_proj"),
)
"""Products of the same rows."""
_PRODUCTS = (*(name for names in _JOINED for name in names), "self_attn.o_proj", "mlp.down_proj")
_NORMS = ("input_layernorm", "post_attention_layernorm")
_HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
_PARTS = frozenset({"embed_tokens", "layers", "norm", "rotary_emb"})
_NO_WEIGHTS = np.empty(0, np.float32)
_WORTH_A_THREAD = 1 << 21
"""Multiplications of one thread below which another one takes longer to begin than it saves."""

Norm = tuple[Floats, np.float32]
"""Weights and epsilon. Weights stay where they are: on a host, those that are loaded again have the same addresses (``part_weights``)."""


def can_fuse(decoder: nn.Module) -> bool:
    """Whether the decoder and all its layers have the structure, and no other parts."""
    layers = getattr(decoder, "layers", None)
    return (
        {name for name, _ in decoder.named_children()} == _PARTS
        and isinstance(getattr(decoder.norm, "variance_epsilon", None), float)
        and isinstance(layers, nn.ModuleList)
        and len(layers) > 0
        and all(map(_has_structure, layers))
    )


def fuse(
    decoder: Any, cache: KvCache, calls: Mapping[int, AttentionCall], threads: WorkerThreads
) -> list[JoinedLinear]:
    """Fuse a decoder that ``can_fuse``: compute passes with ``PackedBatch.rows`` by fused layers, all others as before.

    ``calls``: what each layer passes to its attention function. Returns the layers whose parts compute nothing from now
    on.
    """
    layers = [_FusedLayer(layer, cache, calls[layer.self_attn.layer_idx], threads) for layer in decoder.layers]
    for layer, fused in zip(decoder.layers, layers, strict=True):
        layer.forward = fused
    decoder.forward = _FusedDecoder(decoder, layers, threads)
    return [joined for layer in layers for joined in (layer.heads, layer.gate_and_up)]


def unfuse(decoder: Any) -> None:
    """Compute all passes as before."""
    for module in (decoder, *decoder.layers):
        del module.forward


def best_tokens(logits: torch.Tensor) -> tuple[list[int], list[bool]]:
    """Best tokens like ``model_runner.best_tokens``, in one reading."""
    tokens, are_finite = np.empty(len(logits), np.int64), np.empty(len(logits), np.bool_)
    cpu_kernels.best_tokens(logits.contiguous().numpy(), tokens, are_finite)
    return tokens.tolist(), are_finite.tolist()


def _has_structure(layer: nn.Module) -> bool:
    parts = dict(layer.named_modules())
    norms = [parts.pop(name, None) for name in _NORMS]
    head_norms = [parts.pop(name) for name in _HEAD_NORMS if name in parts]
    products = [parts.pop(name, None) for name in _PRODUCTS]
    activation = parts.pop("mlp.act_fn", None)
    return (
        parts.keys() == {"", "self_attn", "mlp"}
        and all(isinstance(getattr(norm, "variance_epsilon", None), float) for norm in (*norms, *head_norms))
        and all(type(product) is nn.Linear for product in products)
        and all(len({_part(layer, name).bias is None for name in names}) == 1 for names in _JOINED)
        and len(head_norms) in {0, len(_HEAD_NORMS)}
        and type(activation).__name__ in {"SiLU", "SiLUActivation"}
    )


def _part(layer: nn.Module, name: str) -> nn.Linear:
    module = layer.get_submodule(name)
    assert isinstance(module, nn.Linear)  # noqa: S101 - it has the structure
    return module


def _norm(module: Any) -> Norm:
    if module is None:
        return _NO_WEIGHTS, np.float32(0.0)
    return module.weight.detach().numpy(), np.float32(module.variance_epsilon)


@dataclass(frozen=True, slots=True)
class _Prompt:
    """Rows of a pass that are the last positions of one sequence."""

    rows: slice
    slots: Integers
    """Slots of all positions that they attend to."""
    ends: Sequence[int]
    """Ends at which the units of its attention are divided among threads."""


class _Pass:
    """State that the layers of one pass share: its positions, its rows, and memory between two products."""

    def __init__(
        self,
        packed: PackedBatch,
        rows: DecodeRows,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        threads: WorkerThreads,
    ) -> None:
        self._chunks = packed.chunks
        self._block_tokens = packed.cache.block_tokens
        self.cosines, self.sines = (table[0].contiguous().numpy() for table in position_embeddings)
        self.slots = packed.slots.numpy()
        if self.cosines.ndim != 2 or len(self.cosines) != len(self.slots):
            raise NotImplementedError("fused layers rotate each row by its own angles")
        self.rows = rows
        self._threads = threads
        self._memory: dict[tuple[str, tuple[int, ...]], tuple[torch.Tensor, Floats]] = {}
        self._ends: dict[int, list[int]] = {}
        self._prompts: dict[int | None, list[_Prompt]] = {}

    def memory(self, name: str, *shape: int) -> tuple[torch.Tensor, Floats]:
        """[rows, ...] of the pass, which all layers write to anew, as tensor and array."""
        key = name, shape
        if key not in self._memory:
            memory = torch.empty(len(self.cosines), *shape)
            self._memory[key] = memory, memory.numpy()
        return self._memory[key]

    def ends(self, width: int) -> list[int]:
        """Ends at which the decoded rows, whose heads have ``width`` numbers, are divided among threads."""
        if width not in self._ends:
            self._ends[width] = self._divided(self.rows.lengths * width)
        return self._ends[width]

    def prompts(self, window: int | None, heads: int, kv_heads: int, size: int) -> Sequence[_Prompt]:
        """The rows that are not decoded, for layers with this window. All layers have the same heads."""
        if window not in self._prompts:
            self._prompts[window] = [self._prompt(chunk, window, heads, kv_heads, size) for chunk in self._chunks]
        return self._prompts[window]

    def _prompt(self, chunk: Chunk, window: int | None, heads: int, kv_heads: int, size: int) -> _Prompt:
        oldest, length = chunk.oldest(window), chunk.context.length
        positions = np.arange(oldest, length)
        blocks, inside = np.divmod(positions, self._block_tokens)
        slots = np.asarray(chunk.context.table, np.int64)[blocks] * self._block_tokens + inside
        together = prompt_kernel.rows_per_block(heads // kv_heads, len(slots))
        seen = np.minimum(np.arange(together, chunk.count + together, together), chunk.count) + len(slots) - chunk.count
        work = np.tile(seen * together * size * (heads // kv_heads), kv_heads)
        return _Prompt(slice(chunk.row, chunk.row + chunk.count), slots, self._divided(work))

    def _divided(self, work: Integers) -> list[int]:
        """The ends of consecutive parts, one for each thread, of about the same sum of multiplications."""
        total = np.cumsum(work)
        threads = self._threads.usable(min(int(total[-1]) // _WORTH_A_THREAD, len(total)))
        shares = np.arange(1, threads) * (total[-1] / threads)
        return [0, *(int(end) for end in np.searchsorted(total, shares)), len(total)]


class _FusedDecoder:
    """The ``forward`` of a decoder."""

    def __init__(self, decoder: Any, layers: Sequence["_FusedLayer"], threads: WorkerThreads) -> None:
        self._plain = decoder.forward
        self._rotary = decoder.rotary_emb
        self._layers = layers
        self._norm = _norm(decoder.norm)
        self._axes = rotary_axes(decoder)
        self._threads = threads

    def __call__(
        self,
        *,
        inputs_embeds: torch.Tensor,
        position_ids: torch.Tensor,
        use_cache: bool,
        packed: PackedBatch,
        **options: Any,
    ) -> BaseModelOutputWithPast:
        """[1, n, width] to normalized hidden states of the same shape, as the decoder's own ``forward``, which computes what has further options."""
        if packed.rows is None or options:
            plain: BaseModelOutputWithPast = self._plain(
                inputs_embeds=inputs_embeds, position_ids=position_ids, use_cache=use_cache, packed=packed, **options
            )
            return plain
        if position_ids.dim() == 2 and self._axes > 1:
            position_ids = position_ids.expand(self._axes, -1, -1)
        position_embeddings = self._rotary(inputs_embeds, position_ids)
        shared = _Pass(packed, packed.rows, position_embeddings, self._threads)
        hidden, added = inputs_embeds[0].contiguous(), None
        for layer in self._layers:
            hidden, added = layer.compute(hidden, added, shared)
        normed = torch.empty_like(hidden)
        assert added is not None  # noqa: S101 - there are layers
        cpu_kernels.add_rms_norm(hidden.numpy(), added.numpy(), *self._norm, normed.numpy())
        return BaseModelOutputWithPast(last_hidden_state=normed[None])


class _FusedLayer:
    """The ``forward`` of a layer."""

    def __init__(self, layer: Any, cache: KvCache, call: AttentionCall, threads: WorkerThreads) -> None:
        self._plain = layer.forward
        attention = layer.self_attn
        self.heads, self.gate_and_up = (JoinedLinear([_part(layer, name) for name in names]) for names in _JOINED)
        """Joined layers of queries, keys and values, and of the MLP's two branches."""
        self._out, self._down = attention.o_proj, layer.mlp.down_proj
        self._first_norm, self._second_norm = (_norm(getattr(layer, name)) for name in _NORMS)
        self._query_norm, epsilon = _norm(getattr(attention, "q_norm", None))
        self._key_norm = _norm(getattr(attention, "k_norm", None))[0], epsilon
        self._size: int = attention.head_dim
        self._scaling = np.float32(self._size**-0.5 if call.scaling is None else call.scaling)
        self._window = call.window
        self._block_tokens = cache.block_tokens
        self._memory = cache.keys[attention.layer_idx].numpy(), cache.values[attention.layer_idx].numpy()
        self._threads = threads

    def __call__(self, hidden_states: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        """[1, n, width] to the same, as the layer's own ``forward``."""
        packed: PackedBatch | None = options.get("packed")
        if packed is None or packed.rows is None:
            plain: torch.Tensor = self._plain(hidden_states, *arguments, **options)
            return plain
        if arguments or options.get("attention_mask") is not None:
            raise NotImplementedError("fused layers take no attention mask")
        shared = _Pass(packed, packed.rows, options["position_embeddings"], self._threads)
        hidden, added = self.compute(hidden_states[0].contiguous(), None, shared)
        return added.add_(hidden)[None]

    def compute(
        self, hidden: torch.Tensor, added: torch.Tensor | None, shared: _Pass
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's output, as two tensors to be added, from its input, which is given so: [n, width] each. ``added`` is overwritten."""
        normed, normed_array = shared.memory("normed", hidden.shape[1])
        if added is None:
            cpu_kernels.rms_norm(hidden.numpy(), *self._first_norm, normed_array)
        else:
            cpu_kernels.add_rms_norm(hidden.numpy(), added.numpy(), *self._first_norm, normed_array)
            hidden = added
        out = self._out.forward(self._attended(normed, shared))
        cpu_kernels.add_rms_norm(hidden.numpy(), out.numpy(), *self._second_norm, normed_array)
        gated, gated_array = shared.memory("gated", self._down.in_features)
        cpu_kernels.silu_times(self.gate_and_up.forward(normed).numpy(), gated_array)
        return out, self._down.forward(gated)

    def _attended(self, normed: torch.Tensor, shared: _Pass) -> torch.Tensor:
        """[n, heads * size]."""
        if shared.cosines.shape[1] != self._size:
            raise NotImplementedError("fused layers rotate whole heads")
        heads = self.heads.forward(normed).view(len(normed), -1, self._size)
        array, (keys, values) = heads.numpy(), self._memory
        kv_heads = keys.shape[1]
        cpu_kernels.rotate_and_store(
            array,
            shared.cosines,
            shared.sines,
            self._query_norm,
            *self._key_norm,
            shared.slots,
            keys,
            values,
        )
        query_heads = heads.shape[1] - 2 * kv_heads
        attended, attended_array = shared.memory("attended", query_heads, self._size)
        if len(shared.rows):
            self._attend(array, attended_array, shared)
        for prompt in shared.prompts(self._window, query_heads, kv_heads, self._size):
            self._attend_prompt(array[prompt.rows], attended_array[prompt.rows], prompt)
        return attended.view(len(normed), -1)

    def _attend(self, query: Floats, attended: Floats, shared: _Pass) -> None:
        """Attend for the rows that are decoded, divided among threads where there is much to do."""
        keys, values = self._memory
        rows, window = shared.rows, self._window or 0

        def part(begin: int, end: int) -> None:
            cpu_kernels.attend(
                query[begin:end],
                keys,
                values,
                rows.tables,
                rows.starts[begin:end],
                rows.lengths[begin:end],
                self._block_tokens,
                window,
                self._scaling,
                attended[begin:end],
            )

        self._threads.run(part, shared.ends(attended[0].size))

    def _attend_prompt(self, query: Floats, attended: Floats, prompt: _Prompt) -> None:
        keys, values = self._memory
        window = self._window or 0

        def part(begin: int, end: int) -> None:
            prompt_kernel.attend_prompt(query, keys, values, prompt.slots, window, self._scaling, begin, end, attended)

        self._threads.run(part, prompt.ends)
