"""One pass of the decoder over packed sequences: what is computed, apart from who and when."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from triptych.engine.decoder.attention import Chunk, Context, Decodes, PackedBatch, decodes, order_decodes
from triptych.engine.decoder.decode_graphs import DecodeGraphs
from triptych.engine.decoder.flash import paged_layout
from triptych.engine.decoder.kv import KvCache
from triptych.engine.families.halves import PassPart, PromptPlan, TextHalf
from triptych.errors import EngineFailure
from triptych.families.base import Span
from triptych.machine.text.kv_blocks import Copy

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Work:
    """Compute positions ``first`` to ``first + len(token_ids)`` of a sequence, whose blocks are ``table``."""

    sequence_id: str
    token_ids: Sequence[int]
    plan: PromptPlan
    first: int
    table: Sequence[int]
    is_contiguous: bool
    reaches_end: bool
    """Whether the next token follows from it."""
    wants_logits: bool
    """Whether the likeliest token is not enough to choose it."""

    @property
    def count(self) -> int:
        return len(self.token_ids)

    @property
    def end(self) -> int:
        return self.first + len(self.token_ids)

    @property
    def whole(self) -> tuple[Span, ...]:
        """Of the runs that attend both ways, those that it computes some of."""
        return tuple(run for run in self.plan.whole if run.start < self.end and self.first < run.start + run.tokens)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a pass says of the next token."""

    likeliest: int
    is_finite: bool
    logits: npt.NDArray[np.float32] | None
    """[vocabulary] where they are wanted."""


Result = Outcome | EngineFailure | None
"""None while the sequence's end is not reached; or why there is no outcome."""


class Passes(Protocol):
    """How the decoder is run; what it remembers of sequences is kept by their ids."""

    def run(self, work: Sequence[Work]) -> list[Result]:
        """Compute all of it; who makes a pass fail is told, and harms nobody else."""
        ...

    def copy(self, copies: Iterable[Copy]) -> None:
        """Copy the contents of blocks, in the order in which they are told."""
        ...

    def fork(self, source: str, targets: Sequence[str]) -> None:
        """Let others have what a sequence has computed, beside what ``copy`` does."""
        ...

    def drop(self, sequence_ids: Iterable[str]) -> None:
        """What was remembered of these beside their blocks is not needed any more."""
        ...


class PackedPasses:
    """``Passes`` over sequences packed one behind the other, against blocks of one KV cache."""

    def __init__(
        self,
        half: TextHalf,
        cache: KvCache,
        *,
        device: torch.device,
        paged: bool,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        """``graphs`` runs the passes that it takes."""
        self._graphs = graphs
        self._half = half
        self._decoder: Any = half.decoder
        self._embed_tokens = self._decoder.get_input_embeddings()
        self._cache = cache
        self._device = device
        self._paged = paged

    def run(self, work: Sequence[Work]) -> list[Result]:
        """A pass over ``work``; when it fails, a pass for each, so that only the culprit fails."""
        try:
            return self._forward(work)
        except Exception:
            if len(work) > 1:
                logger.warning("a pass over %d sequences failed: running them one by one", len(work), exc_info=True)
                return [result for one in work for result in self.run([one])]
            logger.exception("sequence %s fails", work[0].sequence_id)
            return [EngineFailure("the engine failed on this request")]

    def copy(self, copies: Iterable[Copy]) -> None:
        self._cache.copy(copies)

    def fork(self, source: str, targets: Sequence[str]) -> None:
        """Everything is in the blocks."""

    def drop(self, sequence_ids: Iterable[str]) -> None:
        """Everything is in the blocks."""

    @torch.inference_mode()
    def _forward(self, work: Sequence[Work]) -> list[Result]:
        if self._graphs is not None and self._graphs.takes(work):
            parts = [PassPart(one.plan, one.first, one.count, row) for row, one in enumerate(work)]
            logits = self._graphs.run(work, positions(parts, torch.device("cpu")))
            return list(outcomes_of(logits, [one.wants_logits for one in work]))
        single = [at for at, one in enumerate(work) if one.count == 1 and not one.whole]
        contexts = [Context(work[at].end, work[at].table, work[at].is_contiguous) for at in single]
        groups = order_decodes(contexts, self._device)
        order = [single[at] for group in groups for at in group]
        several = sorted(set(range(len(work))).difference(single))
        ordered = [work[at] for at in (*order, *several)]
        packed = self._pack(ordered, [[contexts[at] for at in group] for group in groups])
        rows = list(accumulate((one.count for one in ordered), initial=0))
        parts = [PassPart(one.plan, one.first, one.count, row) for one, row in zip(ordered, rows, strict=False)]
        hidden = self._decode(ordered, parts, rows[-1], packed)
        ends = [row - 1 for one, row in zip(ordered, rows[1:], strict=True) if one.reaches_end]
        if not ends:
            return [None] * len(work)
        wants = [one.wants_logits for one in ordered if one.reaches_end]
        outcomes = iter(outcomes_of(self._half.logits(hidden[self._tensor(ends)]), wants))
        results: list[Result] = [None] * len(work)
        for at in (*order, *several):
            if work[at].reaches_end:
                results[at] = next(outcomes)
        return results

    def _pack(self, ordered: Sequence[Work], groups: Sequence[Sequence[Context]]) -> PackedBatch:
        slots: list[int] = []
        for one in ordered:
            slots += self._cache.slots(one.table, one.first, one.end)
        where = self._tensor(slots)
        if self._paged and not any(one.whole for one in ordered):
            layout = paged_layout(
                [one.count for one in ordered],
                [one.end for one in ordered],
                [one.table for one in ordered],
                self._cache.block_tokens,
                self._device,
            )
            return PackedBatch(self._cache, where, (), (), layout)
        row, singles, chunks = 0, list[Decodes](), list[Chunk]()
        for group in groups:
            singles.append(decodes(row, group, self._cache))
            row += len(group)
        for one in ordered[row:]:
            chunks.append(Chunk(row, one.count, Context(one.end, one.table, one.is_contiguous), one.whole))
            row += one.count
        return PackedBatch(self._cache, where, tuple(singles), tuple(chunks))

    def _decode(
        self, ordered: Sequence[Work], parts: Sequence[PassPart], rows: int, packed: PackedBatch
    ) -> torch.Tensor:
        """Hidden states, [rows, hidden]."""
        embeds = self._embed_tokens(self._tensor([token for one in ordered for token in one.token_ids]))
        for part in parts:
            splice(part, embeds[part.row : part.row + part.count])
        hidden: torch.Tensor = self._decoder(
            inputs_embeds=embeds[None],
            position_ids=positions(parts, self._device),
            use_cache=False,
            **self._half.inputs(parts, rows),
            packed=packed,
        ).last_hidden_state[0]
        return hidden

    def _tensor(self, values: Sequence[int]) -> torch.Tensor:
        """On the device; from pinned memory on CUDA, so that nothing waits for the transfer."""
        if self._device.type != "cuda":
            return torch.tensor(values, device=self._device)
        return torch.tensor(values, pin_memory=True).to(self._device, non_blocking=True)


def splice(part: PassPart, rows: torch.Tensor) -> None:
    """Put what items bring into ``rows``, which are the part's positions."""
    for start, embeds in part.plan.rows.items():
        begin, end = max(part.first, start), min(part.first + part.count, start + len(embeds))
        if begin < end:
            rows[begin - part.first : end - part.first] = embeds[begin - start : end - start]


def positions(parts: Sequence[PassPart], device: torch.device) -> torch.Tensor:
    """Rotary positions of a pass: [1, rows], or [axes, 1, rows] where a prompt has several axes."""
    plain: list[int] = []
    axes = 1
    inside: list[tuple[PassPart, torch.Tensor]] = []
    for part in parts:
        known, first = part.plan.positions, part.first
        prompt = 0 if known is None else known.shape[1]
        if known is not None:
            axes = max(axes, len(known))
            if first < prompt:
                inside.append((part, known[:, first : min(first + part.count, prompt)]))
        if part.plan.next_position is not None:
            first += part.plan.next_position - prompt
        plain.extend(range(first, first + part.count))
    made = torch.tensor(plain).expand(axes, -1)
    if inside:
        made = made.clone()
        for part, known in inside:
            made[:, part.row : part.row + known.shape[1]] = known.to(made.device)
    made = made.to(device)
    return made if axes == 1 else made[:, None]


def outcomes_of(logits: torch.Tensor, wants: Sequence[bool]) -> list[Outcome]:
    """Of logits [n, vocabulary]: only those that are wanted leave the device."""
    logits = logits.float()
    # numpy compares many numbers at a time: torch's takes a tenth of a step of 32 sequences on a CPU.
    likeliest = (logits.numpy() if logits.device.type == "cpu" else logits).argmax(-1).tolist()
    finite = logits.sum(-1).isfinite().tolist()  # a sum is finite only if all are
    asked = [at for at, wanted in enumerate(wants) if wanted]
    told = dict(zip(asked, logits[asked].cpu().numpy(), strict=True)) if asked else {}
    return [
        Outcome(token, is_finite, told.get(at))
        for at, (token, is_finite) in enumerate(zip(likeliest, finite, strict=True))
    ]
