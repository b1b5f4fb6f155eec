"""The KV cache of a vLLM engine in this process: positions are copied out of its blocks and into them."""

from collections.abc import Sequence
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig

from triptych.domain.kv_segment import KvKind, KvSegment
from triptych.engine.checkpoint import DTYPES
from triptych.runtime.process import CannotStart

_DIGIT_BITS = 8
"""Bits of a digit: every data type has the numbers of so many bits."""


class VllmKvCache:
    """Writes by vLLM's own operation. Where that puts what in a block is found out at construction, by writing to the block that
    vLLM leaves unused. Raises CannotStart for a cache in which blocks do not have all positions of all layers alike.
    """

    def __init__(self, config: VllmConfig, cache_config: KVCacheConfig, *, model_revision: str, dtype: str) -> None:
        if (
            len(cache_config.kv_cache_groups) != 1
            or type(spec := cache_config.kv_cache_groups[0].kv_cache_spec) is not FullAttentionSpec
        ):
            raise _refused("its layers have KV caches of several kinds, or state outside of them")
        names = sorted(cache_config.kv_cache_groups[0].layer_names, key=extract_layer_index)
        context: Any = config.compilation_config.static_forward_context
        self._layers = [context[name] for name in names]
        self._block_tokens = int(spec.block_size)
        shape = (self._block_tokens, int(spec.num_kv_heads), int(spec.head_size))
        self._shape = shape
        nbytes = 2 * self._block_tokens * shape[1] * shape[2] * DTYPES[dtype].itemsize
        for layer in self._layers:
            cache = layer.kv_cache
            if (
                not isinstance(cache, torch.Tensor)
                or cache.shape[0] != cache_config.num_blocks
                or cache[0].nbytes != nbytes
            ):
                raise _refused(f"the blocks of its KV cache do not have keys and values in {dtype}, each once")
        quantization = config.model_config.quantization or ""
        # Weights are kept in another form than by Triptych's own engine, and attention may differ in its details.
        self.kind = KvKind(
            f"{model_revision} vllm {quantization}", DTYPES[dtype], len(self._layers), shape[1], shape[2]
        )
        self._order = self._found_order(self._layers[0])

    @torch.inference_mode()
    def pack(self, table: Sequence[int], segment: KvSegment, memory: memoryview) -> None:
        """Copy positions of a sequence with these blocks to ``memory``."""
        first = segment.first // self._block_tokens
        blocks = torch.tensor(table[first : -(-segment.end // self._block_tokens)])
        skipped = segment.first - first * self._block_tokens
        for layer, copied in enumerate(self._of(segment, memory).unbind(1)):
            rows = self._layers[layer].kv_cache.index_select(0, blocks).flatten(1).index_select(1, self._order)
            for tensor, part in zip(copied, rows.view(-1, 2, *self._shape).unbind(1), strict=True):
                tensor.copy_(part.flatten(0, 1)[skipped : skipped + segment.positions])

    @torch.inference_mode()
    def unpack(self, table: Sequence[int], segment: KvSegment, memory: memoryview, *, first: int, end: int) -> None:
        """Copy the segment's positions from ``first`` to ``end`` into these blocks."""
        owned = bytearray(memory) if memory.readonly else memory  # torch takes no read-only memory
        positions = torch.arange(first, end)
        blocks = torch.tensor(table)[positions // self._block_tokens]
        slots = blocks * self._block_tokens + positions % self._block_tokens
        taken = slice(first - segment.first, end - segment.first)
        for layer, (keys, values) in zip(self._layers, self._of(segment, owned).unbind(1), strict=True):
            self._write(layer, keys[taken], values[taken], slots)

    def _of(self, segment: KvSegment, memory: memoryview | bytearray) -> torch.Tensor:
        return torch.frombuffer(memory, dtype=self._layers[0].kv_cache.dtype).view(segment.spec.shape)

    @staticmethod
    def _write(layer: Any, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        layer.impl.do_kv_cache_update(layer, keys, values, layer.kv_cache, slots)

    @torch.inference_mode()
    def _found_order(self, layer: Any) -> torch.Tensor:
        """Order of the numbers of [2, positions, heads, head size] in a block: each is written there, digit by digit."""
        numbers = torch.arange(2 * self._block_tokens * self._shape[1] * self._shape[2]).view(2, *self._shape)
        slots = torch.arange(self._block_tokens)
        seen_order = torch.zeros(numbers.numel(), dtype=torch.long)
        unused = layer.kv_cache[0]
        for shift in range(0, int(numbers[-1, -1, -1, -1]).bit_length(), _DIGIT_BITS):
            keys, values = ((numbers >> shift) % (1 << _DIGIT_BITS)).to(unused.dtype)
            self._write(layer, keys, values, slots)
            seen_order += unused.reshape(-1).long() << shift
        unused.zero_()
        order = seen_order.argsort()
        if not torch.equal(seen_order[order], numbers.view(-1)):
            raise _refused("its attention keeps keys and values in a form that cannot be copied")
        return order


def _refused(why: str) -> CannotStart:
    return CannotStart(f"engine vllm hands no keys and values of this model over, {why}: run it in role PD")
