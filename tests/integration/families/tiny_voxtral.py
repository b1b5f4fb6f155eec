"""Voxtral: windows of one second, up to three.

Its processor builds prompts with mistral-common only, so this one uses the processor for clips and the tokenizer for
prompts.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.integration.families.clips import RATE_HZ, random_clip, samples_of
from tests.integration.families.harness import Item, TinyFamily, llama_sizes, tokenizer, transformers
from triptych.domain.media import Modality

FRAMES = 100
"""Of one window."""
TOKENS = 10
"""Of one window."""
AUDIO = "[AUDIO]"


@dataclass(frozen=True)
class _Processor:
    real: Any

    def apply_chat_template(self, *args: Any, **options: Any) -> Any:
        return self.real.tokenizer.apply_chat_template(*args, **options)


class TinyVoxtral(TinyFamily):
    name = "voxtral"
    seed = 1
    targets = ((Modality.AUDIO, "[BEGIN_AUDIO]" + AUDIO),)

    def processor(self) -> Any:
        extractor = transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=1)
        return transformers.VoxtralProcessor(extractor, self._tokenizer())

    def load_processor(self, directory: Path) -> Any:
        extractor = transformers.WhisperFeatureExtractor.from_pretrained(directory)
        text = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
        return _Processor(transformers.VoxtralProcessor(extractor, text))

    def model(self) -> Any:
        text = self._tokenizer()
        config = transformers.VoxtralConfig(
            audio_config={
                "num_mel_bins": 16,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "hidden_size": 32,
                "intermediate_size": FRAMES // 2 * 32 // TOKENS,
                "max_source_positions": FRAMES // 2,
                "initializer_range": 0.3,
            },
            text_config={"model_type": "llama", **llama_sizes(len(text), head_dim=16)},
            audio_token_id=text.convert_tokens_to_ids(AUDIO),
            initializer_range=0.25,
        )
        return transformers.VoxtralForConditionalGeneration(config)

    def item(self, rng: random.Random, modality: Modality) -> Item:
        assert modality is Modality.AUDIO
        rate_hz = rng.choice((RATE_HZ, RATE_HZ, 8_000, 22_050))
        return random_clip(rng, rng.randrange(rate_hz // 20, rate_hz * 5 // 2), rate_hz)

    def inputs(self, processor: Any, text: str, items: Sequence[Item]) -> Any:
        features = [
            processor.real._retrieve_input_features(
                [clip],
                max_source_positions=FRAMES,
                sampling_rate=RATE_HZ,
                padding=True,
                truncation=False,
                pad_to_multiple_of=RATE_HZ,
                return_tensors="pt",
            )
            for clip in samples_of(items)
        ]
        before, *after = text.split(AUDIO)
        runs = [AUDIO * TOKENS * len(windows) + rest for windows, rest in zip(features, after, strict=True)]
        inputs = processor.real.tokenizer(before + "".join(runs), return_tensors="pt", return_token_type_ids=False)
        if features:
            inputs["input_features"] = torch.cat(features)
        return inputs

    def _tokenizer(self) -> Any:
        text = tokenizer(AUDIO, "[BEGIN_AUDIO]")
        text.chat_template = self.template
        return text


TINIES = (TinyVoxtral(),)
