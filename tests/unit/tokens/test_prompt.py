from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import LlavaProcessor

import triptych
from tests.examples import examples
from tests.unit.tokens.published_templates import TEMPLATES
from triptych.domain.chat import MediaPart, Message, SpeakerRole, TextPart
from triptych.domain.media import MediaInfo, Modality
from triptych.errors import ContextTooLong, InvalidRequest
from triptych.families.base import count_tokens
from triptych.families.model_files import BadModel, ModelFiles
from triptych.tokens.prompt import PromptBuilder

DEMO = Path(triptych.__file__).parent / "demo" / "model"
IMAGE = MediaPart(Modality.IMAGE, b"")


def info(width: int = 40, height: int = 30) -> MediaInfo:
    return MediaInfo(Modality.IMAGE, "png", width, height, 1, bytes(32))


def user(*parts: str | MediaPart, role: SpeakerRole = "user") -> Message:
    return Message(role, tuple(TextPart(part) if isinstance(part, str) else part for part in parts))


def images_of(messages: list[Message]) -> list[MediaInfo]:
    return [info() for message in messages for part in message.parts if isinstance(part, MediaPart)]


def reference(processor: Any, messages: list[Message]) -> list[int]:
    image = Image.new("RGB", (40, 30))
    conversation = [
        {
            "role": message.role,
            "content": [
                {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": "image", "image": image}
                for part in message.parts
            ],
        }
        for message in messages
    ]
    out = processor.apply_chat_template(conversation, tokenize=True, add_generation_prompt=True, return_dict=True)
    return [int(token_id) for token_id in out["input_ids"][0]]


@pytest.fixture(scope="module")
def builders(byte_level_dir: Path, llama_dir: Path) -> list[tuple[PromptBuilder, Any]]:
    directories = [byte_level_dir, llama_dir, *([DEMO] if (DEMO / "config.json").exists() else [])]
    return [
        (PromptBuilder.load(ModelFiles.load(path)), LlavaProcessor.from_pretrained(path, backend="pil"))
        for path in directories
    ]


@pytest.mark.parametrize("name", ["llava_next", "llava_onevision", "idefics3", "internvl", "qwen2_vl", "gemma3"])
def test_token_ids_equal_those_of_transformers_for_published_templates(
    name: str, byte_level_dir: Path, tmp_path: Path
) -> None:
    for path in byte_level_dir.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "chat_template.jinja").write_text(TEMPLATES[name])
    builder = PromptBuilder.load(ModelFiles.load(tmp_path))
    processor = LlavaProcessor.from_pretrained(tmp_path, backend="pil")
    for messages in (
        [user("why? Ünïcödé")],
        [
            user("Be brief.", role="system"),
            user(IMAGE, "the digits", IMAGE),
            user("four", role="assistant"),
            user(IMAGE),
        ],
    ):
        assert list(builder.build(messages, images_of(messages)).token_ids) == reference(processor, messages)


text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20).filter(lambda value: "<image>" not in value)
conversations = st.lists(
    st.builds(
        lambda parts, role: user(*parts, role=role),
        st.lists(text | st.just(IMAGE), min_size=1, max_size=4),
        st.sampled_from(["user", "assistant"]),
    ),
    min_size=1,
    max_size=4,
)


@given(messages=conversations)
@settings(max_examples=examples(60))
def test_token_ids_equal_those_of_transformers(
    builders: list[tuple[PromptBuilder, Any]], messages: list[Message]
) -> None:
    for builder, processor in builders:
        try:
            prompt = builder.build(messages, images_of(messages))
        except InvalidRequest:  # texts that form the placeholder only together
            assume(False)
        assert list(prompt.token_ids) == reference(processor, messages)
        for run in prompt.runs:
            assert set(prompt.token_ids[run.start : run.start + run.tokens]) == builder.family.placeholder_ids
        assert sum(run.tokens for run in prompt.runs) == sum(
            map(builder.family.placeholder_ids.__contains__, prompt.token_ids)
        )


@pytest.mark.parametrize("texts", [["an <image> here"], ["<ima", "ge>"], ["x", "<image><image>"]])
@pytest.mark.parametrize("images", [0, 1])
def test_a_placeholder_in_the_text_is_refused(model_dir: Path, texts: list[str], images: int) -> None:
    builder = PromptBuilder.load(ModelFiles.load(model_dir))
    with pytest.raises(InvalidRequest, match="contains '<image>'"):
        builder.build([user(*[IMAGE] * images, *texts)], [info()] * images)


def test_a_placeholder_split_over_messages_is_refused(byte_level_dir: Path, tmp_path: Path) -> None:
    for path in byte_level_dir.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content[0].text }}{% endfor %}")
    builder = PromptBuilder.load(ModelFiles.load(tmp_path))
    with pytest.raises(InvalidRequest, match="contains '<image>' once"):
        builder.build([user("<ima"), user("ge>")], [])


def test_an_image_that_the_template_drops_is_refused(byte_level_dir: Path, tmp_path: Path) -> None:
    for path in byte_level_dir.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{% for c in m.content %}{{ c.text }}{% endfor %}{% endfor %}"
    )
    builder = PromptBuilder.load(ModelFiles.load(tmp_path))
    with pytest.raises(InvalidRequest, match="places 0 of 1 images"):
        builder.build([user(IMAGE, "what is it?")], [info()])


def test_a_prompt_beyond_the_context_is_refused_before_it_is_expanded(model_dir: Path) -> None:
    builder = PromptBuilder.load(ModelFiles.load(model_dir))
    images = 512 // count_tokens(builder.family, info())
    with pytest.raises(ContextTooLong, match="the model's context is 512"):
        builder.build([user(*[IMAGE] * images)], [info()] * images)


def test_a_text_that_is_far_too_long_is_refused_before_it_is_tokenized(model_dir: Path) -> None:
    builder = PromptBuilder.load(ModelFiles.load(model_dir))
    with pytest.raises(InvalidRequest, match="characters, the limit is 16384"):
        builder.build([user("a" * 20_000)], [])


def test_unpaired_surrogates_are_refused(model_dir: Path) -> None:
    builder = PromptBuilder.load(ModelFiles.load(model_dir))
    with pytest.raises(InvalidRequest, match="unpaired surrogate"):
        builder.build([user("a\ud800b")], [])


def test_a_model_without_a_template_is_refused(byte_level_dir: Path, tmp_path: Path) -> None:
    for path in byte_level_dir.iterdir():
        if path.suffix != ".jinja":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    with pytest.raises(BadModel, match="no chat template"):
        PromptBuilder.load(ModelFiles.load(tmp_path))


def test_a_raw_prompt_is_tokenized_unchanged(builders: list[tuple[PromptBuilder, Any]]) -> None:
    for builder, processor in builders:
        assert list(builder.build_raw("one two").token_ids) == processor.tokenizer("one two")["input_ids"]
        for wrong in ("<image>", "x " * builder.family.context_length):
            with pytest.raises(InvalidRequest) as caught:
                builder.build_raw(wrong)
            assert caught.value.param == "prompt"
