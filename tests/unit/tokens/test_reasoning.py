import json
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from tests.examples import examples
from triptych.domain.sampling import Grammar, ResponseFormat
from triptych.tokens.call_grammar import call_grammar
from triptych.tokens.grammar import Grammars
from triptych.tokens.reasoning import (
    SYNTAXES,
    ReasoningReader,
    Thought,
    after_reasoning,
    find_reasoning,
)
from triptych.tokens.tokenizer import Tokenizer
from triptych.tokens.tool_calls import SYNTAXES as CALL_SYNTAXES
from triptych.tokens.tool_calls import Tool

HARMONY = (
    "<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>analysis<|message|>Two<|end|>"
    "<|start|>assistant<|channel|>commentary<|message|>So:<|end|>"
    "<|start|>assistant<|channel|>final <|constrain|>json<|message|>{} "
)
ANSWERS = [
    ("think", "", "<think>\nOne.\n two\n</think>\n\n{} ", "One.\n two", "{} "),
    ("think", "assistant\n<think>\n", "One.\n two\n</think>\n\n{} ", "One.\n two", "{} "),
    ("think", "<think>", "<think>\nAgain</think>x", "Again", "x"),
    ("think", "<think>\n\n</think>\n\n", " </think> <think>", "", " </think> <think>"),
    ("think", "", " plain <think>a</think>", "", " plain <think>a</think>"),
    ("think", "", "<think></think>x", "", "x"),
    ("think", "", "<think>cut off </th ", "cut off </th", ""),
    ("think", "", "<thin", "", "<thin"),
    ("kimi_vl", "", "◁think▷Öne◁/think▷x", "Öne", "x"),
    ("mistral", "", "[THINK]a [b]\n[/THINK]x", "a [b]", "x"),
    ("gemma4", "", "<|channel>thought\nOne\n<channel|>x", "One", "x"),
    ("gemma4", "", "<|channel>thought\n<channel|>x", "", "x"),
    ("gemma4", "", "<|channel>though", "though", ""),
    ("gpt_oss", "", HARMONY, "One.\nTwo", "So:\n{} "),
    ("gpt_oss", "", "plain <|end|>", "", "plain "),
    ("gpt_oss", "", "<|channel|>analysis<|message|>cut <|en", "cut <|en", ""),
    ("gpt_oss", "", "<|channel|>analysis<|mess", "", ""),
    ("gpt_oss", "", "<|start|>" * 40, "", "<|start|>" * 12),
    ("gpt_oss", "", "<|start|>" + "text " * 80, "", "<|start|>" + "text " * 80),
    ("gpt_oss", "", " " * 300 + "x", "", " " * 300 + "x"),
    ("think", "", " " * 300 + "<think>a</think>", "", " " * 300 + "<think>a</think>"),
    ("think", "<think>", "a" + " " * 300 + "b</think>x", "a" + " " * 300 + "b", "x"),
]


def read(name: str, tail: str, *chunks: str) -> tuple[str, str]:
    reader = ReasoningReader(SYNTAXES[name], tail)
    pieces = [piece for chunk in chunks for piece in reader.feed(chunk)] + reader.flush()
    return (
        "".join(piece.text for piece in pieces if isinstance(piece, Thought)),
        "".join(piece for piece in pieces if isinstance(piece, str)),
    )


@pytest.mark.parametrize(("name", "tail", "text", "thought", "answer"), ANSWERS)
def test_reasoning_is_separated_from_the_answer(name: str, tail: str, text: str, thought: str, answer: str) -> None:
    assert read(name, tail, text) == (thought, answer)
    assert read(name, tail, *text) == (thought, answer), "by single characters"


@settings(max_examples=examples(300))
@given(
    st.sampled_from(sorted(SYNTAXES)),
    st.booleans(),
    st.lists(st.sampled_from(["<", "a", " ", "\n", "think", ">", "/", "|", "é", "final", "x y"]), max_size=8),
    st.data(),
)
def test_any_chunking_gives_the_same(name: str, opened: bool, words: list[str], data: st.DataObject) -> None:
    syntax = SYNTAXES[name]
    marked = data.draw(st.lists(st.sampled_from([*words, *syntax.marks, "analysis"]), max_size=12))
    text, tail = "".join(marked), syntax.opening if opened else ""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    chunks = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(name, tail, *chunks) == read(name, tail, text)


def test_thoughts_are_sent_as_they_come() -> None:
    reader = ReasoningReader(SYNTAXES["think"], "<think>")
    assert reader.feed("One ") == [Thought("One")]
    assert reader.feed("two <") == [Thought(" two")]
    assert reader.feed("b>") == [Thought(" <b>")]
    assert (reader.thinking, reader.feed("</think>"), reader.thinking) == (True, [], False)
    assert reader.feed("\n") == []
    assert reader.feed("x\n") == ["x\n"]


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ m.content.split('</think>')[-1] }}", "think"),
        ("<think>\n</think>", "think"),
        ("{{ '<|channel>thought\n<channel|>' }}", "gemma4"),
        ("[THINK]{{ t }}[/THINK]", "mistral"),
        ("<|start|>assistant<|channel|>analysis<|message|>{{ t }}<|end|>", "gpt_oss"),
        ("<|im_start|>user{{ m.content }}<|end|>", None),
    ],
)
def test_the_syntax_is_the_one_whose_marks_are_in_the_template(template: str, name: str | None) -> None:
    found = find_reasoning(template)
    assert (found and found.name) == name


# --- grammars ---------------------------------------------------------------------------------------------------------

ANY_INTEGER = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@cache
def tokenizer(*, marks: bool) -> Tokenizer:
    """A tokenizer of bytes, with a token for each mark or none."""
    vocabulary = {character: at for at, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Backend(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    every = sorted({mark for syntax in SYNTAXES.values() for mark in syntax.marks})
    backend.add_special_tokens(["<eos>", *(every if marks else [])])
    if marks:
        backend.add_tokens([AddedToken("<tool>", special=False)])
    return Tokenizer(backend, special_tokens={}, eos_ids=frozenset({backend.token_to_id("<eos>") or 0}))


def accepts(name: str, tail: str, wanted: ResponseFormat, text: str, *, marks: bool = True) -> bool:
    """Whether each token of the text is allowed, and then the end."""
    known, syntax = tokenizer(marks=marks), SYNTAXES[name]
    grammars = Grammars(known)
    grammars.start(wanted)
    whole = after_reasoning(wanted, ReasoningReader(syntax, tail), syntax, known.token_to_id, known.eos_ids)
    matcher = grammars.start(whole)
    for token_id in [*known.encode(text), *known.eos_ids]:
        mask = matcher.allowed()
        if not mask[token_id // 8] >> token_id % 8 & 1:
            return False
        matcher.accept(token_id)
    return True


SCHEMA = ResponseFormat(Grammar.JSON_SCHEMA, json.dumps(ANY_INTEGER))


@pytest.mark.parametrize("marks", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize(
    ("name", "tail", "text", "good"),
    [
        ("think", "<think>", 'a {"b" <eos\n</think>\n\n{"a": 1}', True),
        ("think", "<think>", 'a</think>{"a": "b"}', False),
        ("think", "<think>", '{"a":1}', False),
        ("think", "", '<think>a</think>{"a":1}', True),
        ("think", "", '{"a":1}', True),
        ("think", "", 'a{"a":1}', False),
        ("think", "<think></think>", '{"a":1}', True),
        ("mistral", "", '[THINK]a[/THINK] {"a":1}', True),
        ("gemma4", "", '<|channel>thought\na<channel|>{"a":1}', True),
        ("gpt_oss", "", '<|channel|>final<|message|>{"a":1}', True),
        (
            "gpt_oss",
            "",
            '<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>{"a":1}',
            True,
        ),
    ],
)
def test_a_format_holds_from_the_end_of_reasoning(name: str, tail: str, text: str, good: bool, marks: bool) -> None:
    assert accepts(name, tail, SCHEMA, text, marks=marks) is good


def test_reasoning_may_contain_other_special_tokens_but_not_end_the_answer() -> None:
    assert accepts("think", "<think>", ResponseFormat(Grammar.JSON_OBJECT), "a<tool>[THINK]</think>{}")
    assert not accepts("think", "<think>", ResponseFormat(Grammar.JSON_OBJECT), "a<eos></think>{}")


@pytest.mark.parametrize("parameters", [{"type": "object"}, ANY_INTEGER], ids=str)
def test_a_forced_call_comes_after_reasoning(parameters: Any) -> None:
    wanted = ResponseFormat(Grammar.LARK, call_grammar(CALL_SYNTAXES["hermes"], [Tool("f", parameters)], parallel=True))
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    assert accepts("think", "<think>", wanted, f"a</think>\n\n{call}\n{call}")
    assert not accepts("think", "<think>", wanted, "a</think>b")
