"""Files of model directories: precedence, and errors for malformed ones."""

import json
from pathlib import Path

import pytest

from triptych.families.model_files import MAX_CONFIG_BYTES, BadModel, ModelFiles
from triptych.families.registry import written_family


def write(root: Path, **files: object) -> Path:
    for name, content in {"config": {"model_type": "llava"}, **files}.items():
        (root / f"{name}.json").write_text(json.dumps(content))
    return root


def test_missing_files_are_empty(tmp_path: Path) -> None:
    files = ModelFiles.load(write(tmp_path))
    assert files.model_type == "llava"
    assert files.processor == files.image_processor == files.tokenizer_config == files.generation_config == {}
    assert files.chat_template is None


def test_the_nested_image_processor_takes_precedence(tmp_path: Path) -> None:
    write(tmp_path, preprocessor_config={"size": 1})
    assert ModelFiles.load(tmp_path).image_processor == {"size": 1}
    write(tmp_path, processor_config={"image_processor": {"size": 2}})
    assert ModelFiles.load(tmp_path).image_processor == {"size": 2}


def test_video_settings_are_found_in_transformers_order(tmp_path: Path) -> None:
    write(tmp_path, preprocessor_config={"size": 3})
    assert ModelFiles.load(tmp_path).video_processor == {"size": 3}
    write(tmp_path, video_preprocessor_config={"size": 2})
    assert ModelFiles.load(tmp_path).video_processor == {"size": 2}
    write(tmp_path, processor_config={"video_processor": {"size": 1}})
    assert ModelFiles.load(tmp_path).video_processor == {"size": 1}
    assert ModelFiles.load(tmp_path).image_processor == {"size": 3}


def test_the_chat_template_is_found_in_transformers_order(tmp_path: Path) -> None:
    write(tmp_path, tokenizer_config={"chat_template": [{"name": "default", "template": "4"}]})
    assert ModelFiles.load(tmp_path).chat_template == "4"
    (tmp_path / "chat_template.jinja").write_text("3")
    assert ModelFiles.load(tmp_path).chat_template == "3"
    write(tmp_path, chat_template={"chat_template": "2"})
    assert ModelFiles.load(tmp_path).chat_template == "2"
    write(tmp_path, processor_config={"chat_template": {"default": "1", "tools": "x"}})
    assert ModelFiles.load(tmp_path).chat_template == "1"


def test_special_tokens_may_be_in_a_separate_file(tmp_path: Path) -> None:
    write(tmp_path, tokenizer_config={"eos_token": "a"}, special_tokens_map={"eos_token": "b", "bos_token": "c"})
    assert ModelFiles.load(tmp_path).tokenizer_config == {"eos_token": "a", "bos_token": "c"}


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadModel, match="'nowhere' does not exist"):
        ModelFiles.load(tmp_path / "nowhere")
    with pytest.raises(BadModel, match=r"has no config\.json"):
        ModelFiles.load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(BadModel, match=r"config\.json is not JSON"):
        ModelFiles.load(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(BadModel, match=r"has an empty config\.json"):
        ModelFiles.load(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(BadModel, match="is not a JSON object"):
        ModelFiles.load(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe")
    with pytest.raises(BadModel, match="is not UTF-8"):
        ModelFiles.load(tmp_path)
    (tmp_path / "config.json").write_bytes(b" " * (MAX_CONFIG_BYTES + 1))
    with pytest.raises(BadModel, match="has more than"):
        ModelFiles.load(tmp_path)
    write(tmp_path, tokenizer_config={"chat_template": 5})
    with pytest.raises(BadModel, match="template is not a string"):
        ModelFiles.load(tmp_path)


def test_the_error_for_an_unknown_architecture_lists_the_known_ones(tmp_path: Path) -> None:
    files = ModelFiles.load(write(tmp_path, config={"model_type": "qwen9"}))
    with pytest.raises(BadModel, match=r"'qwen9' is not known; known are: .*\bllava\b.*\. To add one, write a class"):
        written_family(files)


def test_a_template_for_tools_is_found_beside_the_default_one(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    write(tmp_path, tokenizer_config={"chat_template": named})
    files = ModelFiles.load(tmp_path)
    assert (files.chat_template, files.tools_template) == ("d", "t")
    (tmp_path / "chat_template.jinja").write_text("e")
    assert (ModelFiles.load(tmp_path).chat_template, ModelFiles.load(tmp_path).tools_template) == ("e", None)
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("u")
    assert (ModelFiles.load(tmp_path).chat_template, ModelFiles.load(tmp_path).tools_template) == ("e", "u")


@pytest.mark.parametrize(
    "found", [{"rag": "x"}, [{"name": "tool_use", "template": "x"}], {"default": 5}, [["default", "x"]]]
)
def test_named_templates_without_a_usable_default_are_refused(tmp_path: Path, found: object) -> None:
    write(tmp_path, tokenizer_config={"chat_template": found})
    with pytest.raises(BadModel, match="chat template"):
        ModelFiles.load(tmp_path)
