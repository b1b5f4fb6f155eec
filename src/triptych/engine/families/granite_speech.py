"""Granite Speech: a conformer over the whole clip; prompts with audio use a LoRA adapter."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.audio_utils import mel_filter_bank

from triptych.engine.checkpoint import ADAPTER_CONFIG, Checkpoint
from triptych.engine.families.adapters import Features, ForwardPart
from triptych.engine.families.plain import PlainDecoder
from triptych.engine.lora import LoraLayers, LoraRows, read_lora
from triptych.engine.media.item import MediaItem
from triptych.families.fields import integer
from triptych.families.granite_speech import EXTRACTOR_DEFAULTS
from triptych.families.model_files import BadModel


class GraniteSpeechEncoder:
    def __init__(self, model: PreTrainedModel, checkpoint: Checkpoint) -> None:
        self._model: Any = model
        settings = {**EXTRACTOR_DEFAULTS, **checkpoint.files.feature_extractor}
        self._settings = {name: integer(settings, name) for name in EXTRACTOR_DEFAULTS}
        rate, transform = self._settings["sampling_rate"], self._settings["n_fft"]
        filters = mel_filter_bank(
            num_frequency_bins=transform // 2 + 1,
            num_mel_filters=self._settings["n_mels"],
            min_frequency=0.0,
            max_frequency=rate / 2,
            sampling_rate=rate,
            norm=None,
            mel_scale="htk",
        )
        self._filters = torch.from_numpy(filters).to(torch.float32)

    @property
    def settings(self) -> Mapping[str, Any]:
        return self._settings

    def prepare(self, item: MediaItem) -> Features:
        """Prepare a clip like ``GraniteSpeechFeatureExtractor``, without torchaudio: two log-mel spectra side by side
        per frame.
        """
        samples = torch.from_numpy(item.samples(self._settings["sampling_rate"]))
        width = self._settings["win_length"]
        spectrum = torch.stft(
            samples,
            self._settings["n_fft"],
            self._settings["hop_length"],
            width,
            window=torch.hann_window(width),
            return_complex=True,
        )
        mel = (self._filters.T @ spectrum.abs().square()).T.clip(min=1e-10).log10()
        mel = torch.maximum(mel, mel.max() - 8.0) / 4 + 1
        return {"input_features": mel[: len(mel) // 2 * 2].reshape(-1, 2 * mel.shape[1])}

    def encode(self, batch: Sequence[Features]) -> list[tuple[torch.Tensor, ...]]:
        """Clip by clip: in a batch of mixed lengths the conformer would attend to padding."""
        encoded: list[tuple[torch.Tensor, ...]] = []
        for features in batch:
            frames = features["input_features"][None].to(device=self._model.device, dtype=self._model.dtype)
            encoded.append((self._model.get_audio_features(frames, return_dict=True).pooler_output[0],))
        return encoded


class GraniteSpeechDecoder(PlainDecoder):
    """Prompts with audio use the checkpoint's LoRA adapter for all their tokens; others do not."""

    def __init__(self, model: PreTrainedModel, checkpoint: Checkpoint) -> None:
        super().__init__(model, checkpoint)
        self._logits_scaling = float(self._model.config.text_config.logits_scaling)
        self._lora: LoraLayers | None = None
        if (checkpoint.directory / ADAPTER_CONFIG).is_file():
            self._lora = LoraLayers(self.decoder)
            weights = read_lora(checkpoint.directory, self.decoder)
            self._lora.add(weights)
            self._digest = weights.digest
        elif self._model.config.has_lora_adapter:
            raise BadModel(f"config.json says has_lora_adapter, and {ADAPTER_CONFIG} is missing")

    @property
    def looks_ahead(self) -> bool:
        return self._lora is not None

    @property
    def supports_cuda_graphs(self) -> bool:
        """False with an adapter, since the rows it applies to change from pass to pass."""
        return self._lora is None

    def inputs(self, parts: Sequence[ForwardPart], rows: int) -> Mapping[str, Any]:
        if self._lora is not None:
            with_audio = [LoraRows(self._digest, part.row, part.count) for part in parts if part.plan.rows]
            self._lora.take(with_audio, rows, self._model.device)
        return {}

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits with Granite's scaling, which transformers omits here; it changes no greedy answer."""
        return super().logits(hidden) / self._logits_scaling
