"""Videos of a model without a family: counted by their headers alone, sampled by the model's own processor."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.integration.families.harness import Case
from tests.models.conftest import made
from triptych.domain.media import Modality
from triptych.engine.families.item_processor import ItemProcessor
from triptych.errors import InvalidMedia
from triptych.families.generic import BlankItem
from triptych.families.model_files import ModelFiles
from triptych.tokens.processor_process import read_blank, read_processed, written_blank, written_processed

pytestmark = pytest.mark.timeout(180)

HOUR = BlankItem(Modality.VIDEO, 3840, 2160, frames=108_000, duration_s=3600.0)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return made("qwen3_5--video", tmp_path_factory.mktemp("model"))


def test_a_long_large_video_is_counted_without_its_pixels(case: Case) -> None:
    """Its sampled frames would take 19 GB."""
    processed = ItemProcessor(ModelFiles.load(case.directory)).processed(HOUR)
    assert len(processed.frames) == 768
    assert processed.seen_pixels > 768 * HOUR.width * HOUR.height / 4
    assert read_processed(written_processed(processed)) == processed
    assert read_blank(written_blank(HOUR)) == HOUR


def test_a_video_that_the_processor_refuses_is_the_clients_fault(case: Case) -> None:
    family = case.builder.family
    (video,) = (part for part in case.question_of(1, Modality.VIDEO) if not isinstance(part, str))
    assert family.prompt_replacement(video.info)
    with pytest.raises(InvalidMedia, match="refuses the video"):
        family.prompt_replacement(replace(video.info, width=2000, height=2))
    with pytest.raises(InvalidMedia, match="header"):
        family.prompt_replacement(replace(video.info, duration_s=0.0))


def test_without_torchvision_videos_are_refused_by_name(
    case: Case, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("triptych.engine.families.item_processor.is_torchvision_available", lambda: False)
    (video,) = (part for part in case.question_of(1, Modality.VIDEO) if not isinstance(part, str))
    with pytest.raises(InvalidMedia, match="the model takes images, not videos"):
        replace(case, directory=case.directory).builder.family.prompt_replacement(video.info)
