"""Model directories without weights, for engines that sleep."""

from pathlib import Path

import pytest

from triptych.domain.embedding import DType
from triptych.domain.media import MediaInfo, Modality
from triptych.engine.checkpoint import open_checkpoint
from triptych.families.base import filled
from triptych.testing.delay_models import Attention, write_delay_model

IMAGE = MediaInfo(Modality.IMAGE, "png", 56, 56, 0, bytes(32))


@pytest.mark.parametrize(
    ("attention", "in_prompt", "tokens"), [(Attention.DECODER_ONLY, 576, 576), (Attention.CROSS_ATTENTION, 1, 577)]
)
def test_an_image_is_in_the_prompt_or_beside_it(
    tmp_path: Path, attention: Attention, in_prompt: int, tokens: int
) -> None:
    family = open_checkpoint(write_delay_model(tmp_path / "model", attention)).family
    assert filled(family.prompt_replacement(IMAGE)) == in_prompt
    assert family.outputs(IMAGE, DType.F32)[0].shape[-2] == tokens


def test_a_directory_is_written_once(tmp_path: Path) -> None:
    write_delay_model(tmp_path / "model", Attention.DECODER_ONLY)
    with pytest.raises(FileExistsError):
        write_delay_model(tmp_path / "model", Attention.DECODER_ONLY)
