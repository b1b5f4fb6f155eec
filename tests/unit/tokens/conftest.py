"""Two tiny LLaVA model directories, written by transformers: one byte-level, one in LLaMA's sentencepiece style."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

_fast_tokenizer: Any = PreTrainedTokenizerFast  # transformers leaves these untyped
_processor: Any = LlavaProcessor
SIDE_PX, PATCH_PX = 28, 14

PARTS_OR_STRINGS = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}{% if c.type == 'image' %}<image>\n{% else %}{{ c.text }}{% endif %}{% endfor %}"
    "{% endif %}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# As published with LLaVA 1.5: images first, role names in capitals, and a tag used in training only.
LLAVA_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] != 'system' %}{{ message['role'].upper() + ': '}}{% endif %}"
    "{# Render all images first #}{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}"
    "{{ '<image>\n' }}{% endfor %}{# Render all text next #}{% if message['role'] != 'assistant' %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] + ' '}}"
    "{% endfor %}{% else %}{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{% generation %}{{ content['text'] + ' '}}{% endgeneration %}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)


def _byte_level() -> Any:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<pad>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<image>"]
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["the digits of the image are seven, four and the other: Ünïcödé 数字"] * 4, trainer)
    names = {"pad_token": "<pad>", "eos_token": "<|end|>"}
    return _fast_tokenizer(tokenizer_object=backend, extra_special_tokens=special[2:], **names)


def _llama_style() -> Any:
    """The pipeline of LLaVA 1.5's tokenizer: a space before every stretch of text, and byte fallback."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["▁", *"abcdefghijklmnopqrstuvwxyzASINTUER:.?", "th", "the", "▁the", "▁a", "in", "an", "▁▁"]
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "a"), ("i", "n"), ("a", "n"), ("▁", "▁")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocabulary, merges, fuse_unk=True, byte_fallback=True))
    backend.model.unk_token = tokens[0]
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", left=1)]
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    return _fast_tokenizer(tokenizer_object=backend, extra_special_tokens=["<image>"], **names)


def _write(directory: Path, tokenizer: Any, template: str) -> Path:
    side = {"height": SIDE_PX, "width": SIDE_PX}
    _processor(
        CLIPImageProcessorPil(size={"shortest_edge": SIDE_PX}, crop_size=side),
        tokenizer,
        patch_size=PATCH_PX,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=template,
    ).save_pretrained(directory)
    LlavaConfig(
        vision_config=CLIPVisionConfig(
            hidden_size=32, num_attention_heads=2, image_size=SIDE_PX, patch_size=PATCH_PX, num_hidden_layers=1
        ),
        text_config=LlamaConfig(
            hidden_size=32, num_attention_heads=2, vocab_size=len(tokenizer), max_position_embeddings=512
        ),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
    ).save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def byte_level_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _write(tmp_path_factory.mktemp("byte_level"), _byte_level(), PARTS_OR_STRINGS)


@pytest.fixture(scope="session")
def llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = _write(tmp_path_factory.mktemp("llama"), _llama_style(), LLAVA_TEMPLATE)
    _edit(directory / "tokenizer_config.json", tokenizer_class="LlamaTokenizer", add_bos_token=True, legacy=False)
    return directory


@pytest.fixture(scope="session", params=["byte_level", "llama"])
def model_dir(request: pytest.FixtureRequest, byte_level_dir: Path, llama_dir: Path) -> Path:
    return byte_level_dir if request.param == "byte_level" else llama_dir


@pytest.fixture
def edit_json(tmp_path: Path) -> Callable[..., Path]:
    """Copies a model directory with one of its JSON files changed."""

    def edit(source: Path, name: str, **changes: object) -> Path:
        for path in source.iterdir():
            (tmp_path / path.name).write_bytes(path.read_bytes())
        _edit(tmp_path / name, **changes)
        return tmp_path

    return edit


def _edit(path: Path, **changes: object) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | changes))
