"""Whisper: one clip per request, after what was said before it; its language and task follow."""

import random
from collections.abc import Sequence
from typing import Any, ClassVar

from tokenizers.processors import TemplateProcessing

from tests.integration.families.clips import RATE_HZ, random_clip, samples_of
from tests.integration.families.harness import EOS, Item, TinyFamily, random_text, tokenizer, transformers
from triptych.domain.media import Modality

_TOKENS = (
    "<|startofprev|>",
    "<|startoftranscript|>",
    "<|en|>",
    "<|fr|>",
    "<|de|>",
    "<|transcribe|>",
    "<|translate|>",
    "<|notimestamps|>",
)
_IDS = {token: len(tokenizer()) + at for at, token in enumerate(_TOKENS)}
"""At the end of the vocabulary: ``generate`` takes all tokens behind the last one for timestamps."""
_LETTERS = range(100, 200)


class TinyWhisper(TinyFamily):
    name = "whisper"
    seed = 3
    items = 1
    context = 448
    window_s = 10
    targets = ((Modality.AUDIO, "<|startoftranscript|>"),)
    prompt_name = "decoder_input_ids"
    generation: ClassVar = {
        "decoder_start_token_id": _IDS["<|startoftranscript|>"],
        "no_timestamps_token_id": _IDS["<|notimestamps|>"],
        "is_multilingual": True,
        "lang_to_id": {token: _IDS[token] for token in ("<|en|>", "<|fr|>", "<|de|>")},
        "task_to_id": {task: _IDS[f"<|{task}|>"] for task in ("transcribe", "translate")},
        "suppress_tokens": [*(_IDS.values()), *_LETTERS[::2]],
        "begin_suppress_tokens": [EOS, *_LETTERS[::3]],
    }

    def processor(self) -> Any:
        extractor = transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=self.window_s)
        return transformers.WhisperProcessor(extractor, self._tokenizer())

    def model(self) -> Any:
        config = transformers.WhisperConfig(
            vocab_size=len(self._tokenizer()),
            num_mel_bins=16,
            d_model=64,
            encoder_layers=2,
            encoder_attention_heads=2,
            encoder_ffn_dim=48,
            decoder_layers=3,
            decoder_attention_heads=4,
            decoder_ffn_dim=96,
            max_source_positions=50 * self.window_s,
            max_target_positions=self.context,
            init_std=0.25,
            pad_token_id=0,
            bos_token_id=EOS,
            eos_token_id=EOS,
            decoder_start_token_id=_IDS["<|startoftranscript|>"],
        )
        model = transformers.WhisperForConditionalGeneration(config)
        decoder = model.model.decoder
        decoder.embed_positions.weight.data.mul_(4.0)
        for layer in decoder.layers:  # or what is the same for all positions would choose the tokens
            layer.encoder_attn.out_proj.weight.data.mul_(0.25)
        return model

    def item(self, rng: random.Random, modality: Modality) -> Item:
        assert modality is Modality.AUDIO
        rate_hz = rng.choice((RATE_HZ, RATE_HZ, 8_000, 22_050))
        return random_clip(rng, rng.randrange(rate_hz // 20, rate_hz * self.window_s), rate_hz)

    def text_before(self, rng: random.Random) -> str:
        """Longer than a block of the KV cache, which what follows is not."""
        return " ".join(random_text(rng) for _ in range(5))

    def text_after(self, rng: random.Random) -> str:
        return rng.choice(("fr", "en transcribe", "de translate"))

    def other_ending(self, text: str) -> str:
        return "de" if text == "fr" else "fr"

    def prompt(self, processor: Any, content: list[dict[str, str]]) -> str:
        before, _, after = content
        language, _, task = after["text"].partition(" ")
        return (
            f"<|startofprev|> {before['text'].strip()}<|startoftranscript|>"
            f"<|{language}|><|{task or 'transcribe'}|><|notimestamps|>"
        )

    def inputs(self, processor: Any, text: str, items: Sequence[Item]) -> Any:
        features = processor.feature_extractor(samples_of(items), sampling_rate=RATE_HZ, return_tensors="pt")
        token_ids = processor.tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        return {"input_features": features["input_features"], self.prompt_name: token_ids}

    @staticmethod
    def _tokenizer() -> Any:
        """Like a published one, it puts tokens around a text unless asked not to."""
        text = tokenizer()
        text.add_special_tokens({"extra_special_tokens": list(_TOKENS)}, replace_extra_special_tokens=False)
        start = "<|startoftranscript|>"
        text.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{start} $A <end>", special_tokens=[(start, _IDS[start]), ("<end>", EOS)]
        )
        return text


TINIES = (TinyWhisper(),)
