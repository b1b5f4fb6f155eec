"""Answers constrained by a response format parse and validate, for any logits."""

import json
import re
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any

import jsonschema_rs
import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from tests.unit.tokens.calls import Call, calls_of
from triptych.demo import MODEL_DIR
from triptych.domain.sampling import Grammar, ResponseFormat
from triptych.errors import InvalidRequest
from triptych.families.model_files import ModelFiles
from triptych.testing.model import fake_tokenizer
from triptych.tokens.call_grammar import call_grammar
from triptych.tokens.call_reader import CallReader
from triptych.tokens.grammar import MAX_CACHED, Grammars, TokenMatcher
from triptych.tokens.tokenizer import Tokenizer
from triptych.tokens.tool_calls import SYNTAXES, Json, Tool

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


@pytest.mark.parametrize("name", SYNTAXES)
@pytest.mark.parametrize("parallel", [False, True])
def test_random_answers_constrained_to_tool_calls_are_tool_calls(
    grammars: Grammars, tokenizer: Tokenizer, name: str, parallel: bool
) -> None:
    syntax = SYNTAXES[name]
    tools = TOOLS if syntax.envelope else (TOOLS[0], Tool("odd\u00e9", TOOLS[1].parameters))
    held = ResponseFormat(Grammar.LARK, call_grammar(syntax, tools, parallel=parallel))
    names, most = set(), 0
    for seed in range(40):
        answer = random_answer(grammars.start(held), tokenizer, Random(seed), limit=3000)
        assert answer is not None
        reader = CallReader(syntax, {tool.name: tool.parameters for tool in tools})
        calls = calls_of(reader.feed(answer) + reader.flush())
        for call in calls:
            assert isinstance(call, Call), answer
            names.add(call.name)
            assert json.loads(call.arguments) in ([{"lat": 1}, {"lat": 2}] if call.name == "get_weather" else [{}])
        most = max(most, len(calls))
        assert calls
    assert names == {tool.name for tool in tools}
    assert (most > 1) == parallel


@pytest.mark.parametrize("name", [name for name, syntax in SYNTAXES.items() if not isinstance(syntax.arguments, Json)])
def test_forced_calls_keep_types_choices_and_required_parameters(
    grammars: Grammars, tokenizer: Tokenizer, name: str
) -> None:
    schema = {
        "type": "object",
        "properties": {"b": {"type": "boolean"}, "word": {"enum": ["yes", "5"]}, "n": {"enum": [1, 22]}},
        "required": ["word"],
    }
    held = ResponseFormat(Grammar.LARK, call_grammar(SYNTAXES[name], [Tool("f", schema)], parallel=False))
    seen: set[str] = set()
    for seed in range(30):
        answer = random_answer(grammars.start(held), tokenizer, Random(seed), limit=3000)
        assert answer is not None
        reader = CallReader(SYNTAXES[name], {"f": schema})
        (call,) = calls_of(reader.feed(answer) + reader.flush())
        assert isinstance(call, Call)
        given = json.loads(call.arguments)
        assert given["word"] in ("yes", "5")
        assert given.get("n", 1) in (1, 22)
        assert given.get("b", True) in (True, False)
        seen |= given.keys()
    assert seen == {"b", "word", "n"}


@pytest.mark.parametrize(
    ("name", "tool", "message"),
    [
        (
            "qwen3_coder",
            Tool("f", {"properties": {"a": {"type": "string", "maxLength": 3}}}),
            "#/properties/a: .*maxLength",
        ),
        ("qwen3_coder", Tool("f", {"properties": {}, "anyOf": [{}]}), "anyOf"),
        ("qwen3_coder", Tool("f", {"properties": {"a>": {}}}), "the name 'a>'"),
        ("gemma4", Tool("f", {"properties": {"a": {"type": "array"}}}), "#/properties/a: .*its type"),
        ("glm45", Tool("f", {"required": ["a"]}), "'a' is required"),
        ("kimi_k2", Tool("f g", {}), "this name"),
    ],
)
def test_what_a_syntax_cannot_be_held_to_is_refused_by_name(name: str, tool: Tool, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        call_grammar(SYNTAXES[name], [tool], parallel=False)
    assert caught.value.param == "tools"


def test_a_tag_may_be_generated_as_a_single_token(tokenizer: Tokenizer) -> None:
    """As in Qwen's vocabulary, where it is an added token and not a special one."""
    backend = Backend.from_str(tokenizer.backend.to_str())
    backend.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    tagged = Tokenizer(backend, special_tokens={}, eos_ids=tokenizer.eos_ids)
    held = ResponseFormat(Grammar.LARK, call_grammar(SYNTAXES["hermes"], TOOLS, parallel=False))
    assert tagged.token_to_id("<tool_call>") in allowed(Grammars(tagged).start(held))


def test_a_tool_with_an_unsupported_schema_is_refused_by_name(grammars: Grammars) -> None:
    held = call_grammar(SYNTAXES["hermes"], [Tool("f", {"type": "object", "not": {}})], parallel=False)
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


def test_a_schema_that_the_library_would_not_keep_is_refused_by_name(grammars: Grammars) -> None:
    bounds = {"type": "integer", "minimum": 10**20, "maximum": 10**21}
    with pytest.raises(InvalidRequest, match=r"supported: #: minimum 10{20} is beyond ±9007199254740991") as caught:
        grammars.start(schema(bounds))
    assert caught.value.param == "response_format"
    tool = Tool("f", {"type": "object", "properties": {"n": bounds}})
    with pytest.raises(InvalidRequest, match="tools: the parameters of 'f': #/properties/n: minimum") as caught:
        call_grammar(SYNTAXES["llama3_json"], [tool], parallel=False)
    assert caught.value.param == "tools"


def test_a_schema_that_fails_at_the_first_token_is_refused_at_once(grammars: Grammars) -> None:
    with pytest.raises(InvalidRequest, match="too complex"):
        grammars.start(schema({"type": "integer", "multipleOf": 9973, "minimum": 0, "maximum": 10**12}))


class SchemaMaker:
    """Makes random schemas of what the library supports."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)

    def make(self, depth: int = 0) -> dict[str, Any]:
        rng, kind = self.rng, self.rng.random()
        if depth < 3 and kind < 0.12:
            below = [self.make(depth + 1) for _ in range(rng.randrange(1, 4))]
            return {rng.choice(["anyOf", "allOf"]): below, **(self.make(3) if rng.random() < 0.4 else {})}
        if kind < 0.25:
            constants = [self._value() for _ in range(rng.randrange(1, 4))]
            return {"enum": constants} if kind < 0.2 else {"const": constants[0]}
        named = rng.choice(["integer", "number", "string", "boolean", "null", *(["array", "object"] * 2 * (depth < 3))])
        made: dict[str, Any] = {"type": sorted({named, "null"}) if rng.random() < 0.1 else named}
        match named:
            case "integer" | "number":
                self._some(made, 0.35, minimum=self._number, maximum=self._number)
                self._some(made, 0.35, exclusiveMinimum=self._number, exclusiveMaximum=self._number)
                self._some(made, 0.25, multipleOf=lambda: rng.choice([1, 2, 3, 7, 10, 100, 0.5, 0.25, 1.5, 12, 60]))
            case "string":
                self._some(made, 0.5, minLength=lambda: rng.randrange(4), maxLength=lambda: rng.randrange(6))
                self._some(made, 0.4, pattern=lambda: rng.choice(PATTERNS))
            case "array":
                self._some(made, 0.7, items=lambda: self.make(depth + 1), maxItems=lambda: rng.randrange(4))
                self._some(made, 0.3, prefixItems=lambda: [self.make(depth + 1)], minItems=lambda: rng.randrange(3))
            case "object":
                names = rng.sample(["a", "b", "é", "x y", 'q"'], rng.randrange(4))
                made["properties"] = {name: self.make(depth + 1) for name in names}
                made["required"] = rng.sample([*names, "zz"], rng.randrange(len(names) + 1))
                self._some(made, 0.7, additionalProperties=lambda: rng.choice([False, self.make(depth + 1)]))
                self._some(made, 0.2, maxProperties=lambda: rng.randrange(4), minProperties=lambda: rng.randrange(3))
        return made

    def _some(self, made: dict[str, Any], share: float, **keywords: Callable[[], object]) -> None:
        made |= {name: value() for name, value in keywords.items() if self.rng.random() < share}

    def _number(self) -> float:
        rng = self.rng
        near = rng.choice([0, 10**6, 2**53 - 1, -(2**53) + 1, 2**63, -(2**63), 10**20])
        return rng.choice([rng.randrange(-20, 20), rng.randrange(-20, 20) + 0.5, near, 1e-7, -1e-7, 0.1, 10**15])

    def _value(self) -> object:
        return self.rng.choice(["a", "", "é\n", True, None, [1, "a"], {"a": self._number()}, [], {}, self._number()])


HUGE_EXPONENT = re.compile(r"\d[eE][+-]?\d{7}")
"""Beyond what Python's decimals hold."""
PATTERNS = ["^a", "b$", "^[a-z]+$", r"^\d{2,3}$", r"^\w*$", "^(foo|bar)$", "^[^a]$", "^é*$", r"\s", "a|b", r"^\u0041$"]


def test_random_answers_of_random_schemas_validate(grammars: Grammars, tokenizer: Tokenizer) -> None:
    """What ends validates; numbers are compared as decimals, as floats of an answer may round to a bound."""
    checked = 0
    for seed in range(400):
        document = SchemaMaker(seed).make()
        try:
            grammar = grammars.start(schema(document))
            answers = [random_answer(grammar.fork(), tokenizer, Random(number), limit=80) for number in range(2)]
        except InvalidRequest:
            continue
        validator = jsonschema_rs.validator_for(json.dumps(document))
        for answer in answers:
            if answer is not None and not HUGE_EXPONENT.search(answer):
                assert validator.is_valid(json.loads(answer, parse_float=Decimal)), (seed, document, answer)
                checked += 1
    assert checked > 200
