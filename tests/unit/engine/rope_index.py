"""Qwen2.5-VL's rotary positions of videos as every release of transformers but 5.17 computes them."""

from collections.abc import Callable
from itertools import groupby
from typing import Any

import torch
import transformers as untyped_transformers

transformers: Any = untyped_transformers
RopeIndex = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def whole_seconds_only() -> bool:
    """Whether transformers truncates the seconds between patches before multiplying, as 5.17 does; later releases
    truncate the product, as the model's authors did.
    """
    version: str = transformers.__version__
    return version.startswith("5.17.")


def with_parts_of_seconds(rope_index: RopeIndex, merge: int, tokens_per_second: int) -> RopeIndex:
    """``get_rope_index`` of transformers 5.17 with the video token times of later releases.

    ``merge`` is the encoder's; prompts are taken one by one, without padding.
    """

    def corrected(
        input_ids: torch.Tensor, mm_token_type_ids: torch.Tensor, **given: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        positions, _ = rope_index(input_ids, mm_token_type_ids=mm_token_type_ids, **given)
        at = 0
        videos = zip(given.get("video_grid_thw", ()), given.get("second_per_grid_ts", ()), strict=True)
        for kind, group in groupby(mm_token_type_ids[0].tolist()):
            end = at + len(list(group))
            if kind == 2:
                (frames, rows, columns), seconds = next(videos)
                times = (torch.arange(int(frames)) * (tokens_per_second * seconds)).long()
                start = positions[1, 0, at]
                positions[0, 0, at:end] = start + times.repeat_interleave(int(rows * columns) // merge**2)
            at = end
        return positions, positions.max().view(1, 1) + 1 - input_ids.shape[1]

    return corrected
