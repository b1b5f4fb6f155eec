"""Qwen2-Audio: one padded window per clip; its tower looks away from the padding, and its rows are left out."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.masking_utils import create_bidirectional_mask

from triptych.domain.media import MediaInfo
from triptych.engine.checkpoint import Checkpoint
from triptych.engine.families.halves import Features
from triptych.engine.families.listening import WhisperListener


class Qwen2AudioEncoder:
    def __init__(self, model: PreTrainedModel, checkpoint: Checkpoint) -> None:
        self._model: Any = model
        self._listener = WhisperListener(checkpoint.files)

    @property
    def settings(self) -> Mapping[str, Any]:
        return self._listener.settings

    def prepare(self, media: bytes, info: MediaInfo) -> Features:
        heard = self._listener.hear(media, info, padding="max_length", return_attention_mask=True)
        return {"input_features": heard["input_features"], "frames": heard["attention_mask"].sum()}

    def encode(self, batch: Sequence[Features]) -> list[tuple[torch.Tensor, ...]]:
        """As ``Qwen2AudioModel.forward`` does, which has no function for this part of it."""
        tower: Any = self._model.model.audio_tower
        spectra = torch.stack([features["input_features"] for features in batch])
        spectra = spectra.to(device=self._model.device, dtype=self._model.dtype)
        frames = torch.stack([features["frames"] for features in batch]).to(self._model.device)
        positions, rows = tower._get_feat_extract_output_lengths(frames)  # noqa: SLF001 - as the model itself asks it
        seen = torch.arange(tower.config.max_source_positions, device=frames.device) < positions[:, None]
        mask = create_bidirectional_mask(
            config=tower.config, inputs_embeds=spectra.new_zeros(*seen.shape, 1), attention_mask=seen.long()
        )
        hidden = tower(spectra, attention_mask=mask).last_hidden_state
        embeds = self._model.model.multi_modal_projector(hidden)
        return [(embeds[index, :count],) for index, count in enumerate(rows.tolist())]
