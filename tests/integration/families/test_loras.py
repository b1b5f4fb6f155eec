"""LoRA adapters of the encoders of every family: embeddings are those of the model that the adapter is merged into."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as untyped_transformers
from safetensors.torch import save_file
from torch import nn

from tests.integration.families.conftest import usual_families
from tests.integration.families.harness import Case, items_of
from tests.unit.engine.loras import merge
from tests.unit.engine.tiny import encoder_engine, text_engine
from triptych.domain.embedding import Tensor
from triptych.engine.checkpoint import ADAPTER_CONFIG, ADAPTER_WEIGHTS, open_checkpoint
from triptych.engine.weight_loading import base_of, encoder_names

pytestmark = pytest.mark.timeout(180)

RANK = 3


def whole_of(case: Case) -> Any:
    cls = getattr(untyped_transformers, open_checkpoint(case.directory).architecture)
    return cls.from_pretrained(case.directory, dtype=torch.float32)


def make_adapter(directory: Path, whole: Any) -> None:
    """Save an adapter of every linear layer that encodes."""
    base, random, tensors = base_of(whole), torch.Generator().manual_seed(1), {}
    within = "base_model.model." if base is whole else "base_model.model.model."
    for path, module in base.named_modules():
        if path.partition(".")[0] in encoder_names(base) and type(module) is nn.Linear:
            outputs, inputs = module.weight.shape
            tensors[f"{within}{path}.lora_A.weight"] = torch.randn(RANK, inputs, generator=random) * inputs**-0.5
            tensors[f"{within}{path}.lora_B.weight"] = torch.randn(outputs, RANK, generator=random) * 0.1
    directory.mkdir()
    save_file(tensors, directory / ADAPTER_WEIGHTS)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ".*"}
    (directory / ADAPTER_CONFIG).write_text(json.dumps(config))


def values(tensors: tuple[Tensor, ...]) -> torch.Tensor:
    """Those of the first tensor."""
    return torch.frombuffer(bytearray(tensors[0].data), dtype=torch.float32)


@usual_families
def test_items_of_a_batch_are_encoded_with_their_own_adapters_as_by_the_merged_model(
    case: Case, tmp_path: Path
) -> None:
    whole = whole_of(case)
    make_adapter(tmp_path / "lora", whole)
    merge(whole, tmp_path / "lora")
    shutil.copytree(case.directory, tmp_path / "merged")
    whole.save_pretrained(tmp_path / "merged")
    engine = encoder_engine(case.directory)
    assert engine.loras is not None
    files = engine.loras.read(tmp_path / "lora")
    of_text = text_engine(case.directory, kv_cache_bytes=1 << 22, token_budget=512).loras.read(tmp_path / "lora")
    assert (of_text.digest, of_text.encodes, of_text.parts) == (files.digest, True, {})
    engine.loras.add(files)
    items = [item for seed in range(2) for item in items_of(case.question(seed, 2))]
    infos = [item.info.with_lora(files.digest) if number % 2 else item.info for number, item in enumerate(items)]
    found = engine.encode([engine.prepare(item.media, info) for item, info in zip(items, infos, strict=True)])
    expected = encoder_engine(tmp_path / "merged")
    plain = encoder_engine(case.directory)
    for number, (item, tensors) in enumerate(zip(items, found, strict=True)):
        prepared = plain.prepare(item.media, item.info)
        with_adapter, without = (values(*encoder.encode([prepared])) for encoder in (expected, plain))
        wanted, other = (with_adapter, without) if number % 2 else (without, with_adapter)
        scale = wanted.abs().max()
        assert (values(tensors) - wanted).abs().max() < 1e-3 * scale
        assert (values(tensors) - other).abs().max() > 1e-2 * scale
    engine.loras.remove(files.digest)
    assert engine.loras.nbytes == 0
