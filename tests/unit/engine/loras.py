"""LoRA adapters in peft's form, with random matrices, and the models that they are merged into."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.unit.engine.tiny import Reference
from triptych.engine.checkpoint import ADAPTER_CONFIG, ADAPTER_WEIGHTS

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PREFIX = "base_model.model.model.language_model."
VISION = "base_model.model.model.vision_tower."


def make_lora(
    directory: Path,
    decoder: Any,
    *,
    seed: int,
    rank: int = 4,
    targets: Sequence[str] = ALL,
    strength: float = 0.5,
    encoders: Mapping[str, Any] = MappingProxyType({}),
    **config: Any,
) -> Path:
    """Save an adapter of ``targets`` in every layer, which changes answers. ``encoders``: further parts by the prefix of their names.
    ``config``: further fields of its configuration.
    """
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for prefix, part in {PREFIX: decoder, **encoders}.items():
        for path, module in part.named_modules():
            if path.rpartition(".")[2] in targets:
                outputs, inputs = module.weight.shape
                tensors[f"{prefix}{path}.lora_A.weight"] = torch.randn(rank, inputs, generator=random) * inputs**-0.5
                tensors[f"{prefix}{path}.lora_B.weight"] = torch.randn(outputs, rank, generator=random) * strength
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / ADAPTER_WEIGHTS)
    given = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(targets), "bias": "none"}
    (directory / ADAPTER_CONFIG).write_text(json.dumps(given | config))
    return directory


def merged(model_dir: Path, lora: Path) -> Reference:
    """The whole model, with the adapter merged into it."""
    reference = Reference(model_dir)
    merge(reference.model, lora)
    return reference


def merge(model: Any, lora: Path) -> None:
    """Add the products of the adapter's matrices to the weights of a whole model."""
    config = json.loads((lora / ADAPTER_CONFIG).read_text())
    scale = config["lora_alpha"] / (config["r"] ** 0.5 if config.get("use_rslora") else config["r"])
    tensors = load_file(lora / ADAPTER_WEIGHTS)
    for name, down in tensors.items():
        if ".lora_A." in name:
            path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            weight = model.get_submodule(path).weight
            weight.data += scale * tensors[name.replace("lora_A", "lora_B")] @ down
