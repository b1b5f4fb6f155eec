"""Granite Speech with its LoRA adapter, which is active for prompts with audio.

Its feature extractor needs one transform of torchaudio; where that is not installed, this one replaces it.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn.utils.rnn import pad_sequence
from transformers.models.granite_speech import feature_extraction_granite_speech as extraction
from transformers.utils.import_utils import is_torchaudio_available

from tests.integration.families.clips import RATE_HZ, random_clip, samples_of
from tests.integration.families.harness import Item, TinyFamily, llama_sizes, tokenizer, transformers
from triptych.domain.media import Modality

RANK, ALPHA = 4, 8


class MelSpectrogram(torch.nn.Module):
    """torchaudio's transform as documented, with the defaults that the extractor uses."""

    def __init__(self, sample_rate: int, n_fft: int, win_length: int, hop_length: int, n_mels: int) -> None:
        super().__init__()
        self._sizes = n_fft, hop_length, win_length
        frequencies = torch.linspace(0, sample_rate // 2, n_fft // 2 + 1)
        top = 2595 * torch.log10(torch.tensor(1 + sample_rate / 2 / 700))
        points = 700 * (10 ** (torch.linspace(0, float(top), n_mels + 2) / 2595) - 1)
        width = points.diff()
        slopes = points[None] - frequencies[:, None]
        rising, falling = -slopes[:, :-2] / width[:-1], slopes[:, 2:] / width[1:]
        self._filters = torch.minimum(rising, falling).clip(min=0)

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        window = torch.hann_window(self._sizes[2])
        spectrum = torch.stft(samples, *self._sizes, window=window, return_complex=True).abs() ** 2
        return (spectrum.transpose(-1, -2) @ self._filters).transpose(-1, -2)


def provide_torchaudio() -> None:
    if not is_torchaudio_available():
        module: Any = extraction
        module.torchaudio = SimpleNamespace(transforms=SimpleNamespace(MelSpectrogram=MelSpectrogram))
        module.requires_backends = lambda *_: None


class TinyGraniteSpeech(TinyFamily):
    name = "granite_speech"
    seed = 4
    """The seed of weights whose answers have no placeholder: transformers embeds a generated one as token 0, which nothing is trained for."""
    targets = ((Modality.AUDIO, "<|audio|>"),)
    heard: Sequence[torch.Tensor] = ()
    """Of the last question, what the extractor makes of each clip by itself."""
    adapter: Path

    def processor(self) -> Any:
        provide_torchaudio()
        extractor = transformers.GraniteSpeechFeatureExtractor()
        return transformers.GraniteSpeechProcessor(extractor, self._tokenizer(), chat_template=self.template)

    def model(self) -> Any:
        text = self._tokenizer()
        config = transformers.GraniteSpeechConfig(
            text_config={"model_type": "granite", **llama_sizes(len(text)), "logits_scaling": 2.0},
            encoder_config={
                "num_layers": 2,
                "hidden_dim": 32,
                "feedforward_mult": 2,
                "num_heads": 2,
                "dim_head": 16,
                "output_dim": 16,
                "context_size": 12,
                "max_pos_emb": 32,
                "initializer_range": 0.3,
            },
            projector_config={
                "model_type": "blip_2_qformer",
                "hidden_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "intermediate_size": 48,
                "encoder_hidden_size": 32,
                "cross_attention_frequency": 1,
                "max_position_embeddings": 64,
                "initializer_range": 0.3,
            },
            audio_token_index=text.convert_tokens_to_ids("<|audio|>"),
            initializer_range=0.25,
            tie_word_embeddings=False,
        )
        return transformers.GraniteSpeechForConditionalGeneration(config)

    def make(self, directory: Path) -> None:
        super().make(directory)
        self.adapter = directory / "adapter_model.safetensors"
        config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none", "target_modules": ["q_proj"]}
        (directory / "adapter_config.json").write_text(json.dumps(config))
        sizes = {"q_proj": (64, 64), "v_proj": (64, 32)}
        matrices = {}
        for layer in range(3):
            for name, (taken, made) in sizes.items():
                key = f"base_model.model.model.language_model.layers.{layer}.self_attn.{name}"
                matrices[f"{key}.lora_A.weight"] = torch.randn(RANK, taken) * 0.2
                matrices[f"{key}.lora_B.weight"] = torch.randn(made, RANK) * 0.2
        save_file(matrices, self.adapter)

    def item(self, rng: random.Random, modality: Modality) -> Item:
        assert modality is Modality.AUDIO
        rate_hz = rng.choice((RATE_HZ, RATE_HZ, 8_000, 22_050))
        return random_clip(rng, rng.randrange(rate_hz // 20, rate_hz * 2), rate_hz)

    def inputs(self, processor: Any, text: str, items: Sequence[Item]) -> Any:
        clips = samples_of(items)
        self.heard = [processor.audio_processor(clip)["input_features"] for clip in clips]
        return processor(text=text, audio=clips or None, return_tensors="pt")

    def adjust(self, whole: Any) -> None:
        """Clips do not attend to each other's padding, and the adapter is active for prompts with audio."""
        extract, generate = whole.model.get_audio_features, whole.generate

        def encode_each(_: torch.Tensor, **options: Any) -> Any:
            embeds = [extract(features, **options).pooler_output[0] for features in self.heard]
            return SimpleNamespace(pooler_output=pad_sequence(embeds, batch_first=True))

        def adapted(**inputs: Any) -> Any:
            sign = 1 if "input_features" in inputs else 0
            self._add_adapter(whole, sign)
            try:
                return generate(**inputs)
            finally:
                self._add_adapter(whole, -sign)

        whole.model.get_audio_features, whole.generate = encode_each, adapted

    @torch.no_grad()
    def _add_adapter(self, whole: Any, sign: int) -> None:
        matrices = load_file(self.adapter)
        for name, up in matrices.items():
            if "lora_B" in name:
                path = name.removeprefix("base_model.model.").removesuffix(".lora_B.weight")
                down = matrices[name.replace("lora_B", "lora_A")]
                whole.get_submodule(path).weight += sign * (ALPHA / RANK) * up @ down

    @staticmethod
    def _tokenizer() -> Any:
        return tokenizer("<|audio|>")


TINIES = (TinyGraniteSpeech(),)
