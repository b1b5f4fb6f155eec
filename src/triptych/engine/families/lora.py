"""A checkpoint's LoRA adapter, applied to selected rows of a pass."""

import re
from collections.abc import Mapping
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from triptych.engine.checkpoint import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from triptych.families.model_files import MAX_CONFIG_BYTES, BadModel
from triptych.files import read_json

_KEY = re.compile(r"\.layers\.(\d+)\.(.+)\.lora_([AB])(?:\.\w+)?\.weight$")
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "fan_in_fan_out": (False, None),
    "lora_bias": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": ([], None),
    "layer_replication": ([], None),
}
"""Required values of optional fields in the adapter's configuration: plain LoRA without variants."""


class _Rows:
    """The rows of the current pass that use the adapter: [rows, 1] of 0 and 1; None for none."""

    taking: torch.Tensor | None = None


class _Adapted(nn.Module):
    """A linear layer plus a low-rank product."""

    def __init__(self, base: nn.Module, down: torch.Tensor, up: torch.Tensor, rows: _Rows) -> None:
        super().__init__()
        self.base, self._rows = base, rows
        self.down, self.up = nn.Buffer(down, persistent=False), nn.Buffer(up, persistent=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.base(hidden)
        if self._rows.taking is None:
            return output
        return output + linear(linear(hidden, self.down), self.up) * self._rows.taking


class Lora:
    """The adapter of a model directory, applied to the layers of a decoder."""

    def __init__(self, decoder: PreTrainedModel, directory: Path) -> None:
        """Raises BadModel for a damaged or unsupported adapter."""
        self._rows = _Rows()
        scale = _scale(directory / ADAPTER_CONFIG)
        for (layer, path), parts in _parts(directory / ADAPTER_WEIGHTS).items():
            misfit = BadModel(f"{ADAPTER_WEIGHTS} does not fit {path} of layer {layer}")
            parent, _, name = path.rpartition(".")
            layers: Any = decoder.layers
            try:
                holder = layers[layer].get_submodule(parent)
                base = getattr(holder, name)
                down, up = (parts[part].to(base.weight) for part in "AB")
            except (IndexError, AttributeError, KeyError):
                raise misfit from None
            if down.ndim != 2 or up.shape != (len(base.weight), len(down)) or down.shape[1:] != base.weight.shape[1:]:
                raise misfit
            setattr(holder, name, _Adapted(base, down, up * scale, self._rows))

    def take(self, rows: torch.Tensor | None) -> None:
        """Select the rows that use the adapter: [rows] of 0 and 1 in the model's dtype; None for none."""
        self._rows.taking = None if rows is None else rows[:, None]


def _scale(file: Path) -> float:
    try:
        config: dict[str, Any] = read_json(file, MAX_CONFIG_BYTES)
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
    except (ValueError, KeyError, TypeError, OverflowError):
        raise BadModel(f"{file.name} is missing, or does not describe a LoRA adapter") from None
    for name, plain in _PLAIN.items():
        if name in config and config[name] not in plain:
            raise BadModel(f"{file.name}: {name} is {config[name]!r}, which is not supported")
    if rank < 1:
        raise BadModel(f"{file.name}: r is {rank}, not a positive integer")
    return alpha / (sqrt(rank) if config.get("use_rslora") else rank)


def _parts(file: Path) -> dict[tuple[int, str], dict[str, torch.Tensor]]:
    """The two matrices of each adapted module, by layer and the module's path within it."""
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError):
        raise BadModel(f"{file.name} is missing or damaged") from None
    parts: dict[tuple[int, str], dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        match = _KEY.search(name)
        if match is None:
            raise BadModel(f"{file.name} has a tensor of another kind: {name}")
        parts.setdefault((int(match[1]), match[2]), {})[match[3]] = tensor
    return parts
