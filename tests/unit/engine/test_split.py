import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.unit.engine.tiny import Reference
from triptych.domain.embedding import DType
from triptych.engine.checkpoint import open_checkpoint
from triptych.engine.families.registry import HALVES
from triptych.engine.split import Half, load_half, parameter_nbytes
from triptych.families.model_files import BadModel
from triptych.families.registry import FAMILIES

CPU = torch.device("cpu")
TEXT_PREFIXES = ("model.language_model.", "lm_head.")


@pytest.fixture
def copy(model_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_dir, tmp_path / "copy"))


def load(directory: Path, half: Half, dtype: DType = DType.F32) -> Any:
    return load_half(open_checkpoint(directory), half, dtype=dtype, device=CPU)


def half_of(state: dict[str, torch.Tensor], half: Half) -> dict[str, torch.Tensor]:
    return {name: t for name, t in state.items() if name.startswith(TEXT_PREFIXES) == (half is Half.TEXT)}


@pytest.mark.parametrize("half", Half)
def test_a_half_is_exactly_its_part_of_the_whole(model_dir: Path, reference: Reference, half: Half) -> None:
    wanted = half_of(reference.model.state_dict(), half)
    loaded = load(model_dir, half)
    state = loaded.state_dict()
    assert set(state) == set(wanted)
    assert all(torch.equal(state[name], tensor) for name, tensor in wanted.items())
    assert parameter_nbytes(loaded) == sum(tensor.nbytes for tensor in wanted.values())
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    assert not loaded.training


def test_the_halves_add_up_to_the_whole(model_dir: Path, reference: Reference) -> None:
    halves = [parameter_nbytes(load(model_dir, half)) for half in Half]
    assert sum(halves) == parameter_nbytes(reference.model)
    assert all(halves)


def test_half_precision_takes_half_the_bytes(model_dir: Path) -> None:
    full, half = (parameter_nbytes(load(model_dir, Half.TEXT, dtype)) for dtype in (DType.F32, DType.BF16))
    assert full == 2 * half


def test_key_names_of_older_checkpoints_are_understood(copy: Path, reference: Reference) -> None:
    """Published LLaVA checkpoints have one module more in the names of their tower."""
    file = copy / "model.safetensors"
    renamed = {
        name.replace("model.", "", 1)
        .replace("language_model.", "language_model.model.")
        .replace("lm_head", "language_model.lm_head")
        .replace("vision_tower.", "vision_tower.vision_model."): tensor
        for name, tensor in reference.model.state_dict().items()
    }
    renamed = {name.replace("vision_model.vision_model", "vision_model"): t for name, t in renamed.items()}
    save_file({name: t.clone() for name, t in renamed.items()}, file, metadata={"format": "pt"})
    for half in Half:
        state = load(copy, half).state_dict()
        wanted = half_of(reference.model.state_dict(), half)
        assert all(torch.equal(state[name], tensor) for name, tensor in wanted.items())


def test_tied_embeddings_count_once(tmp_path: Path, model_dir: Path) -> None:
    config: Any = transformers.AutoConfig.from_pretrained(model_dir)
    config.tie_word_embeddings = config.text_config.tie_word_embeddings = True
    model = transformers.LlavaForConditionalGeneration(config)
    tied = Path(shutil.copytree(model_dir, tmp_path / "tied"))
    model.save_pretrained(tied)
    text, encoder = load(tied, Half.TEXT), load(tied, Half.ENCODER)
    assert text.lm_head.weight.data_ptr() == text.model.language_model.embed_tokens.weight.data_ptr()
    assert torch.equal(text.lm_head.weight, model.lm_head.weight)
    assert parameter_nbytes(text) + parameter_nbytes(encoder) == parameter_nbytes(model)


@pytest.mark.parametrize(
    ("half", "name"),
    [(Half.TEXT, "language_model.model.norm.weight"), (Half.TEXT, "lm_head.weight"), (Half.ENCODER, "linear_1.bias")],
)
def test_a_missing_weight_is_an_error_of_its_half_alone(copy: Path, half: Half, name: str) -> None:
    file = copy / "model.safetensors"
    tensors = load_file(file)
    (found,) = [key for key in tensors if key.endswith(name)]
    del tensors[found]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(BadModel, match="missing keys"):
        load(copy, half)
    load(copy, Half.TEXT if half is Half.ENCODER else Half.ENCODER)


def test_a_weight_of_another_shape_is_an_error(copy: Path) -> None:
    file = copy / "model.safetensors"
    tensors = load_file(file)
    tensors = {name: t[:-1].clone() if name.endswith("linear_1.bias") else t for name, t in tensors.items()}
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(BadModel, match="encoder half"):
        load(copy, Half.ENCODER)


def test_a_class_that_transformers_does_not_have_is_an_error(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"architectures": ["NoSuchModel"]}))
    with pytest.raises(BadModel, match="NoSuchModel"):
        load(copy, Half.TEXT)


def test_every_family_has_its_halves() -> None:
    assert set(HALVES) == set(FAMILIES)
