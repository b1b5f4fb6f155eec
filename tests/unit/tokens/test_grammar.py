"""Answers constrained by a response format parse and validate, for any logits."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from triptych.demo import MODEL_DIR
from triptych.domain.sampling import Grammar, ResponseFormat
from triptych.errors import InvalidRequest
from triptych.families.model_files import ModelFiles
from triptych.testing.model import fake_tokenizer
from triptych.tokens.grammar import MAX_CACHED, Grammars, TokenMatcher
from triptych.tokens.tokenizer import Tokenizer
from triptych.tokens.tool_calls import Call, CallReader, CallSyntax, Tool, call_grammar

OBJECT = ResponseFormat(Grammar.JSON_OBJECT)
ANSWER = {
    "type": "object",
    "properties": {
        "digits": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 3},
        "word": {"type": "string", "maxLength": 4},
        "sure": {"enum": [True, False, "\u6570\u5b57"]},
    },
    "required": ["digits", "word", "sure"],
    "additionalProperties": False,
}


def schema(document: object) -> ResponseFormat:
    return ResponseFormat(Grammar.JSON_SCHEMA, json.dumps(document))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(ModelFiles.load(MODEL_DIR))


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer)


def allowed(grammar: TokenMatcher) -> list[int]:
    mask = int.from_bytes(grammar.allowed(), "little")
    return [token_id for token_id in range(mask.bit_length()) if mask >> token_id & 1]


def random_answer(grammar: TokenMatcher, tokenizer: Tokenizer, rng: Random, limit: int = 600) -> str | None:
    """An answer sampled from random logits; None when it does not end."""
    token_ids: list[int] = []
    while len(token_ids) < limit:
        token_ids.append(rng.choice(allowed(grammar)))
        grammar.accept(token_ids[-1])
        if token_ids[-1] in tokenizer.eos_ids:
            return b"".join(map(tokenizer.token_bytes, token_ids[:-1])).decode()
    return None


def check(answer: Any) -> None:
    """Checks by hand what ANSWER requires."""
    assert set(answer) == {"digits", "word", "sure"}
    assert len(answer["digits"]) <= 3
    assert all(isinstance(digit, int) and 0 <= digit <= 9 for digit in answer["digits"])
    assert len(answer["word"]) <= 4
    assert answer["sure"] in (True, False, "\u6570\u5b57")


def test_random_answers_of_a_schema_validate(grammars: Grammars, tokenizer: Tokenizer) -> None:
    answers = [random_answer(grammars.start(schema(ANSWER)), tokenizer, Random(seed)) for seed in range(60)]
    ended = [answer for answer in answers if answer is not None]
    assert len(ended) == 60
    assert len(set(ended)) > 50
    for answer in ended:
        check(json.loads(answer))


TOOLS = (
    Tool(
        "get_weather",
        {
            "$ref": "#/$defs/place",
            "$defs": {
                "place": {
                    "type": "object",
                    "properties": {"lat": {"enum": [1, 2]}},
                    "required": ["lat"],
                    "additionalProperties": False,
                }
            },
        },
    ),
    Tool(
        'odd "name" \u00e9',
        {"type": "object", "properties": {}, "additionalProperties": False, "x-guidance": {"whitespace_pattern": "x"}},
    ),
)


@pytest.mark.parametrize("syntax", CallSyntax)
@pytest.mark.parametrize("parallel", [False, True])
def test_random_answers_constrained_to_tool_calls_are_tool_calls(
    grammars: Grammars, tokenizer: Tokenizer, syntax: CallSyntax, parallel: bool
) -> None:
    held = ResponseFormat(Grammar.LARK, call_grammar(syntax, TOOLS, parallel=parallel))
    names, most = set(), 0
    for seed in range(40):
        answer = random_answer(grammars.start(held), tokenizer, Random(seed), limit=3000)
        assert answer is not None
        reader = CallReader(syntax, frozenset(tool.name for tool in TOOLS))
        calls = reader.feed(answer) + reader.flush()
        for call in calls:
            assert isinstance(call, Call), answer
            names.add(call.name)
            assert json.loads(call.arguments) in ([{"lat": 1}, {"lat": 2}] if call.name == "get_weather" else [{}])
        most = max(most, len(calls))
        assert calls
    assert names == {tool.name for tool in TOOLS}
    assert (most > 1) == parallel


def test_a_tag_may_be_generated_as_a_single_token(tokenizer: Tokenizer) -> None:
    """As in Qwen's vocabulary, where it is an added token and not a special one."""
    backend = Backend.from_str(tokenizer.backend.to_str())
    backend.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    tagged = Tokenizer(backend, special_tokens={}, eos_ids=tokenizer.eos_ids)
    held = ResponseFormat(Grammar.LARK, call_grammar(CallSyntax.TAGGED, TOOLS, parallel=False))
    assert tagged.token_to_id("<tool_call>") in allowed(Grammars(tagged).start(held))


def test_a_tool_with_an_unsupported_schema_is_refused_by_name(grammars: Grammars) -> None:
    held = call_grammar(CallSyntax.TAGGED, [Tool("f", {"type": "object", "not": {}})], parallel=False)
    with pytest.raises(InvalidRequest, match=r'supported: failed to compile .*\["not"\]$') as caught:
        grammars.start(ResponseFormat(Grammar.LARK, held))
    assert caught.value.param == "tools"


def test_random_objects_parse(grammars: Grammars, tokenizer: Tokenizer) -> None:
    answers = [random_answer(grammars.start(OBJECT), tokenizer, Random(seed)) for seed in range(60)]
    ended = [answer for answer in answers if answer is not None]
    assert len(ended) > 20
    assert all(isinstance(json.loads(answer), dict) for answer in ended)


def test_end_tokens_are_allowed_only_in_accepting_states(grammars: Grammars, tokenizer: Tokenizer) -> None:
    (eos,) = tokenizer.eos_ids
    grammar = grammars.start(OBJECT)
    for token_id in tokenizer.encode('{"a": 1}'):
        assert eos not in allowed(grammar)
        grammar.accept(token_id)
    assert allowed(grammar) == [eos]


def test_forks_are_independent(grammars: Grammars, tokenizer: Tokenizer) -> None:
    first = grammars.start(OBJECT)
    second = first.fork()
    for token_id in tokenizer.encode("{}"):
        first.accept(token_id)
    assert allowed(second) == allowed(grammars.start(OBJECT))


def test_a_recursive_schema_is_supported(grammars: Grammars, tokenizer: Tokenizer) -> None:
    tree = {
        "type": "object",
        "properties": {"left": {"$ref": "#"}, "value": {"type": "integer"}},
        "required": ["value"],
        "additionalProperties": False,
    }
    grammar = grammars.start(schema(tree))
    for token_id in tokenizer.encode('{"left": {"left": {"value": 1}, "value": 2}, "value": 3}'):
        assert token_id in allowed(grammar)
        grammar.accept(token_id)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nope",
        "[]",
        "{",
        '{"type": "objectx"}',
        '{"$ref": "https://example.com/schema"}',
        '{"type": "string", "pattern": "(a"}',
        '{"not": {"type": "string"}}',
        '{"type": "integer", "minimum": 5, "maximum": 3}',
        '{"a":' * 5000,
        "[" * 30_000,
    ],
)
def test_unsupported_schemas_are_refused_by_name(grammars: Grammars, text: str) -> None:
    with pytest.raises(InvalidRequest, match="the JSON schema is not supported") as caught:
        grammars.start(ResponseFormat(Grammar.JSON_SCHEMA, text))
    assert caught.value.param == "response_format"
    assert len(caught.value.message) < 400


def test_a_schema_that_grows_too_large_is_an_error_in_bounded_time_and_memory(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    deep = {"type": "string", "pattern": "^(.*a.{2000}|.*b.{1000}|.*c.{3000})$"}
    names = [[f"{letter}{number}" for number in range(50)] for letter in "abcdefghijklmno"]
    wide = {"anyOf": [{"type": "object", "properties": {key: {"type": "string"} for key in group}} for group in names]}
    for document in (deep, wide):
        with pytest.raises(InvalidRequest, match="too complex"):
            random_answer(grammars.start(schema(document)), tokenizer, Random(1), limit=3000)


def test_recent_grammars_are_cached(grammars: Grammars) -> None:
    for length in range(MAX_CACHED + 5):
        grammars.start(schema({"type": "string", "maxLength": length}))
    assert len(grammars._cached) == MAX_CACHED


@pytest.mark.parametrize("response_format", [OBJECT, schema(ANSWER)])
def test_a_tokenizer_without_token_bytes_supports_no_format(response_format: ResponseFormat) -> None:
    with pytest.raises(InvalidRequest, match="tokenizer"):
        Grammars(fake_tokenizer()).start(response_format)


def test_a_sentencepiece_tokenizer_follows_a_schema(llama_dir: Path) -> None:
    tokenizer = Tokenizer.load(ModelFiles.load(llama_dir))
    answer = random_answer(Grammars(tokenizer).start(schema(ANSWER)), tokenizer, Random(1))
    assert answer is not None
    check(json.loads(answer))
