"""Qwen2-Audio: one padded window per clip; the encoder masks the padding, whose rows are dropped."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.masking_utils import create_bidirectional_mask

from triptych.engine.checkpoint import Checkpoint
from triptych.engine.families.adapters import Features
from triptych.engine.families.audio_features import WhisperFeatures
from triptych.engine.media.item import MediaItem


class Qwen2AudioEncoder:
    def __init__(self, model: PreTrainedModel, checkpoint: Checkpoint) -> None:
        self._model: Any = model
        self._extractor = WhisperFeatures(checkpoint.files)

    @property
    def settings(self) -> Mapping[str, Any]:
        return self._extractor.settings

    def prepare(self, item: MediaItem) -> Features:
        features = self._extractor.extract(item, padding="max_length", return_attention_mask=True)
        return {"input_features": features["input_features"], "frames": features["attention_mask"].sum()}

    def encode(self, batch: Sequence[Features]) -> list[tuple[torch.Tensor, ...]]:
        """Encode like ``Qwen2AudioModel.forward``, which has no separate function for it."""
        encoder: Any = self._model.model.audio_tower
        spectra = torch.stack([features["input_features"] for features in batch])
        spectra = spectra.to(device=self._model.device, dtype=self._model.dtype)
        frames = torch.stack([features["frames"] for features in batch]).to(self._model.device)
        positions, rows = encoder._get_feat_extract_output_lengths(frames)  # noqa: SLF001 - as the model itself does
        seen = torch.arange(encoder.config.max_source_positions, device=frames.device) < positions[:, None]
        mask = create_bidirectional_mask(
            config=encoder.config, inputs_embeds=spectra.new_zeros(*seen.shape, 1), attention_mask=seen.long()
        )
        hidden = encoder(spectra, attention_mask=mask).last_hidden_state
        embeds = self._model.model.multi_modal_projector(hidden)
        return [(embeds[index, :count],) for index, count in enumerate(rows.tolist())]
