from typing import Any

import pytest
import transformers as untyped_transformers

from tests.unit.families.kit import model_files
from triptych.engine.media.image_processor import ImagePreparer
from triptych.families.model_files import BadModel, ModelFiles

transformers: Any = untyped_transformers


def files(name: str) -> ModelFiles:
    return model_files(config={}, image_processor={"image_processor_type": name, "do_normalize": False})


@pytest.mark.parametrize("name", ["CLIPImageProcessor", "CLIPImageProcessorFast", "CLIPImageProcessorPil"])
def test_every_processor_name_gives_the_pillow_class(name: str) -> None:
    settings = ImagePreparer(files(name)).settings
    assert settings["do_normalize"] is False
    assert settings["image_processor_type"] == "CLIPImageProcessor"


def test_a_processor_behind_a_placeholder_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers 5.17 exports such placeholders for processors that need no torchvision."""
    name = "Idefics3ImageProcessorPil"
    module = "transformers.models.idefics3.image_processing_pil_idefics3"
    monkeypatch.setattr(transformers, name, type(name, (), {"__module__": module}))
    assert "max_image_size" in ImagePreparer(files(name)).settings


@pytest.mark.parametrize("name", ["NoImageProcessor", "None"])
def test_an_unknown_processor_is_refused_by_name(name: str) -> None:
    with pytest.raises(BadModel, match=f"transformers {transformers.__version__} has no image processor {name}"):
        ImagePreparer(files(name))


def test_a_directory_without_a_processor_name_is_refused() -> None:
    with pytest.raises(BadModel, match="names no image_processor_type"):
        ImagePreparer(model_files(config={}))
