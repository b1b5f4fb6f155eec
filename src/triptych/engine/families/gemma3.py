"""Gemma 3: an image is one tile, with bidirectional attention among its positions."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from triptych.engine.families.adapters import PlacedItem, PromptPlan, embedding_rows
from triptych.engine.families.plain import PlainDecoder
from triptych.engine.families.tiles import TileEncoder
from triptych.families.base import Span


class Gemma3Encoder(TileEncoder):
    options: ClassVar[Mapping[str, Any]] = {"do_pan_and_scan": False, "do_convert_rgb": True}


class Gemma3Decoder(PlainDecoder):
    @property
    def has_spans(self) -> bool:
        return True

    def plan(self, token_ids: Sequence[int], items: Sequence[PlacedItem]) -> PromptPlan:  # noqa: ARG002
        rows = embedding_rows(items)
        return PromptPlan(
            rows=rows, bidirectional=tuple(Span(start, len(embeds)) for start, embeds in sorted(rows.items()))
        )
