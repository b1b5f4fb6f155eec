"""Qwen2-Audio: a window of one second, with shorter and longer clips."""

import random
from collections.abc import Sequence
from typing import Any

from tests.integration.families.clips import RATE_HZ, random_clip, samples_of
from tests.integration.families.harness import Item, TinyFamily, llama_sizes, tokenizer, transformers
from triptych.domain.media import Modality


class TinyQwen2Audio(TinyFamily):
    name = "qwen2_audio"
    seed = 3
    window_s = 1
    targets = ((Modality.AUDIO, "<|audio_bos|><|AUDIO|><|audio_eos|>"),)

    def processor(self) -> Any:
        extractor = transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=self.window_s)
        return transformers.Qwen2AudioProcessor(extractor, self._tokenizer(), chat_template=self.template)

    def model(self) -> Any:
        text = self._tokenizer()
        config = transformers.Qwen2AudioConfig(
            audio_config={
                "model_type": "qwen2_audio_encoder",
                "num_mel_bins": 16,
                "encoder_layers": 2,
                "encoder_attention_heads": 2,
                "encoder_ffn_dim": 48,
                "d_model": 32,
                "max_source_positions": 50 * self.window_s,
                "initializer_range": 0.3,
            },
            text_config={"model_type": "qwen2", **llama_sizes(len(text), **self.text)},
            audio_token_id=text.convert_tokens_to_ids("<|AUDIO|>"),
            initializer_range=0.25,
        )
        return transformers.Qwen2AudioForConditionalGeneration(config)

    def item(self, rng: random.Random, modality: Modality) -> Item:
        assert modality is Modality.AUDIO
        rate_hz = rng.choice((RATE_HZ, RATE_HZ, 8_000, 22_050))
        return random_clip(rng, rng.randrange(rate_hz // 20, rate_hz * 5 // 4), rate_hz)

    def inputs(self, processor: Any, text: str, items: Sequence[Item]) -> Any:
        audio = samples_of(items) or None
        return processor(text=text, audio=audio, sampling_rate=RATE_HZ, return_tensors="pt")

    @staticmethod
    def _tokenizer() -> Any:
        return tokenizer("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")


TINIES = (TinyQwen2Audio(),)
