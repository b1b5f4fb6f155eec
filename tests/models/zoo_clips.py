"""Tiny models of types that hear."""

from typing import Any

from tests.integration.families.tiny_granite_speech import provide_torchaudio
from tests.models.zoo import ZooModel, decoder, vision
from triptych.domain.media import Modality

provide_torchaudio()  # for Granite Speech's feature extractor
MEL = {"feature_size": 16}

QWEN3_ASR = ZooModel(
    name="qwen3_asr",
    seed=1,
    modality=Modality.AUDIO,
    target="<|audio_start|><|audio_pad|><|audio_end|>",
    processor_name="Qwen3ASRProcessor",
    parts={"feature_extractor": ("Qwen3ASRFeatureExtractor", MEL)},
    named={"audio_token": "<|audio_pad|>", "audio_bos_token": "<|audio_start|>", "audio_eos_token": "<|audio_end|>"},
    config={
        "audio_config": {
            "num_mel_bins": 16,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 48,
            "d_model": 32,
            "n_window_infer": 100,
            "output_dim": 64,
            "downsample_hidden_size": 8,
        },
        "text_config": decoder("qwen3", head_dim=16, tie_word_embeddings=True),
        "audio_token_id": "<|audio_pad|>",
        "timestamp_token_id": 5,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": True,
    },
    most_items=1,
)

GLMASR = ZooModel(
    name="glmasr",
    seed=4,
    modality=Modality.AUDIO,
    target="<|begin_of_audio|><|pad|><|end_of_audio|>",
    processor_name="GlmAsrProcessor",
    parts={"feature_extractor": ("WhisperFeatureExtractor", MEL | {"chunk_length": 2})},
    special=("<|pad|>", "<|begin_of_audio|>", "<|end_of_audio|>"),
    config={
        "audio_config": {
            "num_mel_bins": 16,
            "hidden_size": 32,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "max_position_embeddings": 100,
        },
        "text_config": decoder("llama"),
        "audio_token_id": "<|pad|>",
        "tie_word_embeddings": False,
    },
    most_items=1,
)

MOSS_TRANSCRIBE_DIARIZE = ZooModel(
    name="moss_transcribe_diarize",
    seed=1,
    modality=Modality.AUDIO,
    target="<|audio_start|><|audio_pad|><|audio_end|>",
    processor_name="MossTranscribeDiarizeProcessor",
    parts={"feature_extractor": ("MossTranscribeDiarizeFeatureExtractor", MEL | {"chunk_length": 2})},
    special=("<|audio_start|>", "<|audio_pad|>", "<|audio_end|>"),
    config={
        "audio_config": {
            "num_mel_bins": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 48,
            "hidden_size": 32,
            "max_source_positions": 100,
        },
        "text_config": decoder("qwen3", head_dim=16, tie_word_embeddings=True),
        "audio_token_id": "<|audio_pad|>",
        "audio_chunk_size": 32_000,
        "tie_word_embeddings": True,
    },
)

GRANITE_SPEECH_PLUS = ZooModel(
    name="granite_speech_plus",
    seed=3,
    modality=Modality.AUDIO,
    target="<|audio|>",
    processor_name="GraniteSpeechProcessor",
    parts={"audio_processor": ("GraniteSpeechFeatureExtractor", {})},
    special=("<|audio|>",),
    config={
        "text_config": decoder("granite", logits_scaling=2.0, tie_word_embeddings=True),
        "encoder_config": {
            "num_layers": 2,
            "hidden_dim": 32,
            "feedforward_mult": 2,
            "num_heads": 2,
            "dim_head": 16,
            "output_dim": 16,
            "context_size": 12,
            "max_pos_emb": 32,
            "cat_hidden_layers": [1],
        },
        "projector_config": vision(
            "blip_2_qformer",
            num_hidden_layers=1,
            encoder_hidden_size=64,
            cross_attention_frequency=1,
            max_position_embeddings=64,
            vocab_size=8,
        ),
        "audio_token_index": "<|audio|>",
        "has_lora_adapter": False,
        "tie_word_embeddings": True,
    },
    most_items=1,  # transformers lets a clip attend to the padding that a longer one asks for
)


def without_noise(whole: Any) -> None:
    """VibeVoice adds noise to what it hears, except where it is asked not to."""
    heard = whole.model.get_audio_features
    whole.model.get_audio_features = lambda *args, **options: heard(*args, **options | {"sample": False})


CODEC = {"num_filters": 2, "depths": [1] * 7, "ffn_expansion": 2}

VIBEVOICE_ASR = ZooModel(
    name="vibevoice_asr",
    seed=1,
    modality=Modality.AUDIO,
    rate_hz=24_000,
    target="<|object_ref_start|><|box_start|><|object_ref_end|>\nThis is a <|AUDIO_DURATION|> seconds audio.",
    processor_name="VibeVoiceAsrProcessor",
    parts={"feature_extractor": ("VibeVoiceAcousticTokenizerFeatureExtractor", {})},
    special=("<|object_ref_start|>", "<|box_start|>", "<|object_ref_end|>"),
    config={
        "acoustic_tokenizer_encoder_config": CODEC | {"hidden_size": 16},
        "semantic_tokenizer_encoder_config": CODEC | {"hidden_size": 32},
        "text_config": decoder("qwen2"),
        "audio_token_id": "<|box_start|>",
        "audio_bos_token_id": "<|object_ref_start|>",
        "audio_eos_token_id": "<|object_ref_end|>",
        "acoustic_tokenizer_chunk_size": 64_000,
    },
    adapt=without_noise,
)

ZOO = (
    QWEN3_ASR,
    GLMASR,
    MOSS_TRANSCRIBE_DIARIZE,
    GRANITE_SPEECH_PLUS,
    VIBEVOICE_ASR,
)
