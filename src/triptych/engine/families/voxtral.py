"""Voxtral: windows of a clip, encoded independently once their spectra are computed."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from triptych.domain.media import Shard
from triptych.engine.checkpoint import Checkpoint
from triptych.engine.families.adapters import Features
from triptych.engine.families.audio_features import WhisperFeatures
from triptych.engine.media.item import MediaItem
from triptych.families.model_files import BadModel
from triptych.families.voxtral import Voxtral

_WINDOWS_PER_PASS = 8
"""Bounds the memory for an hour of audio."""


class VoxtralEncoder:
    def __init__(self, model: PreTrainedModel, checkpoint: Checkpoint) -> None:
        if not isinstance(checkpoint.family, Voxtral):
            raise BadModel(f"{checkpoint.family.model_type} is not Voxtral")
        self._model: Any = model
        self._family = checkpoint.family
        self._extractor = WhisperFeatures(checkpoint.files)

    @property
    def settings(self) -> Mapping[str, Any]:
        return self._extractor.settings

    def prepare(self, item: MediaItem) -> Features:
        """Prepare one spectrum over the whole clip, whose maximum normalizes all of it, then cut it into windows."""
        window = self._family.window
        features = self._extractor.extract(item, padding=True, truncation=False, pad_to_multiple_of=window.samples)
        spectrum = features["input_features"]
        frames = window.samples // window.hop
        return {"input_features": spectrum.reshape(len(spectrum), -1, frames).transpose(0, 1).contiguous()}

    def prepare_shard(self, item: MediaItem, shard: Shard) -> Features:
        """A unit is a window."""
        windows = self.prepare(item)["input_features"]
        return {"input_features": windows[shard.first : shard.first + shard.count].clone()}

    def encode(self, batch: Sequence[Features]) -> list[tuple[torch.Tensor, ...]]:
        windows = torch.cat([features["input_features"] for features in batch])
        windows = windows.to(device=self._model.device, dtype=self._model.dtype)
        embeds = torch.cat(
            [
                self._model.get_audio_features(part, return_dict=True).pooler_output
                for part in torch.split(windows, _WINDOWS_PER_PASS)
            ]
        )
        counts = [len(features["input_features"]) * self._family.tokens_per_window for features in batch]
        return [(part,) for part in torch.split(embeds, counts)]
