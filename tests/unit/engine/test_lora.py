"""A checkpoint's LoRA adapter. Granite Speech's parity tests show that it applies to the right prompts."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.integration.families.harness import transformers
from tests.integration.families.tiny_granite_speech import ALPHA, RANK, TinyGraniteSpeech
from tests.unit.engine.tiny import text_engine
from triptych.domain.embedding import DType
from triptych.engine.checkpoint import ADAPTER_CONFIG, ADAPTER_WEIGHTS, open_checkpoint
from triptych.engine.decoder.text_engine import TransformersTextEngine
from triptych.engine.lora import LoraLayers, LoraRows
from triptych.families.model_files import BadModel


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("granite")
    TinyGraniteSpeech().make(directory)
    return directory


@pytest.fixture
def directory(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "model")


def start(directory: Path) -> TransformersTextEngine:
    return text_engine(directory, kv_cache_bytes=1 << 20, max_sequences=2, token_budget=16)


def configure(directory: Path, **changes: Any) -> None:
    file = directory / ADAPTER_CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def decoder() -> Any:
    """Two layers, each with an attention of 8 by 8."""
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 8}
    config = transformers.LlamaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=2, **sizes)
    return transformers.LlamaModel(config).eval()


@pytest.mark.parametrize(("rslora", "scale"), [(False, ALPHA / RANK), (True, ALPHA / RANK**0.5)])
def test_the_adapter_is_applied_to_selected_rows(tmp_path: Path, *, rslora: bool, scale: float) -> None:
    down, up = torch.randn(RANK, 8), torch.randn(8, RANK)
    key = "base_model.model.language_model.model.layers.1.self_attn.v_proj.lora_{}.weight"
    save_file({key.format("A"): down, key.format("B"): up}, tmp_path / ADAPTER_WEIGHTS)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "use_rslora": rslora, "target_modules": ["v_proj"]}
    (tmp_path / ADAPTER_CONFIG).write_text(json.dumps(config))
    model = decoder()
    adapted = model.layers[1].self_attn.v_proj
    hidden = torch.randn(1, 3, 8)
    plain = adapted(hidden)
    layers = LoraLayers(model)
    weights = layers.read(tmp_path)
    layers.add(weights)
    assert torch.equal(adapted(hidden), plain)
    rows = [LoraRows(weights.digest, 0, 1), LoraRows(weights.digest, 2, 1)]
    with torch.inference_mode(), layers.applied(rows, 3, hidden.device):
        added = adapted(hidden) - plain
    assert torch.allclose(added[0, ::2], scale * hidden[0, ::2] @ (up @ down).T, atol=1e-4)
    assert not added[0, 1].any()
    assert torch.equal(adapted(hidden), plain)
    layers.remove(weights.digest)
    assert not adapted._forward_hooks


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"peft_type": "LOHA"}, "peft_type"),
        ({"r": 0}, "r is 0"),
        ({"lora_alpha": None}, "LoRA"),
    ],
)
def test_variants_are_refused(directory: Path, changes: dict[str, Any], named: str) -> None:
    configure(directory, **changes)
    with pytest.raises(BadModel, match=named):
        start(directory)


def test_a_configured_adapter_must_exist(directory: Path) -> None:
    (directory / ADAPTER_CONFIG).unlink()
    with pytest.raises(BadModel, match="has_lora_adapter"):
        start(directory)


def test_missing_damaged_or_mismatched_weights_are_refused(directory: Path) -> None:
    file = directory / ADAPTER_WEIGHTS
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    with pytest.raises(BadModel, match="damaged or cut off"):
        start(directory)
    file.unlink()
    with pytest.raises(BadModel, match=f"{ADAPTER_WEIGHTS} is missing"):
        start(directory)
    file.write_bytes(content)
    matrices = load_file(file)
    name = next(iter(matrices))
    for changed in (
        {name: matrices[name]},
        {name.replace("layers.", "layers.9"): matrices[name]},
        matrices | {name: matrices[name][:, :1].contiguous()},
        {"base_model.model.lm_head.weight": matrices[name]},
    ):
        save_file(changed, file)
        with pytest.raises(BadModel, match=ADAPTER_WEIGHTS):
            start(directory)


def test_an_adapter_is_part_of_the_revision(directory: Path) -> None:
    before = open_checkpoint(directory).model_info(model_id="tiny", dtype=DType.F32)
    configure(directory, lora_alpha=ALPHA + 1)
    assert open_checkpoint(directory).model_info(model_id="tiny", dtype=DType.F32) != before


def test_logits_are_scaled_as_in_granite(whole: Path) -> None:
    adapter: Any = start(whole)._adapter
    hidden = torch.randn(2, 64)
    assert torch.allclose(adapter.logits(hidden), adapter._model.lm_head(hidden) / 2.0)
