"""CUDA graphs of decode steps: one launch per step in which every sequence gets one token.

For few rows, launching kernels one by one takes longer than running them. So passes of some batch sizes are captured
once, on static buffers; a step fills the buffers of the next larger size and replays its graph. Padding rows use a
spare block that belongs to no sequence.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from triptych.engine.decoder.attention import PackedBatch, leave_as_it_is
from triptych.engine.decoder.kv_cache import KvCache
from triptych.engine.decoder.model_runner import ForwardInput
from triptych.engine.decoder.paged_attention import PagedLayout, Tiles, head_group, product_rows
from triptych.engine.families.adapters import DecoderAdapter

logger = logging.getLogger(__name__)

_FEW = (1, 2, 4)
_STEP = 8


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
        with torch.cuda.graph(graph, pool=pool):
            work()
        replay: Callable[[], None] = graph.replay
        return replay

    return capture


def rotary_axes(adapter: DecoderAdapter) -> int:
    """Axes of the decoder's rotary positions; several for some multimodal models."""
    config: Any = adapter.decoder.config
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return len(rope.get("mrope_section", ())) or 1


class DecodeGraphs:
    """Graphs of decode steps of up to ``most_rows`` sequences, captured at construction.

    For adapters with ``supports_cuda_graphs``. Raises what capture raises for a pass that cannot be captured.
    """

    @torch.inference_mode()
    def __init__(
        self,
        adapter: DecoderAdapter,
        cache: KvCache,
        *,
        most_rows: int,
        most_tokens: int,
        capture: GraphCapture,
        compiled: bool = False,
    ) -> None:
        """``most_tokens`` is the maximum sequence length. The cache must have a ``spare_block`` for padding rows. ``compiled``: what is
        captured is compiled first, by ``torch.compile``.
        """
        if cache.spare_block is None:
            raise ValueError("padding rows need a spare block")
        device = cache.keys.device
        self._adapter = adapter
        self._decoder: Any = _compiled(adapter.decoder) if compiled else adapter.decoder
        self._embed_tokens = adapter.decoder.get_input_embeddings()
        self._cache = cache
        self._axes = rotary_axes(adapter)
        blocks = min(cache.blocks, -(-most_tokens // cache.block_tokens))
        self._most_length = blocks * cache.block_tokens
        self._spare = cache.spare_block
        self._ids = torch.zeros(most_rows, dtype=torch.long, device=device)
        self._slots = torch.full((most_rows,), self._spare * cache.block_tokens, dtype=torch.long, device=device)
        self._positions = torch.zeros(self._axes, 1, most_rows, dtype=torch.long, device=device)
        self._starts = torch.arange(most_rows + 1, dtype=torch.int32, device=device)
        self._zeros = torch.zeros_like(self._starts)
        self._lengths = torch.ones(most_rows, dtype=torch.int32, device=device)
        self._tables = torch.full((most_rows, blocks), self._spare, dtype=torch.int32, device=device)
        self._logits: dict[int, torch.Tensor] = {}
        self._sizes = [*(size for size in _FEW if size < most_rows), *range(_STEP, most_rows, _STEP), most_rows]
        self._replays: dict[int, Callable[[], None]] = {}
        self.capture(capture)

    @torch.inference_mode()
    def capture(self, capture: GraphCapture) -> None:
        """Capture all of them, in place of those before."""
        self._replays.clear()
        for size in reversed(self._sizes):  # the largest first, so that smaller ones reuse its memory
            self._replays[size] = capture(self._work(size))

    def covers(self, inputs: Sequence[ForwardInput]) -> bool:
        """Whether a graph was captured for a pass over ``inputs``."""
        return len(inputs) <= self._sizes[-1] and all(map(_decodes, inputs))

    @torch.inference_mode()
    def run(self, rows: Sequence[ForwardInput], positions: torch.Tensor) -> torch.Tensor:
        """Logits [rows, vocabulary], valid until the next call. ``positions`` [rows] or [axes, 1, rows], on the CPU."""
        size = self._sizes[bisect_left(self._sizes, len(rows))]
        self._fill(rows, positions, size)
        self._replays[size]()
        return self._logits[size][: len(rows)]

    def _fill(self, rows: Sequence[ForwardInput], positions: torch.Tensor, size: int) -> None:
        unused = size - len(rows)
        block_tokens = self._cache.block_tokens
        slots = [slot for row in rows for slot in self._cache.slots(row.table, row.first, row.first + 1)]
        used = [row.table[: row.first // block_tokens + 1] for row in rows]  # a sequence may own one block more
        width = max(map(len, used))
        tables = [[*table, *[self._spare] * (width - len(table))] for table in used]
        self._put(self._ids[:size], torch.tensor([row.token_ids[0] for row in rows] + [0] * unused))
        self._put(self._slots[:size], torch.tensor(slots + [self._spare * block_tokens] * unused))
        self._put(self._positions[:, 0, : len(rows)], positions.reshape(-1, len(rows)).expand(self._axes, -1))
        self._put(self._lengths[:size], torch.tensor([row.first + 1 for row in rows] + [1] * unused, dtype=torch.int32))
        padded = tables + [[self._spare] * width] * unused
        self._put(self._tables[:size, :width], torch.tensor(padded, dtype=torch.int32))

    def _put(self, buffer: torch.Tensor, values: torch.Tensor) -> None:
        if buffer.device.type == "cuda":
            values = values.contiguous().pin_memory()
        buffer.copy_(values, non_blocking=True)

    def _work(self, size: int) -> Callable[[], None]:
        layout = PagedLayout(
            self._cache.block_tokens,
            self._starts[: size + 1],
            self._lengths[:size],
            self._tables[:size],
            Tiles(self._starts[:size], self._zeros[:size], product_rows(1, head_group(self._adapter.decoder.config))),
            most_length=self._most_length,
        )
        packed = PackedBatch(self._cache, self._slots[:size], (), (), layout)
        positions = self._positions[:, :, :size] if self._axes > 1 else self._positions[0, :, :size]

        def work() -> None:
            hidden = self._decoder(
                inputs_embeds=self._embed_tokens(self._ids[:size])[None],
                position_ids=positions,
                use_cache=False,
                packed=packed,
            ).last_hidden_state[0]
            self._logits[size] = self._adapter.logits(hidden)

        return work


def _compiled(decoder: torch.nn.Module) -> Any:
    """With what lies between the matrix products fused. Each number of rows has the same code; attention is called as it is."""
    import torch._inductor.config as inductor

    inductor.compile_threads = 1  # no processes of its own beside a server
    leave_as_it_is()
    return torch.compile(decoder, dynamic=True)


def _decodes(row: ForwardInput) -> bool:
    """Whether the input is a decode: one position after all items, whose next token is needed."""
    if len(row.token_ids) != 1 or not row.reaches_end or row.bidirectional:
        return False
    return all(start + len(embeds) <= row.first for start, embeds in row.plan.rows.items())
