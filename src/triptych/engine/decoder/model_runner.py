"""Forward passes of the decoder: inputs, outputs, and what all model runners share."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from triptych.engine.families.adapters import ForwardPart, PromptPlan
from triptych.engine.lora import LoraLayers, LoraRows
from triptych.engine.tensors import argmax
from triptych.errors import EngineFailure
from triptych.families.base import Span


@dataclass(frozen=True, slots=True)
class ForwardInput:
    """Compute positions ``first`` to ``first + len(token_ids)`` of a sequence whose blocks are ``table``."""

    sequence_id: str
    token_ids: Sequence[int]
    plan: PromptPlan
    first: int
    table: Sequence[int]
    is_contiguous: bool
    reaches_end: bool
    """Whether the pass yields the next token."""
    wants_logits: bool
    """Whether sampling needs more than the argmax."""
    lora: str = ""
    """Digest of its LoRA adapter; empty without one."""

    @property
    def count(self) -> int:
        return len(self.token_ids)

    @property
    def end(self) -> int:
        return self.first + len(self.token_ids)

    @property
    def bidirectional(self) -> tuple[Span, ...]:
        """The bidirectional spans that overlap the computed positions."""
        return tuple(
            run for run in self.plan.bidirectional if run.start < self.end and self.first < run.start + run.tokens
        )


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """A pass's result for a sequence whose next token it yields."""

    argmax: int
    is_finite: bool
    logits: torch.Tensor | None
    """[vocabulary], float32, if requested; valid until the next pass."""


Result = ForwardOutput | EngineFailure | None
"""Result of an input: None for a prompt's chunk before the last; EngineFailure if the pass failed for this sequence."""


class ModelRunner(Protocol):
    """Runs forward passes of the decoder. Its state of sequences is keyed by their ids."""

    loras: LoraLayers | None
    """The LoRA adapters of its inputs. None: they have none."""

    def run(self, inputs: Sequence[ForwardInput]) -> list[Result]:
        """Run one pass over all inputs. A sequence that makes it fail gets an EngineFailure, the others their outputs."""
        ...

    def fork(self, source: str, targets: Sequence[str]) -> None:
        """Copy a sequence's state outside of its KV blocks to others."""
        ...

    def drop(self, sequence_ids: Iterable[str]) -> None:
        """Free the state of these sequences outside of their KV blocks."""
        ...

    def weights_moved(self) -> None:
        """The decoder's weights have other addresses now."""
        ...


def lora_rows(inputs: Sequence[ForwardInput], parts: Sequence[ForwardPart]) -> list[LoraRows]:
    """The rows of a pass over ``inputs``, in which they are ``parts``, that have adapters."""
    pairs = zip(inputs, parts, strict=True)
    return [LoraRows(entry.lora, part.row, part.count) for entry, part in pairs if entry.lora]


def splice(part: ForwardPart, rows: torch.Tensor) -> None:
    """Overwrite placeholders in ``rows``, the token embeddings of the part's positions, by the items' embeddings."""
    for start, embeds in part.plan.rows.items():
        begin, end = max(part.first, start), min(part.first + part.count, start + len(embeds))
        if begin < end:
            rows[begin - part.first : end - part.first] = embeds[begin - start : end - start]


def positions(parts: Sequence[ForwardPart], device: torch.device) -> torch.Tensor:
    """Rotary positions of a pass: [1, rows], or [axes, 1, rows] where a prompt has several axes."""
    plain: list[int] = []
    axes = 1
    inside: list[tuple[ForwardPart, torch.Tensor]] = []
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
    result = torch.tensor(plain).expand(axes, -1)
    if inside:
        result = result.clone()
        for part, known in inside:
            result[:, part.row : part.row + known.shape[1]] = known.to(result.device)
    result = result.to(device)
    return result if axes == 1 else result[:, None]


def rotary_axes(decoder: Any) -> int:
    """Axes of the decoder's rotary positions; several for some multimodal models."""
    rope = getattr(decoder.config, "rope_parameters", None) or getattr(decoder.config, "rope_scaling", None) or {}
    sections = [
        value for name, value in rope.items() if name.endswith("rope_section") and isinstance(value, list | tuple)
    ]
    return len(sections[0]) if sections else 1


def turns_long(config: Any) -> bool:
    """Whether rotary frequencies depend on the length of the longest sequence in a pass, in any kind of layers."""
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    kinds = [rope, *(of_kind for of_kind in rope.values() if isinstance(of_kind, dict))]
    return any(of_kind.get("rope_type") == "longrope" for of_kind in kinds)


def best_tokens(logits: torch.Tensor) -> tuple[list[int], list[bool]]:
    """Find the best tokens of [n, vocabulary], float32: each row's argmax, and whether all its numbers are finite."""
    return argmax(logits), logits.sum(-1).isfinite().tolist()  # a sum is finite only if all are


Best = Callable[[torch.Tensor], tuple[list[int], list[bool]]]
"""Function like ``best_tokens``."""


def forward_outputs(logits: torch.Tensor, wants: Sequence[bool], best: Best = best_tokens) -> list[ForwardOutput]:
    """Outputs from logits [n, vocabulary]; rows in ``wants`` keep their logits, on the device."""
    logits = logits.float()
    return [
        ForwardOutput(token, is_finite, row if wanted else None)
        for token, is_finite, row, wanted in zip(*best(logits), logits, wants, strict=True)
    ]
