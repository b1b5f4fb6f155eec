"""Attention over packed sequences, each against its own blocks of the KV cache.

It is registered with transformers under its own name and receives the batch as a keyword argument that decoder layers
pass through. There is no global state, so several engines can live in one process.

On a CPU a decoding sequence with contiguous blocks is read in place, one call per sequence and layer. Short or
fragmented sequences are gathered and padded instead (docs/engine.md). Prompts are computed by torch's attention, or by
products (``engine/product_attention.py``) where that is faster. Fused decoders do neither (``fused_layers``). On CUDA
one paged kernel handles everything, where available (``engine/decoder/paged_attention.py``).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from triptych.engine.decoder.kv_cache import KvCache
from triptych.engine.decoder.paged_attention import PagedLayout, paged_attention
from triptych.engine.product_attention import is_worth_it, product_attention
from triptych.families.base import Span

PACKED_ATTENTION = "triptych_packed"
Views = tuple[torch.Tensor, ...]
SHORT_TOKENS = 96
"""Decoding sequences up to this length are gathered and padded together: there, calls cost more than copies."""
_MANY = 4
_GROUP = 8
"""Long fragmented sequences per group, padded to the longest."""


@dataclass(frozen=True, slots=True)
class Context:
    """The KV that a sequence's rows attend to: positions 0 to ``length``, in these blocks."""

    length: int
    table: Sequence[int]
    is_contiguous: bool


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows ``row`` to ``row + count`` of a pass: the last ``count`` positions of a sequence."""

    row: int
    count: int
    context: Context
    bidirectional: tuple[Span, ...] = ()
    by_products: bool = False
    """Compute its attention by products, where there are enough rows."""
    _masks: dict[int | None, torch.Tensor | None] = field(default_factory=dict, compare=False)

    @property
    def first(self) -> int:
        return self.context.length - self.count

    def oldest(self, window: int | None) -> int:
        """The first position that any of its rows attends to."""
        return 0 if window is None else max(0, self.first - window + 1)

    def is_causal(self, window: int | None) -> bool:
        """Whether each row attends to all positions up to itself, and no others."""
        return not self._spans() and (window is None or self.context.length <= window)

    def mask(self, window: int | None, like: torch.Tensor) -> torch.Tensor | None:
        """[count, length - oldest], added to the scores; None for plain causal attention from the first position on."""
        if window not in self._masks:
            self._masks[window] = self._make_mask(window, like)
        return self._masks[window]

    def _make_mask(self, window: int | None, like: torch.Tensor) -> torch.Tensor | None:
        first, length, oldest = self.first, self.context.length, self.oldest(window)
        if not first and self.is_causal(window):
            return None
        rows = torch.arange(first, length, device=like.device)[:, None]
        columns = torch.arange(oldest, length, device=like.device)[None]
        seen = columns <= rows
        for run in self._spans():
            seen |= _within(rows, run) & _within(columns, run)
        if window is not None:
            seen &= columns > rows - window
        return _additive(seen, like)

    def _spans(self) -> list[Span]:
        """The bidirectional ones that it has a part of."""
        first, length = self.first, self.context.length
        return [run for run in self.bidirectional if first < run.start + run.tokens and run.start < length]


@dataclass(frozen=True, slots=True)
class Decodes:
    """Rows of a pass from ``row`` on: the last position of each of these sequences.

    ``start`` is the first slot of a sequence that is read in place. Otherwise ``read`` [sequences * longest] are the
    slots of all, padded to the longest.
    """

    row: int
    lengths: tuple[int, ...]
    start: int | None
    read: torch.Tensor | None
    _masks: dict[int | None, torch.Tensor | None] = field(default_factory=dict, compare=False)
    _places: dict[int | None, tuple[Views, Views]] = field(default_factory=dict, compare=False)

    def in_place(self, layer: int, window: int | None, cache: KvCache) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a sequence read in place, each [kv heads, 1, positions attended to, d].

        The views of all layers are created together: one by one they cost a fifth of a short sequence's attention.
        """
        if window not in self._places:
            if self.start is None:
                raise AssertionError("these sequences are gathered")
            (length,) = self.lengths
            seen = length if window is None else min(length, window)
            at = self.start + length - seen
            views = (memory.narrow(1, at, seen).transpose(1, 2)[:, :, None] for memory in (cache.keys, cache.values))
            keys, values = (view.unbind(0) for view in views)
            self._places[window] = keys, values
        keys, values = self._places[window]
        return keys[layer], values[layer]

    def mask(self, window: int | None, like: torch.Tensor) -> torch.Tensor | None:
        """[sequences, 1, 1, longest], added to the scores; None where nothing is masked."""
        if window not in self._masks:
            longest = max(self.lengths)
            lengths = torch.tensor(self.lengths, device=like.device)[:, None, None, None]
            columns = torch.arange(longest, device=like.device)
            seen = columns < lengths
            if window is not None:
                seen &= columns >= lengths - window
            self._masks[window] = None if bool(seen.all()) else _additive(seen, like)
        return self._masks[window]


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The first rows of a pass, for a compiled kernel: each the last position of a sequence, in any blocks."""

    tables: np.ndarray[Any, np.dtype[np.int64]]
    """Blocks of all sequences, one after the other."""
    starts: np.ndarray[Any, np.dtype[np.int64]]
    """[rows]: where the blocks of each begin."""
    lengths: np.ndarray[Any, np.dtype[np.int64]]
    """[rows]: positions of each, the row's own included."""

    @classmethod
    def of(cls, contexts: Sequence[Context]) -> "DecodeRows":
        counts = np.array([len(context.table) for context in contexts], np.int64)
        ends = counts.cumsum()
        tables = np.fromiter(chain.from_iterable(context.table for context in contexts), np.int64)
        return cls(tables, ends - counts, np.array([context.length for context in contexts], np.int64))

    def __len__(self) -> int:
        return len(self.lengths)


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Arguments that a layer passes to its attention function beside tensors."""

    scaling: float | None
    window: int | None


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Batch of one pass: the rows of ``decodes``, then those of ``chunks``. ``slots`` are where each row's key and
    value go.

    If ``paged`` is set, a paged kernel uses it instead of the other two. If ``rows`` is set, fused layers compute it
    instead of ``decodes``.
    """

    cache: KvCache
    slots: torch.Tensor
    decodes: tuple[Decodes, ...]
    chunks: tuple[Chunk, ...]
    paged: PagedLayout | None = None
    rows: DecodeRows | None = None
    calls: dict[int, AttentionCall] | None = None
    """Calls by layer, filled by ``packed_attention`` if there is one."""


def order_decodes(contexts: Sequence[Context], device: torch.device) -> list[list[int]]:
    """Indices of decoding sequences, in groups that are computed together; rows have this order."""
    if device.type != "cpu":
        return [sorted(range(len(contexts)), key=lambda at: contexts[at].length)] if contexts else []
    short = [at for at, context in enumerate(contexts) if context.length <= SHORT_TOKENS]
    groups = [short] if len(short) >= _MANY else []
    rest = [at for at, context in enumerate(contexts) if context.length > SHORT_TOKENS or not groups]
    groups += [[at] for at in rest if contexts[at].is_contiguous]
    pieces = sorted((at for at in rest if not contexts[at].is_contiguous), key=lambda at: contexts[at].length)
    return groups + [pieces[at : at + _GROUP] for at in range(0, len(pieces), _GROUP)]


def decodes(row: int, contexts: Sequence[Context], cache: KvCache) -> Decodes:
    """A group of ``order_decodes``."""
    lengths = tuple(context.length for context in contexts)
    if len(contexts) == 1 and contexts[0].is_contiguous:
        return Decodes(row, lengths, contexts[0].table[0] * cache.block_tokens, None)
    longest = max(lengths)
    device = cache.keys.device
    if all(
        context.is_contiguous for context in contexts
    ):  # built by torch: a Python loop takes a twentieth of a small step
        firsts = torch.tensor([context.table[0] * cache.block_tokens for context in contexts], device=device)
        columns = torch.minimum(torch.arange(longest, device=device), torch.tensor(lengths, device=device)[:, None] - 1)
        return Decodes(row, lengths, None, (firsts[:, None] + columns).flatten())
    read: list[int] = []
    for context in contexts:
        slots = cache.slots(context.table, 0, context.length)
        read += slots
        read += [slots[-1]] * (longest - len(slots))
    return Decodes(row, lengths, None, torch.tensor(read, device=device))


def packed_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packed: PackedBatch,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of decoder layers: query [1, heads, n, d], key and value [1, kv heads, n, d].

    Returns [1, n, heads, d]. Writes the new keys and values to the cache first; this is idempotent, so that a failed
    pass can be repeated. In a layer with a ``sliding_window`` a position attends to that many positions up to itself.
    """
    refused = [name for name in ("softcap", "s_aux") if options.get(name) is not None]
    if refused or attention_mask is not None:
        raise NotImplementedError(f"packed attention has no {refused or 'attention mask'}")
    if packed.calls is not None:
        packed.calls[module.layer_idx] = AttentionCall(scaling, sliding_window)
    keys, values = packed.cache.keys[module.layer_idx], packed.cache.values[module.layer_idx]
    keys.index_copy_(0, packed.slots, key[0].transpose(0, 1))
    values.index_copy_(0, packed.slots, value[0].transpose(0, 1))
    if packed.paged is not None:
        return paged_attention(packed.paged, query, keys, values, scaling, sliding_window), None
    done = [_decodes(query, keys, values, packed, module.layer_idx, scaling, sliding_window)] if packed.decodes else []
    done += [
        _attend_chunk(part, query, key, value, packed.cache, keys, values, scaling, sliding_window)
        for part in packed.chunks
    ]
    return (done[0] if len(done) == 1 else torch.cat(done))[None], None


def _decodes(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    packed: PackedBatch,
    layer: int,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """Attention of all decoding sequences: [rows, heads, d]."""
    heads, head_size = query.shape[1], query.shape[3]
    kv_heads = keys.shape[1]
    counts = [len(group.lengths) * kv_heads for group in packed.decodes]
    # [rows * kv heads, 1, group, d]: heads that share a key are rows of one product, so keys are not repeated.
    single = query[0, :, : sum(counts) // kv_heads].transpose(0, 1).reshape(-1, 1, heads // kv_heads, head_size)
    out: list[torch.Tensor] = []
    for group, rows in zip(packed.decodes, torch.split(single, counts), strict=True):
        if group.read is None:
            k, v = group.in_place(layer, window, packed.cache)
            out.append(scaled_dot_product_attention(rows, k, v, scale=scaling))
        else:
            shape = (len(group.lengths), -1, kv_heads, head_size)
            k, v = (memory.index_select(0, group.read).view(shape).transpose(1, 2) for memory in (keys, values))
            mask = group.mask(window, query)
            together = rows.view(len(group.lengths), kv_heads, -1, head_size)
            attended = scaled_dot_product_attention(together, k, v, attn_mask=mask, scale=scaling)
            out.append(attended.reshape(rows.shape))
    return torch.cat(out).view(-1, heads, head_size)


def _attend_chunk(
    part: Chunk,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: KvCache,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """Attention of a chunk: [count, heads, d]."""
    rows = slice(part.row, part.row + part.count)
    oldest, length = part.oldest(window), part.context.length
    if not part.first:
        k, v = key[0, :, rows], value[0, :, rows]
    elif part.context.is_contiguous:
        start = part.context.table[0] * cache.block_tokens
        k, v = (memory[start + oldest : start + length].transpose(0, 1) for memory in (keys, values))
    else:
        read = torch.tensor(cache.slots(part.context.table, oldest, length), device=keys.device)
        k, v = (memory.index_select(0, read).transpose(0, 1) for memory in (keys, values))
    heads, kv_heads, head_size = query.shape[1], key.shape[1], query.shape[3]
    groups = heads // kv_heads
    grouped = query[0, :, rows].reshape(kv_heads, groups, part.count, head_size)
    if part.by_products and is_worth_it(groups, part.count, k.shape[1], head_size):
        is_causal = part.is_causal(window)
        mask = None if is_causal else part.mask(window, query)
        scale = head_size**-0.5 if scaling is None else scaling
        attended = product_attention(grouped, k, v, scaling=scale, mask=mask, is_causal=is_causal)
    else:
        mask = part.mask(window, query)
        attended = scaled_dot_product_attention(
            grouped,
            k[:, None].expand(-1, groups, -1, -1),
            v[:, None].expand(-1, groups, -1, -1),
            attn_mask=mask,
            is_causal=mask is None,
            scale=scaling,
        )
    return attended.reshape(heads, part.count, head_size).transpose(0, 1)


def _within(positions: torch.Tensor, run: Span) -> torch.Tensor:
    return (positions >= run.start) & (positions < run.start + run.tokens)


def _additive(seen: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """An additive mask, made once per pass; a boolean mask would be converted in every layer."""
    return torch.zeros(seen.shape, dtype=like.dtype, device=like.device).masked_fill_(~seen, float("-inf"))


def exclude_from_compilation() -> None:
    """Passes that are compiled from now on call ``packed_attention`` between what is compiled."""
    AttentionInterface.register(PACKED_ATTENTION, torch.compiler.disable(packed_attention))  # type: ignore[no-untyped-call]  # as in torch


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
