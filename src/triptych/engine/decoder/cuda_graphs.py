"""CUDA graphs of passes: one launch for all layers.

For few rows, launching kernels one by one takes longer than running them. So passes of some sizes are captured once, on static
buffers; a step fills the buffers of the next larger size and replays its graph. Padding rows use a spare block that belongs to no
sequence.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch

from triptych.engine.decoder.attention import PackedBatch, exclude_from_compilation
from triptych.engine.decoder.kv_cache import KvCache
from triptych.engine.decoder.model_runner import ForwardInput, rotary_axes
from triptych.engine.decoder.paged_attention import PagedLayout, Tiles, head_group, product_rows, tiles_of
from triptych.engine.families.adapters import DecoderAdapter

logger = logging.getLogger(__name__)

_FEW = (1, 2, 4)
_STEP = 8
_MIXED = (16, 32, 64, 128, 256, 512)
"""Numbers of rows of passes with prompts. With more rows, kernels take longer than their launches."""


@dataclass(frozen=True, slots=True)
class GraphOptions:
    """Capture passes of up to ``most_sequences`` sequences of up to ``most_tokens`` tokens, and ``most_rows`` rows in all. ``compiled``:
    their operations are compiled first, by ``torch.compile``.
    """

    most_sequences: int
    most_tokens: int
    most_rows: int
    compiled: bool = False


class GraphCapture(Protocol):
    """Captures ``work``, which computes from static to static buffers, and returns a function that replays it."""

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]: ...


def cuda_graph_capture(device: torch.device) -> GraphCapture:
    """Capture into CUDA graphs that share a memory pool; an output must be read before another graph is replayed."""
    pool = torch.cuda.graph_pool_handle()

    def capture(work: Callable[[], None]) -> Callable[[], None]:
        side_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # as in torch
        side_stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side_stream):  # warm up: libraries load and choose kernels before capture
            for _ in range(2):
                work()
        torch.cuda.current_stream(device).wait_stream(side_stream)
        graph = torch.cuda.CUDAGraph()
        # Arenas on the device are written in other threads meanwhile.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            work()
        replay: Callable[[], None] = graph.replay
        return replay

    return capture


class PassGraphs:
    """Graphs of passes, captured at construction: of decodes alone, by their number, and of prompts in part and decodes, by the number of
    rows.

    For adapters with ``supports_cuda_graphs``. Raises what capture raises for a pass that cannot be captured.
    """

    @torch.inference_mode()
    def __init__(
        self, adapter: DecoderAdapter, cache: KvCache, options: GraphOptions, *, capture: GraphCapture
    ) -> None:
        """The cache must have a ``spare_block`` for padding rows."""
        if cache.spare_block is None:
            raise ValueError("padding rows need a spare block")
        device = cache.keys.device
        config: Any = adapter.decoder.config
        self._decoder: Any = _compiled(adapter.decoder) if options.compiled else adapter.decoder
        self._cache = cache
        self._spare = cache.spare_block
        self._group = head_group(config)
        blocks = min(cache.blocks, -(-options.most_tokens // cache.block_tokens))
        self._most_length = blocks * cache.block_tokens
        self._sequences = most = options.most_sequences
        self._decodes = [*(size for size in _FEW if size < most), *range(_STEP, most, _STEP), most]
        self._mixed = [size for size in _MIXED if size // 2 < options.most_rows]
        rows = max([most, *self._mixed])
        self._axes = rotary_axes(adapter.decoder)
        self._embeds = torch.zeros(1, rows, config.hidden_size, dtype=adapter.decoder.dtype, device=device)
        self._positions = torch.zeros(self._axes, 1, rows, dtype=torch.long, device=device)
        self._slots = torch.zeros(rows, dtype=torch.long, device=device)
        self._numbers = torch.arange(most + 1, dtype=torch.int32, device=device)
        self._zeros = torch.zeros_like(self._numbers)
        # One sequence more than a pass can have: without rows, for tiles that are not used.
        self._starts = torch.zeros(most + 2, dtype=torch.int32, device=device)
        self._lengths = torch.zeros(most + 1, dtype=torch.int32, device=device)
        self._tables = torch.zeros(most + 1, blocks, dtype=torch.int32, device=device)
        most_tiles = max(self._most_tiles(size) for size in (rows, *self._mixed))
        self._tiles = torch.zeros(2, most_tiles, dtype=torch.int32, device=device)
        self._hidden: dict[_Kind, torch.Tensor] = {}
        self._replays: dict[_Kind, Callable[[], None]] = {}
        self.capture(capture)

    @torch.inference_mode()
    def capture(self, capture: GraphCapture) -> None:
        """Capture all of them, in place of those before. Passes run for it, over no sequence: the last one may have had more rows."""
        self._replays.clear()
        for buffer, value in (
            (self._starts, 0),
            (self._tiles, 0),
            (self._lengths, 1),
            (self._tables, self._spare),
            (self._slots, self._spare * self._cache.block_tokens),
        ):
            buffer.fill_(value)
        kinds = [*(_Kind(size, True) for size in self._decodes), *(_Kind(size, False) for size in self._mixed)]
        for kind in sorted(kinds, key=lambda kind: -kind.rows):  # the largest first: smaller ones reuse its memory
            self._replays[kind] = capture(self._work(kind))

    def covers(self, inputs: Sequence[ForwardInput]) -> bool:
        """Whether a graph was captured for a pass over ``inputs``, in which positions see no later ones."""
        return self._kind(inputs) is not None and not any(entry.bidirectional for entry in inputs)

    @torch.inference_mode()
    def run(self, inputs: Sequence[ForwardInput], embeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Hidden states [rows, hidden], valid until the next call. ``embeds`` [rows, hidden]; ``positions`` [1, rows], or
        [axes, 1, rows], on the CPU.
        """
        kind = self._kind(inputs)
        if kind is None:
            raise AssertionError("there is no graph for this pass")
        self._fill(inputs, kind)
        rows = len(embeds)
        self._embeds[0, :rows].copy_(embeds)
        self._put(self._positions[:, 0, :rows], positions.reshape(-1, rows).expand(self._axes, -1))
        self._replays[kind]()
        return self._hidden[kind][:rows]

    def _kind(self, inputs: Sequence[ForwardInput]) -> "_Kind | None":
        """The smallest that is large enough."""
        if len(inputs) > self._sequences:
            return None
        rows = sum(entry.count for entry in inputs)
        sizes = self._decodes if rows == len(inputs) else self._mixed
        at = bisect_left(sizes, rows)
        return None if at == len(sizes) else _Kind(sizes[at], rows == len(inputs))

    def _fill(self, inputs: Sequence[ForwardInput], kind: "_Kind") -> None:
        block_tokens = self._cache.block_tokens
        used = [entry.table[: -(-entry.end // block_tokens)] for entry in inputs]  # a sequence may own one block more
        width = max(map(len, used))
        tables = [[*table, *[self._spare] * (width - len(table))] for table in used]
        slots = [slot for entry in inputs for slot in self._cache.slots(entry.table, entry.first, entry.end)]
        unused = kind.rows - len(slots)
        lengths = [entry.end for entry in inputs]
        if kind.decodes:  # padding rows are sequences of one position
            lengths += [1] * unused
            tables += [[self._spare] * width] * unused
        else:
            starts = [0, *accumulate(entry.count for entry in inputs)]
            self._put(self._starts, _integers(starts + [starts[-1]] * (len(self._starts) - len(starts))))
            tiles = tiles_of([entry.count for entry in inputs], self._step(kind.rows))
            spare = [(self._sequences, 0)] * (self._most_tiles(kind.rows) - len(tiles))
            self._put(self._tiles[:, : self._most_tiles(kind.rows)], _integers(tiles + spare).T)
        self._put(self._slots[: kind.rows], torch.tensor(slots + [self._spare * block_tokens] * unused))
        self._put(self._lengths[: len(lengths)], _integers(lengths))
        self._put(self._tables[: len(tables), :width], _integers(tables))

    def _put(self, buffer: torch.Tensor, values: torch.Tensor) -> None:
        if buffer.device.type == "cuda":
            values = values.contiguous().pin_memory()
        buffer.copy_(values, non_blocking=True)

    def _most_tiles(self, rows: int) -> int:
        """Most tiles of a pass with prompts: a sequence's last tile may have a single row."""
        return rows // self._step(rows) + self._sequences

    def _step(self, rows: int) -> int:
        """Rows of a program of a pass with prompts."""
        return product_rows(rows, self._group) // self._group

    def _work(self, kind: "_Kind") -> Callable[[], None]:
        rows = kind.rows
        if kind.decodes:
            tiles = Tiles(self._numbers[:rows], self._zeros[:rows], product_rows(1, self._group))
            starts, lengths, tables = self._numbers[: rows + 1], self._lengths[:rows], self._tables[:rows]
        else:
            most = self._most_tiles(rows)
            tiles = Tiles(self._tiles[0, :most], self._tiles[1, :most], product_rows(rows, self._group))
            starts, lengths, tables = self._starts, self._lengths, self._tables
        layout = PagedLayout(self._cache.block_tokens, starts, lengths, tables, tiles, self._most_length)
        packed = PackedBatch(self._cache, self._slots[:rows], (), (), layout)
        positions = self._positions[:, :, :rows] if self._axes > 1 else self._positions[0, :, :rows]

        def work() -> None:
            self._hidden[kind] = self._decoder(
                inputs_embeds=self._embeds[:, :rows], position_ids=positions, use_cache=False, packed=packed
            ).last_hidden_state[0]

        return work


@dataclass(frozen=True, slots=True)
class _Kind:
    """Kind of graph: passes of up to ``rows`` rows, each of a sequence of its own if ``decodes``."""

    rows: int
    decodes: bool


def _integers(values: Sequence[Any]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _compiled(decoder: torch.nn.Module) -> Any:
    """Compile a pass: what lies between the matrix products is fused, and attention is called as it is. The code is for
    any number of rows, but for a few that are compiled on their own.
    """
    import torch._inductor.config as inductor

    inductor.compile_threads = 1  # no processes of its own beside a server
    exclude_from_compilation()
    return torch.compile(decoder, dynamic=True)
