import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.unit.engine.tiny import Reference, parameter_nbytes
from triptych.domain.embedding import DType
from triptych.domain.stage import ModelPart
from triptych.engine.checkpoint import open_checkpoint
from triptych.engine.families.registry import ADAPTERS
from triptych.engine.weight_loading import load_part
from triptych.families.model_files import BadModel
from triptych.families.registry import FAMILIES

CPU = torch.device("cpu")
TEXT_PREFIXES = ("model.language_model.", "lm_head.")


@pytest.fixture
def copy(model_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_dir, tmp_path / "copy"))


def load(directory: Path, part: ModelPart, dtype: DType = DType.F32) -> Any:
    return load_part(open_checkpoint(directory), part, dtype=dtype, device=CPU)


def part_of(state: dict[str, torch.Tensor], part: ModelPart) -> dict[str, torch.Tensor]:
    return {name: t for name, t in state.items() if name.startswith(TEXT_PREFIXES) == (part is ModelPart.DECODER)}


@pytest.mark.parametrize("part", ModelPart)
def test_a_half_is_exactly_its_part_of_the_whole(model_dir: Path, reference: Reference, part: ModelPart) -> None:
    wanted = part_of(reference.model.state_dict(), part)
    loaded = load(model_dir, part)
    state = loaded.state_dict()
    assert set(state) == set(wanted)
    assert all(torch.equal(state[name], tensor) for name, tensor in wanted.items())
    assert parameter_nbytes(loaded) == sum(tensor.nbytes for tensor in wanted.values())
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    assert not loaded.training


def test_the_halves_add_up_to_the_whole(model_dir: Path, reference: Reference) -> None:
    parts = [parameter_nbytes(load(model_dir, part)) for part in ModelPart]
    assert sum(parts) == parameter_nbytes(reference.model)
    assert all(parts)


def test_half_precision_takes_half_the_bytes(model_dir: Path) -> None:
    full, part = (parameter_nbytes(load(model_dir, ModelPart.DECODER, dtype)) for dtype in (DType.F32, DType.BF16))
    assert full == 2 * part


def test_key_names_of_older_checkpoints_are_understood(copy: Path, reference: Reference) -> None:
    """Published LLaVA checkpoints have one more module in the names of their encoder."""
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
    for part in ModelPart:
        state = load(copy, part).state_dict()
        wanted = part_of(reference.model.state_dict(), part)
        assert all(torch.equal(state[name], tensor) for name, tensor in wanted.items())


def test_tied_embeddings_count_once(tmp_path: Path, model_dir: Path) -> None:
    config: Any = transformers.AutoConfig.from_pretrained(model_dir)
    config.tie_word_embeddings = config.text_config.tie_word_embeddings = True
    model = transformers.LlavaForConditionalGeneration(config)
    tied = Path(shutil.copytree(model_dir, tmp_path / "tied"))
    model.save_pretrained(tied)
    text, encoder = load(tied, ModelPart.DECODER), load(tied, ModelPart.ENCODER)
    assert text.lm_head.weight.data_ptr() == text.model.language_model.embed_tokens.weight.data_ptr()
    assert torch.equal(text.lm_head.weight, model.lm_head.weight)
    assert parameter_nbytes(text) + parameter_nbytes(encoder) == parameter_nbytes(model)


@pytest.mark.parametrize(
    ("part", "name"),
    [
        (ModelPart.DECODER, "language_model.model.norm.weight"),
        (ModelPart.DECODER, "lm_head.weight"),
        (ModelPart.ENCODER, "linear_1.bias"),
    ],
)
def test_a_missing_weight_is_an_error_of_its_half_alone(copy: Path, part: ModelPart, name: str) -> None:
    file = copy / "model.safetensors"
    tensors = load_file(file)
    (found,) = [key for key in tensors if key.endswith(name)]
    del tensors[found]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(BadModel, match="missing keys"):
        load(copy, part)
    load(copy, ModelPart.DECODER if part is ModelPart.ENCODER else ModelPart.ENCODER)


def test_a_weight_of_another_shape_is_an_error(copy: Path) -> None:
    file = copy / "model.safetensors"
    tensors = load_file(file)
    tensors = {name: t[:-1].clone() if name.endswith("linear_1.bias") else t for name, t in tensors.items()}
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(BadModel, match="the encoder of the model"):
        load(copy, ModelPart.ENCODER)


@pytest.mark.parametrize("section", ["", "text_config"])
def test_quantized_weights_are_refused_by_name_and_the_encoder_beside_them_is_loaded(
    copy: Path, reference: Reference, section: str
) -> None:
    config = json.loads((copy / "config.json").read_text())
    (config[section] if section else config)["quantization_config"] = {"quant_method": "awq", "bits": 4}
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadModel, match=r"quantized \(awq\).* use --engine vllm"):
        load(copy, ModelPart.DECODER)
    wanted = part_of(reference.model.state_dict(), ModelPart.ENCODER)
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in load(copy, ModelPart.ENCODER).state_dict().items())


def test_a_quantized_encoder_is_refused(copy: Path) -> None:
    """Its weights would be loaded without their scales."""
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    file = copy / "model.safetensors"
    tensors = load_file(file)
    (weight,) = [name for name in tensors if name.endswith("linear_1.weight")]
    save_file({**tensors, f"{weight}_scale_inv": torch.ones(1)}, file, metadata={"format": "pt"})
    with pytest.raises(BadModel, match=r"the encoder's weights are quantized \(fp8\).*linear_1.weight_scale_inv"):
        load(copy, ModelPart.ENCODER)


def test_a_class_that_transformers_does_not_have_is_an_error(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"architectures": ["NoSuchModel"]}))
    with pytest.raises(BadModel, match="NoSuchModel"):
        load(copy, ModelPart.DECODER)


def test_every_family_has_its_halves() -> None:
    assert set(ADAPTERS) == set(FAMILIES)
