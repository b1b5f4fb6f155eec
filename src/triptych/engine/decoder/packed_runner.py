"""Forward passes over packed sequences, against blocks of one KV cache."""

import logging
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from itertools import accumulate
from typing import Any

import torch

from triptych.engine.decoder.attention import (
    AttentionCall,
    Chunk,
    Context,
    DecodeRows,
    Decodes,
    PackedBatch,
    decodes,
    order_decodes,
)
from triptych.engine.decoder.cuda_graphs import PassGraphs, cuda_graph_capture
from triptych.engine.decoder.kv_cache import KvCache
from triptych.engine.decoder.model_runner import (
    Best,
    ForwardInput,
    Result,
    best_tokens,
    forward_outputs,
    lora_rows,
    positions,
    splice,
)
from triptych.engine.decoder.paged_attention import head_group, paged_layout
from triptych.engine.families.adapters import DecoderAdapter, ForwardPart
from triptych.engine.lora import LoraLayers
from triptych.errors import EngineFailure

logger = logging.getLogger(__name__)

_NONE = nullcontext()


class PackedModelRunner:
    """``ModelRunner`` over packed sequences, against blocks of one KV cache."""

    def __init__(
        self,
        adapter: DecoderAdapter,
        cache: KvCache,
        *,
        device: torch.device,
    ) -> None:
        self.paged = False
        """Whether the kernels of paged attention are used."""
        self.graphs: PassGraphs | None = None
        """Runs the passes that were captured."""
        self.is_fused = False
        """The decoder's layers are fused (``fused_layers``), and to be used so."""
        self.loras: LoraLayers | None = None
        """The LoRA adapters of inputs. Passes with some are neither captured nor fused."""
        self.best: Best = best_tokens
        """Finds the tokens in a pass's logits."""
        self.by_products = False
        """Whether prompts' attention is computed by products (``product_attention``)."""
        self.calls: dict[int, AttentionCall] | None = None
        """Calls by layer, filled by passes if there is one."""
        self._adapter = adapter
        self._decoder: Any = adapter.decoder
        self._embed_tokens = self._decoder.get_input_embeddings()
        self._cache = cache
        self._device = device
        self._group = head_group(adapter.decoder.config)

    def run(self, inputs: Sequence[ForwardInput]) -> list[Result]:
        """Run one pass over all inputs. If it fails, run one per input, so that only the culprit fails."""
        try:
            return self._forward(inputs)
        except Exception:
            if len(inputs) > 1:
                logger.warning("a pass over %d sequences failed: running them one by one", len(inputs), exc_info=True)
                return [result for entry in inputs for result in self.run([entry])]
            logger.exception("sequence %s fails", inputs[0].sequence_id)
            return [EngineFailure("the engine failed on this request")]

    def fork(self, source: str, targets: Sequence[str]) -> None:
        """Do nothing: all state is in the blocks."""

    def drop(self, sequence_ids: Iterable[str]) -> None:
        """Do nothing: all state is in the blocks."""

    def weights_moved(self) -> None:
        """Graphs have addresses in them. Where they cannot be captured again, passes run eagerly from now on."""
        if self.graphs is None:
            return
        try:
            self.graphs.capture(cuda_graph_capture(self._device))
        except Exception:  # transformers' decoders and CUDA raise many types
            logger.warning("CUDA graphs cannot be captured again: passes run eagerly", exc_info=True)
            self.graphs = None

    @torch.inference_mode()
    def _forward(self, inputs: Sequence[ForwardInput]) -> list[Result]:
        adapted = any(entry.lora for entry in inputs)
        fused = self.is_fused and not adapted
        order, groups = self._order(inputs, fused=fused)
        ordered = [inputs[at] for at in order]
        rows = list(accumulate((entry.count for entry in ordered), initial=0))
        parts = [
            ForwardPart(entry.plan, entry.first, entry.token_ids, row)
            for entry, row in zip(ordered, rows, strict=False)
        ]
        loras = self.loras if adapted else None
        with _NONE if loras is None else loras.applied(lora_rows(ordered, parts), rows[-1], self._device):
            hidden = self._decode(ordered, parts, rows[-1], groups, fused=fused, captured=not adapted)
        ends = [row - 1 for entry, row in zip(ordered, rows[1:], strict=True) if entry.reaches_end]
        if not ends:
            return [None] * len(inputs)
        wants = [entry.wants_logits for entry in ordered if entry.reaches_end]
        outputs = iter(forward_outputs(self._adapter.logits(hidden[self._tensor(ends)]), wants, self.best))
        results: list[Result] = [None] * len(inputs)
        for at in order:
            if inputs[at].reaches_end:
                results[at] = next(outputs)
        return results

    def _order(self, inputs: Sequence[ForwardInput], *, fused: bool) -> tuple[list[int], list[list[Context]]]:
        """The order of rows: sequences that are decoded in groups that are computed together, then the others."""
        if self.paged:
            return list(range(len(inputs))), []
        single = [at for at, entry in enumerate(inputs) if entry.count == 1 and not entry.bidirectional]
        contexts = [Context(inputs[at].end, inputs[at].table, inputs[at].is_contiguous) for at in single]
        groups = [list(range(len(contexts)))] if fused else order_decodes(contexts, self._device)
        several = sorted(set(range(len(inputs))).difference(single))
        order = [*(single[at] for group in groups for at in group), *several]
        return order, [[contexts[at] for at in group] for group in groups]

    def _pack(
        self, ordered: Sequence[ForwardInput], groups: Sequence[Sequence[Context]], *, fused: bool
    ) -> PackedBatch:
        slots: list[int] = []
        for entry in ordered:
            slots += self._cache.slots(entry.table, entry.first, entry.end)
        where = self._tensor(slots)
        if self.paged:
            layout = paged_layout(
                [entry.count for entry in ordered],
                [entry.end for entry in ordered],
                [entry.table for entry in ordered],
                [entry.bidirectional for entry in ordered],
                self._cache.block_tokens,
                self._device,
                group=self._group,
            )
            return PackedBatch(self._cache, where, (), (), layout, calls=self.calls)
        row, singles, chunks = 0, list[Decodes](), list[Chunk]()
        decoded = DecodeRows.of(groups[0]) if fused else None
        for group in groups:
            if decoded is None:
                singles.append(decodes(row, group, self._cache))
            row += len(group)
        for entry in ordered[row:]:
            context = Context(entry.end, entry.table, entry.is_contiguous)
            chunks.append(Chunk(row, entry.count, context, entry.bidirectional, self.by_products))
            row += entry.count
        return PackedBatch(self._cache, where, tuple(singles), tuple(chunks), rows=decoded, calls=self.calls)

    def _decode(
        self,
        ordered: Sequence[ForwardInput],
        parts: Sequence[ForwardPart],
        rows: int,
        groups: Sequence[Sequence[Context]],
        *,
        fused: bool,
        captured: bool,
    ) -> torch.Tensor:
        """Hidden states, [rows, hidden]. ``captured``: by a graph if there is one for the pass."""
        embeds = self._embed_tokens(self._tensor([token for entry in ordered for token in entry.token_ids]))
        for part in parts:
            splice(part, embeds[part.row : part.row + part.count])
        more = self._adapter.inputs(parts, rows)
        if captured and self.graphs is not None and not more and self.graphs.covers(ordered):
            return self.graphs.run(ordered, embeds, positions(parts, torch.device("cpu")))
        hidden: torch.Tensor = self._decoder(
            inputs_embeds=embeds[None],
            position_ids=positions(parts, self._device),
            use_cache=False,
            **more,
            packed=self._pack(ordered, groups, fused=fused),
        ).last_hidden_state[0]
        return hidden

    def _tensor(self, values: Sequence[int]) -> torch.Tensor:
        """Tensor on the device; copied from pinned memory on CUDA, so that nothing waits for the transfer."""
        if self._device.type != "cuda":
            return torch.tensor(values, device=self._device)
        return torch.tensor(values, pin_memory=True).to(self._device, non_blocking=True)
