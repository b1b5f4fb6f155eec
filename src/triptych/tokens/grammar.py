"""Constrained decoding: response formats and tool calls as token grammars, with ``llguidance``.

Without torch; bounded in time and memory.
"""

import json
import re
from collections import OrderedDict
from threading import Lock
from typing import TYPE_CHECKING, Any, Self

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from triptych.domain.sampling import Grammar, ResponseFormat
from triptych.errors import InvalidRequest
from triptych.tokens.schema_limits import check_schema
from triptych.tokens.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_CACHED = 32
_WHAT = {"response_format": "response format", "tools": "call of a tool"}
"""Name of what is constrained, by the request field that asks for it."""
_ANY_OBJECT = '{"type": "object"}'
_MAX_REASON_CHARS = 300
_PLACE = re.compile(r"\Aat \d+\(\d+\): |\n.*", re.DOTALL)
"""The position of a fault in a generated grammar, which the client has not written."""
JSON_OVERRIDES: "JsonCompileOptions" = {
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_pattern": r" |\n( {0,32}|\t{0,8})",
    "lenient": False,
}
"""How JSON is written. White space between tokens is a space, or a newline with indentation: some models never stop producing it."""


class TokenMatcher:
    """``ports.TokenGrammar``."""

    def __init__(self, matcher: LLMatcher, param: str) -> None:
        """``param`` is the request field that asked for the grammar."""
        self._matcher = matcher
        self._param = param

    def fork(self) -> Self:
        return type(self)(self._matcher.deep_copy(), self._param)

    def allowed(self) -> bytes:
        mask = self._matcher.compute_bitmask()
        self._check()
        return mask

    def accept(self, token_id: int) -> None:
        self._matcher.consume_token(token_id)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():  # with allowed tokens this is the only possible error
            raise InvalidRequest(f"the {_WHAT[self._param]} has become too complex to follow", param=self._param)


class Grammars:
    """Compiles formats for one tokenizer, and caches the last ``MAX_CACHED``. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Takes time proportional to the vocabulary: about a second for 150,000 tokens."""
        self._tokenizer = _wrapped(tokenizer)
        self._limits = LLParserLimits(
            # By the library's documentation 20, 14 and 3 ms of CPU time, and 20 MB.
            initial_lexer_fuel=1_000_000,
            step_lexer_fuel=200_000,
            step_max_items=50_000,
            max_lexer_states=10_000,
            max_grammar_size=100_000,
            verbose_errors=False,
        )
        self._cached: OrderedDict[ResponseFormat, TokenMatcher] = OrderedDict()
        self._lock = Lock()

    def start(self, response_format: ResponseFormat) -> TokenMatcher:
        """Start a matcher for the format, in its initial state. Raises InvalidRequest if the schema is invalid, uses
        features that cannot be enforced, or is too complex. For every format it raises if the model's tokenizer is not
        supported.
        """
        with self._lock:
            if (known := self._cached.get(response_format)) is not None:
                self._cached.move_to_end(response_format)
                return known.fork()
        grammar = self._compile(response_format)
        with self._lock:
            self._cached[response_format] = grammar
            while len(self._cached) > MAX_CACHED:
                self._cached.popitem(last=False)
            return grammar.fork()

    def _compile(self, response_format: ResponseFormat) -> TokenMatcher:
        calls = response_format.grammar is Grammar.LARK and "\ncall: " in response_format.schema
        param = "tools" if calls else "response_format"
        if self._tokenizer is None:
            raise InvalidRequest(f"this model's tokenizer does not support a {_WHAT[param]}", param=param)
        try:
            if response_format.grammar is Grammar.JSON_SCHEMA:
                _check(response_format.schema)
            matcher = LLMatcher(self._tokenizer, _grammar(response_format), log_level=0, limits=self._limits)
        except ValueError as error:
            raise _refusal(str(error), param) from None
        if matcher.is_error():
            raise _refusal(matcher.get_error(), param)
        grammar = TokenMatcher(matcher, param)
        grammar.fork().allowed()  # what fails at the first token is refused now
        return grammar


def _grammar(response_format: ResponseFormat) -> str:
    """The grammar in llguidance's format. Raises ValueError."""
    match response_format.grammar:
        case Grammar.LARK:
            return LLMatcher.grammar_from_lark(response_format.schema)
        case Grammar.JSON_OBJECT | Grammar.JSON_SCHEMA:
            # These override the schema's own x-guidance.
            schema = response_format.schema or _ANY_OBJECT
            return LLMatcher.grammar_from_json_schema(schema, overrides=JSON_OVERRIDES)


def schema_of(response_format: ResponseFormat) -> dict[str, Any]:
    """The JSON Schema of a format that is no Lark grammar, and that ``Grammars.start`` accepts."""
    schema = json.loads(response_format.schema or _ANY_OBJECT)
    return schema if isinstance(schema, dict) else {}


def _check(schema: str) -> None:
    """Raises ValueError for what the library would not keep, or not survive."""
    try:
        document = json.loads(schema)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    check_schema(document, len(schema))


def _refusal(reason: str, param: str) -> InvalidRequest:
    reason = _PLACE.sub("", reason)
    return InvalidRequest(f"the JSON schema is not supported: {reason.strip()[:_MAX_REASON_CHARS]}", param=param)


def _wrapped(tokenizer: Tokenizer) -> LLTokenizer | None:
    """Wrap the tokenizer. None if llguidance does not support it, or it has no end-of-sequence token."""
    if not tokenizer.eos_ids:
        return None
    slices = LLTokenizer.json_slices()
    try:
        return LLTokenizer(tokenizer.backend.to_str(), eos_token=sorted(tokenizer.eos_ids), slices=slices)
    except ValueError:
        return None
