"""Images of any resolution in shards: rows of embeddings depend only on the tiles of their shard."""

from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as untyped_transformers

from tests.unit.families.kit import image, model_files, random_sizes
from triptych.domain.media import MediaInfo, Shard
from triptych.families.anyres import AnyRes
from triptych.families.base import filled
from triptych.families.llava_next import LlavaNext
from triptych.families.llava_onevision import LlavaOneVision

transformers: Any = untyped_transformers
SIDE, TILE_PX, HIDDEN = 4, 28, 3
NEWLINE = torch.full((HIDDEN,), -1.0)
GRIDS = {
    "as LLaVA-NeXT": [[1, 2], [2, 1], [2, 2], [3, 1], [1, 3]],
    "as LLaVA-OneVision": [[rows, columns] for rows in range(1, 7) for columns in range(1, 7)],
    "tall only": [[5, 2], [6, 1]],
}
Join = Callable[[torch.Tensor, MediaInfo], torch.Tensor]


def family_of(kind: str, pinpoints: list[list[int]], anyres: str) -> AnyRes:
    grid = [[side * TILE_PX for side in pinpoint] for pinpoint in pinpoints]
    encoder = "clip_vision_model" if kind == "llava_next" else "siglip_vision_model"
    size = {"height": TILE_PX, "width": TILE_PX}
    files = model_files(
        config={
            "model_type": kind,
            "image_token_index": 9,
            "image_grid_pinpoints": grid,
            "vision_aspect_ratio": anyres,
            "text_config": {"model_type": "llama"},
            "vision_config": {"model_type": encoder, "image_size": TILE_PX, "patch_size": TILE_PX // SIDE},
        },
        processor={"num_image_tokens": SIDE**2} if kind == "llava_onevision" else {},
        image_processor={"size": size, "crop_size": size, "image_grid_pinpoints": grid},
    )
    return (LlavaNext if kind == "llava_next" else LlavaOneVision).load(files)


def join_of(kind: str, family: AnyRes, anyres: str) -> Join:
    """The function of transformers that joins tiles [tiles, rows, hidden]."""
    vision = SimpleNamespace(image_size=TILE_PX, patch_size=TILE_PX // SIDE)
    model = SimpleNamespace(
        config=SimpleNamespace(
            vision_config=vision, image_grid_pinpoints=[list(pinpoint) for pinpoint in family.grid.pinpoints]
        )
    )
    cls, options = {
        "llava_next": (transformers.LlavaNextModel, {"vision_feature_select_strategy": "default"}),
        "llava_onevision": (transformers.LlavaOnevisionModel, {"vision_aspect_ratio": anyres}),
    }[kind]

    def join(tiles: torch.Tensor, info: MediaInfo) -> torch.Tensor:
        sizes = torch.tensor([[info.height, info.width]])
        joined, _ = cls.pack_image_features(model, [tiles], sizes, image_newline=NEWLINE, **options)
        rows: torch.Tensor = joined[0]
        return rows

    return join


@pytest.mark.slow
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize(
    ("kind", "anyres"),
    [("llava_next", "anyres_max_9"), ("llava_onevision", "anyres_max_9"), ("llava_onevision", "anyres_max_2")],
)
def test_shards_have_the_rows_of_the_whole_image(kind: str, anyres: str, grid: str) -> None:
    family = family_of(kind, GRIDS[grid], anyres)
    join, rng = join_of(kind, family, anyres), Random(0)
    most = 0
    for width, height in random_sizes(400, 150):
        info = image(width, height)
        units = family.units(info)
        most = max(most, len(units))
        rows, columns = family.grid.tiles(info)
        tiles = torch.rand(1 + rows * columns, SIDE**2, HIDDEN)
        whole = join(tiles, info)
        assert len(whole) == sum(units) == filled(family.prompt_replacement(info))
        assert all(units)
        place = rng.randrange(1, len(units)) if len(units) > 1 else 1
        cuts = [(0, place), (place, len(units)), *((unit, unit + 1) for unit in range(len(units))), (0, len(units))]
        for first, end in cuts:
            if first == end:
                continue
            part = family.part(info, Shard(first, end - first, len(units)))
            assert part.of == len(tiles)
            assert part.rows == range(sum(units[:first]), sum(units[:end]))
            seen = torch.full_like(tiles, 1e3)
            seen[list(part.tiles)] = tiles[list(part.tiles)]
            torch.testing.assert_close(join(seen, info)[list(part.rows)], whole[list(part.rows)], rtol=0, atol=1e-2)
    assert most == 1 + max(rows for rows, _ in GRIDS[grid])


def test_a_shard_needs_only_its_own_rows_of_tiles() -> None:
    family = family_of("llava_next", GRIDS["as LLaVA-NeXT"], "anyres_max_9")
    info = image(56, 56)
    assert family.units(info) == (16, 4 * 9, 4 * 9)
    assert [family.part(info, Shard(unit, 1, 3)).tiles for unit in range(3)] == [(0,), (1, 2), (3, 4)]
    assert family.part(info, Shard(0, 2, 3)).tiles == (0, 1, 2)


def test_scaled_rows_between_two_rows_of_tiles_need_both() -> None:
    family = family_of("llava_onevision", GRIDS["as LLaVA-OneVision"], "anyres_max_2")
    info = image(84, 84)
    units = family.units(info)
    assert len(units) == 4
    assert [family.part(info, Shard(unit, 1, 4)).tiles for unit in range(4)] == [
        (0,),
        (1, 2, 3, 4, 5, 6),
        (4, 5, 6, 7, 8, 9),
        (7, 8, 9),
    ]


def test_rows_of_tiles_with_padding_only_are_not_needed() -> None:
    family = family_of("llava_next", GRIDS["tall only"], "anyres_max_9")
    info = image(400, 80)
    assert family.units(info) == (16, 2 * 9)
    assert family.part(info, Shard(0, 2, 2)).tiles == (0, 5, 6)
    thin = image(400, 8)
    assert family.units(thin) == (16,)
    assert family.part(thin, Shard(0, 1, 1)).tiles == (0,)
