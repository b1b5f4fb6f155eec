from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.families.model_files import ModelFiles
from triptych.tokens.detokenize import IncrementalDetokenizer
from triptych.tokens.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def byte_level(byte_level_dir: Path) -> Tokenizer:
    return Tokenizer.load(ModelFiles.load(byte_level_dir))


@pytest.fixture(scope="module")
def llama(llama_dir: Path) -> Tokenizer:
    return Tokenizer.load(ModelFiles.load(llama_dir))


def pieces(tokenizer: Tokenizer, token_ids: list[int], chunk: int = 1) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer)
    out = [detokenizer.feed(token_ids[start : start + chunk]) for start in range(0, len(token_ids), chunk)]
    return [*out, detokenizer.flush()]


def byte_runs_are_all_valid_or_all_invalid(tokenizer: Tokenizer, token_ids: list[int]) -> bool:
    """False for the detokenizer's documented exception: a broken run that contains valid characters."""
    tokens = [tokenizer.id_to_token(token_id) for token_id in token_ids if token_id not in tokenizer.special_ids]
    run = b""
    for token in [*(token for token in tokens if token is not None), ""]:
        if token.startswith("<0x"):
            run += bytes.fromhex(token[3:5])
            continue
        spans = [run[start:end] for start in range(len(run)) for end in range(start + 1, len(run) + 1)]
        if not _valid(run) and any(map(_valid, spans)):
            return False
        run = b""
    return True


def _valid(run: bytes) -> bool:
    try:
        run.decode()
    except UnicodeDecodeError:
        return False
    return True


anything = st.lists(st.integers(0, 330), max_size=30)


@given(token_ids=anything, chunk=st.integers(1, 4))
def test_pieces_of_any_byte_level_ids_add_up_to_the_decoded_text(
    byte_level: Tokenizer, token_ids: list[int], chunk: int
) -> None:
    assert "".join(pieces(byte_level, token_ids, chunk)) == byte_level.decode(token_ids)


@given(token_ids=anything, chunk=st.integers(1, 4))
def test_pieces_of_any_byte_fallback_ids_add_up_to_the_decoded_text(
    llama: Tokenizer, token_ids: list[int], chunk: int
) -> None:
    joined = "".join(pieces(llama, token_ids, chunk))
    if byte_runs_are_all_valid_or_all_invalid(llama, token_ids):
        assert joined == llama.decode(token_ids)


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=30), special=st.booleans())
def test_any_text_survives_a_round_trip(byte_level: Tokenizer, llama: Tokenizer, text: str, special: bool) -> None:
    for tokenizer in (byte_level, llama):
        token_ids = tokenizer.encode(text, add_special_tokens=special)
        assert "".join(pieces(tokenizer, token_ids)) == tokenizer.decode(token_ids)


@pytest.mark.parametrize("name", ["byte_level", "llama"])
def test_a_character_is_emitted_as_soon_as_it_is_complete(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    token_ids = tokenizer.encode("🙂the")
    out = pieces(tokenizer, token_ids)
    complete = next(index for index, piece in enumerate(out) if "🙂" in piece)
    assert "".join(out[:complete]) in ("", " ")
    assert tokenizer.decode(token_ids[: complete + 1]).endswith("🙂")


@pytest.mark.parametrize("name", ["byte_level", "llama"])
def test_an_incomplete_last_character_becomes_replacement_characters(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    token_ids = tokenizer.encode("the 🙂")[:-1]
    out = pieces(tokenizer, token_ids)
    assert "".join(out) == tokenizer.decode(token_ids)
    assert out[-1].endswith("\ufffd")


def test_spaces_survive_a_special_token_in_the_middle(llama: Tokenizer) -> None:
    token_ids = [*llama.encode("in"), llama.token_to_id("</s>") or 0, *llama.encode("the")]
    assert "".join(pieces(llama, token_ids)) == "in the"


def test_a_leading_space_is_dropped_in_byte_spelling(llama: Tokenizer) -> None:
    token_ids = [llama.token_to_id("<0x20>") or 0, llama.token_to_id("<0x41>") or 0]
    assert "".join(pieces(llama, token_ids)) == llama.decode(token_ids) == "A"


def test_endless_incomplete_bytes_take_bounded_memory(byte_level: Tokenizer) -> None:
    first_byte = byte_level.encode("é")[0] if len(byte_level.encode("é")) > 1 else byte_level.encode("ß")[0]
    detokenizer = IncrementalDetokenizer(byte_level)
    assert detokenizer.feed([first_byte] * 1000) == "\ufffd" * 999
    assert detokenizer.flush() == "\ufffd"


@pytest.mark.parametrize("chunk", [1, 2, 100])
def test_special_tokens_are_shown_on_demand_except_those_that_end_the_answer(byte_level: Tokenizer, chunk: int) -> None:
    token_ids = byte_level.encode("the<image>é<|user|>in<|end|>")
    detokenizer = IncrementalDetokenizer(byte_level)
    detokenizer.show_special_tokens()
    text = "".join(detokenizer.feed(token_ids[at : at + chunk]) for at in range(0, len(token_ids), chunk))
    ends = {byte_level.id_to_token(token_id) for token_id in byte_level.eos_ids}
    assert ends == {"<|user|>"}, "as the model's configuration says"
    assert text + detokenizer.flush() == "the<image>éin<|end|>"
