import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from triptych.errors import InvalidRequest
from triptych.families.model_files import BadModel, ModelFiles
from triptych.tokens.tokenizer import Tokenizer

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
BEGIN = "<|begin|>"
Edit = Callable[..., Path]


def load(path: Path) -> Tokenizer:
    return Tokenizer.load(ModelFiles.load(path))


@pytest.fixture(scope="module")
def pairs(byte_level_dir: Path, llama_dir: Path) -> list[tuple[Tokenizer, PreTrainedTokenizerBase]]:
    return [(load(path), AutoTokenizer.from_pretrained(path)) for path in (byte_level_dir, llama_dir)]


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40) | st.text("the <image></s>\n", max_size=30))
def test_ids_and_text_equal_those_of_transformers(
    pairs: list[tuple[Tokenizer, PreTrainedTokenizerBase]], text: str
) -> None:
    for ours, theirs in pairs:
        for add_special_tokens in (False, True):
            ids = ours.encode(text, add_special_tokens=add_special_tokens)
            assert ids == theirs.encode(text, add_special_tokens=add_special_tokens)
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize(
    "changes", [{"add_bos_token": False}, {"add_eos_token": True}, {"legacy": True}, {"add_prefix_space": False}]
)
def test_switches_of_the_configuration_are_ignored_as_in_transformers(
    llama_dir: Path, edit_json: Edit, changes: dict[str, bool]
) -> None:
    path = edit_json(llama_dir, "tokenizer_config.json", **changes)
    theirs = AutoTokenizer.from_pretrained(path)
    for text in ("the in", "a<image>the", "  x"):
        assert load(path).encode(text, add_special_tokens=True) == theirs.encode(text)


def test_tokens_named_only_in_the_configuration_are_added(byte_level_dir: Path, edit_json: Edit) -> None:
    path = edit_json(byte_level_dir, "tokenizer_config.json", extra_special_tokens=["<|new|>"], sep_token=BEGIN)
    theirs = AutoTokenizer.from_pretrained(path)
    ours = load(path)
    for text in ("a<|new|>b", "<|begin|>x"):
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)


def test_the_begin_token_is_not_added_twice(llama_dir: Path) -> None:
    tokenizer = load(llama_dir)
    assert tokenizer.token_to_id("<s>") == 1
    assert tokenizer.encode_prompt("<s>the").count(1) == 1
    assert tokenizer.encode_prompt("the").count(1) == 1


def test_end_ids_come_from_the_generation_config_first(llama_dir: Path, edit_json: Edit) -> None:
    assert load(llama_dir).eos_ids == {2}
    assert load(edit_json(llama_dir, "generation_config.json", eos_token_id=[2, 7])).eos_ids == {2, 7}


def test_a_text_over_the_limit_is_refused(byte_level_dir: Path) -> None:
    with pytest.raises(InvalidRequest, match="the text has 11 characters, the limit is 10"):
        load(byte_level_dir).encode("a" * 11, max_chars=10)


def test_tokens_and_ids_map_to_each_other(byte_level_dir: Path) -> None:
    tokenizer = load(byte_level_dir)
    image_id = tokenizer.token_to_id("<image>")
    assert image_id is not None
    assert tokenizer.id_to_token(image_id) == "<image>"
    assert tokenizer.token_to_id("no such token") is None
    assert tokenizer.id_to_token(tokenizer.vocab_size) is None


@pytest.mark.parametrize("name", ["tekken.json", "tokenizer.model", "vocab.json", "tiktoken.model", "qwen.tiktoken"])
def test_a_tokenizer_of_another_format_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llava"}')
    (tmp_path / name).write_text("{}")
    with pytest.raises(BadModel, match=rf"has {re.escape(name)} and no tokenizer\.json: docs/models\.md"):
        load(tmp_path)


def test_byte_pairs_are_converted_as_the_page_says(tmp_path: Path) -> None:
    """The command of docs/models.md."""
    alphabet = sorted(ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*alphabet, "th", "the", "<|endoftext|>"])}
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nt h\nth e\n")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    (command,) = re.findall(r'^python -c "(from transformers import AutoTokenizer.*)"$', PAGE.read_text(), re.MULTILINE)
    exec(command.replace("MODEL", str(tmp_path)))  # noqa: S102 - the documentation's own
    ours = load(tmp_path)
    assert ours.encode("the th") == [vocabulary["the"], vocabulary["\u0120"], vocabulary["th"]]


def test_a_missing_or_broken_tokenizer_is_a_bad_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llava"}')
    with pytest.raises(BadModel, match="has no tokenizer"):
        load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(BadModel, match="cannot be read"):
        load(tmp_path)


def test_the_bytes_of_tokens_add_up_to_the_text(model_dir: Path) -> None:
    tokenizer = Tokenizer.load(ModelFiles.load(model_dir))
    text = "the digits are seven, \u00dcn\u00efc\u00f6d\u00e9 \u6570\u5b57 \U0001f642"
    ids = tokenizer.encode(text)
    assert b"".join(tokenizer.token_bytes(token_id) for token_id in ids).strip() == text.encode()
    assert tokenizer.token_bytes(tokenizer.vocab_size + 5) == b""


def test_the_bytes_of_a_special_token_are_its_text(byte_level_dir: Path) -> None:
    tokenizer = Tokenizer.load(ModelFiles.load(byte_level_dir))
    end = tokenizer.token_to_id("<|end|>")
    assert end is not None
    assert tokenizer.token_bytes(end) == b"<|end|>"
