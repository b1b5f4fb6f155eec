"""Decoder layers with few, compiled operations between their matrix products (``cpu_kernels``): float32 on a CPU.

They stand in for transformers' layers of Llama's structure: two root mean square normalizations, attention with rotary positions, whose
heads may be normalized, and a gated MLP with SiLU. A structure does not say what is computed, so passes are compared before they are used.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from triptych.engine import cpu_kernels
from triptych.engine.decoder.attention import AttentionCall, DecodeRows, PackedBatch, attend_chunk
from triptych.engine.joined_layers import JoinedLinear
from triptych.engine.worker_threads import WorkerThreads

_JOINED = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("mlp.gate_proj", "mlp.up_proj"),
)
"""Products of the same rows."""
_PRODUCTS = (*(name for names in _JOINED for name in names), "self_attn.o_proj", "mlp.down_proj")
_NORMS = ("input_layernorm", "post_attention_layernorm")
_HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
_NO_WEIGHTS = np.empty(0, np.float32)
_WORTH_A_THREAD = 1 << 21
"""Multiplications of one thread below which another one takes longer to begin than it saves."""


def can_fuse(decoder: nn.Module) -> bool:
    """Whether all layers have the structure, and no other parts."""
    layers = getattr(decoder, "layers", None)
    return isinstance(layers, nn.ModuleList) and len(layers) > 0 and all(map(_has_structure, layers))


def fuse(decoder: Any, calls: Mapping[int, AttentionCall], threads: WorkerThreads) -> list[JoinedLinear]:
    """Of a decoder that ``can_fuse``: compute passes with ``PackedBatch.rows`` by fused layers, all others as before.

    ``calls``: what each layer passes to its attention function. Returns the layers whose parts compute nothing from now on.
    """
    attention, made = _Attention(threads), list[JoinedLinear]()
    for layer in decoder.layers:
        fused = _FusedLayer(layer, calls[layer.self_attn.layer_idx], attention)
        layer.forward = fused
        made += [fused.heads, fused.gate_and_up]
    return made


def unfuse(decoder: Any) -> None:
    """Compute all passes as before."""
    for layer in decoder.layers:
        del layer.forward


def _has_structure(layer: nn.Module) -> bool:
    parts = dict(layer.named_modules())
    norms = [parts.pop(name, None) for name in _NORMS]
    head_norms = [parts.pop(name) for name in _HEAD_NORMS if name in parts]
    products = [parts.pop(name, None) for name in _PRODUCTS]
    activation = parts.pop("mlp.act_fn", None)
    return (
        parts.keys() == {"", "self_attn", "mlp"}
        and all(isinstance(getattr(one, "variance_epsilon", None), float) for one in (*norms, *head_norms))
        and all(type(one) is nn.Linear for one in products)
        and all(len({_part(layer, name).bias is None for name in names}) == 1 for names in _JOINED)
        and len(head_norms) in {0, len(_HEAD_NORMS)}
        and type(activation).__name__ in {"SiLU", "SiLUActivation"}
    )


def _part(layer: nn.Module, name: str) -> nn.Linear:
    found = layer.get_submodule(name)
    assert isinstance(found, nn.Linear)  # noqa: S101 - it has the structure
    return found


class _FusedLayer:
    """The ``forward`` of a layer."""

    def __init__(self, layer: Any, call: AttentionCall, attention: "_Attention") -> None:
        self._plain = layer.forward
        self._first_norm, self._second_norm = layer.input_layernorm, layer.post_attention_layernorm
        own = layer.self_attn
        self._index: int = own.layer_idx
        self.heads, self.gate_and_up = (JoinedLinear([_part(layer, name) for name in names]) for names in _JOINED)
        """Of queries, keys and values; and of the MLP's two branches."""
        self._out, self._down = own.o_proj, layer.mlp.down_proj
        self._query_norm, self._key_norm = getattr(own, "q_norm", None), getattr(own, "k_norm", None)
        self._size: int = own.head_dim
        self._scaling = self._size**-0.5 if call.scaling is None else call.scaling
        self._window = call.window
        self._attention = attention

    def __call__(self, hidden_states: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        """[1, n, width] to the same, as the layer's own ``forward``."""
        packed: PackedBatch | None = options.get("packed")
        if packed is None or packed.rows is None:
            plain: torch.Tensor = self._plain(hidden_states, *arguments, **options)
            return plain
        if arguments or options.get("attention_mask") is not None:
            raise NotImplementedError("fused layers take no attention mask")
        hidden = hidden_states[0].contiguous()
        normed = torch.empty_like(hidden)
        cpu_kernels.rms_norm(hidden.numpy(), *_norm(self._first_norm), normed.numpy())
        attended = self._attended(normed, options["position_embeddings"], packed, packed.rows)
        added = self._out(attended.view(len(normed), -1))
        cpu_kernels.add_rms_norm(hidden.numpy(), added.numpy(), *_norm(self._second_norm), normed.numpy())
        gated = normed.new_empty(len(normed), self._down.in_features)
        cpu_kernels.silu_times(self.gate_and_up(normed).numpy(), gated.numpy())
        down: torch.Tensor = self._down(gated)
        return down.add_(added)[None]

    def _attended(
        self,
        normed: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        packed: PackedBatch,
        rows: DecodeRows,
    ) -> torch.Tensor:
        """[n, heads, size]."""
        cosines, sines = (one[0].contiguous() for one in position_embeddings)
        if cosines.shape != (len(normed), self._size):
            raise NotImplementedError("fused layers rotate whole heads")
        heads = self.heads(normed).view(len(normed), -1, self._size)
        keys, values = packed.cache.keys[self._index], packed.cache.values[self._index]
        query_norm, epsilon = _norm(self._query_norm)
        cpu_kernels.rotate_and_store(
            heads.numpy(),
            cosines.numpy(),
            sines.numpy(),
            query_norm,
            _norm(self._key_norm)[0],
            epsilon,
            packed.slots.numpy(),
            keys.numpy(),
            values.numpy(),
        )
        kv_heads = keys.shape[1]
        query, key, value = heads.split((heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
        attended = torch.empty(query.shape)
        if len(rows):
            self._attention.attend(
                heads.numpy(),
                keys.numpy(),
                values.numpy(),
                rows,
                packed.cache.block_tokens,
                self._window,
                self._scaling,
                attended.numpy(),
            )
        whole = [one.transpose(0, 1)[None] for one in (query, key, value)] if packed.chunks else []
        for chunk in packed.chunks:
            attended[chunk.row : chunk.row + chunk.count] = attend_chunk(
                chunk, whole[0], whole[1], whole[2], packed.cache, keys, values, self._scaling, self._window
            )
        return attended


class _Attention:
    """``cpu_kernels.attend``, divided among threads where there is much to do."""

    def __init__(self, threads: WorkerThreads) -> None:
        self._threads = threads

    def attend(
        self,
        query: cpu_kernels.Floats,
        keys: cpu_kernels.Floats,
        values: cpu_kernels.Floats,
        rows: DecodeRows,
        block_tokens: int,
        window: int | None,
        scaling: float,
        attended: cpu_kernels.Floats,
    ) -> None:
        """Of the first rows, as ``cpu_kernels.attend``."""
        group, longest = attended.shape[1] // keys.shape[1], int(rows.lengths.max())

        def part(begin: int, end: int) -> None:
            cpu_kernels.attend(
                query[begin:end],
                keys,
                values,
                rows.tables,
                rows.starts[begin:end],
                rows.lengths[begin:end],
                block_tokens,
                window or 0,
                np.float32(scaling),
                np.empty((group, longest), np.float32),
                attended[begin:end],
            )

        work = np.cumsum(rows.lengths) * attended[0].size
        threads = self._threads.usable(min(int(work[-1]) // _WORTH_A_THREAD, len(rows)))
        shares = np.arange(1, threads) * (work[-1] / threads)
        self._threads.run(part, [0, *(int(one) for one in np.searchsorted(work, shares)), len(rows)])


def _norm(module: Any) -> tuple[cpu_kernels.Floats, np.float32]:
    """Its weights and its epsilon. The weights may be elsewhere in the next pass."""
    if module is None:
        return _NO_WEIGHTS, np.float32(0.0)
    return module.weight.detach().numpy(), np.float32(module.variance_epsilon)
