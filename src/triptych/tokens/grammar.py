"""Response formats and tool calls as grammars over a model's tokens, through ``llguidance``.

No torch, and bounded in time and memory.
"""

import re
from collections import OrderedDict
from threading import Lock
from typing import Self

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from triptych.domain.sampling import Grammar, ResponseFormat
from triptych.errors import InvalidRequest
from triptych.tokens.tokenizer import Tokenizer

MAX_CACHED = 32
_WHAT = {"response_format": "response format", "tools": "call of a tool"}
"""What an answer is held to, by the request field that asks for it."""
_ANY_OBJECT = '{"type": "object"}'
_MAX_REASON_CHARS = 300
_PLACE = re.compile(r"\Aat \d+\(\d+\): |\n.*", re.DOTALL)
"""Of a fault in a grammar that the caller has not written."""
_WHITE_SPACE = r" |\n( {0,32}|\t{0,8})"
"""Between the tokens of JSON: a space, or the beginning of an indented line."""


class TokenMatcher:
    """``ports.TokenGrammar``."""

    def __init__(self, matcher: LLMatcher, param: str) -> None:
        """``param`` is the request field that asked for it."""
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
        if self._matcher.is_error():  # of tokens that are allowed nothing else can go wrong
            raise InvalidRequest(f"the {_WHAT[self._param]} has become too complex to follow", param=self._param)


class Grammars:
    """Compiles formats for one tokenizer and keeps the last ``MAX_CACHED`` of them. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Takes as long as the vocabulary is large: about a second for 150,000 tokens."""
        self._tokenizer = _wrapped(tokenizer)
        self._limits = LLParserLimits(
            # By the library's own account 20, 14 and 3 ms of a core, and 20 MB.
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
        """The format at the beginning of an answer.

        Raises InvalidRequest for what is no JSON Schema, uses what cannot be enforced, or is too complex; and for
        every format where the model's tokenizer is of a kind that cannot be held to one.
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
        param = "tools" if response_format.grammar is Grammar.LARK else "response_format"
        if self._tokenizer is None:
            raise InvalidRequest(f"this model's tokenizer cannot be held to a {_WHAT[param]}", param=param)
        try:
            matcher = LLMatcher(self._tokenizer, _grammar(response_format), log_level=0, limits=self._limits)
        except ValueError as error:
            raise _refusal(str(error), param) from None
        if not matcher.is_error():
            matcher.deep_copy().compute_bitmask()
        if matcher.is_error():
            raise _refusal(matcher.get_error(), param)
        return TokenMatcher(matcher, param)


def _grammar(response_format: ResponseFormat) -> str:
    """As llguidance reads it. Raises ValueError."""
    match response_format.grammar:
        case Grammar.LARK:
            return LLMatcher.grammar_from_lark(response_format.schema)
        case Grammar.JSON_OBJECT | Grammar.JSON_SCHEMA:
            schema = _ANY_OBJECT if response_format.grammar is Grammar.JSON_OBJECT else response_format.schema
            return LLMatcher.grammar_from_json_schema(
                schema,
                # Whatever the schema's own x-guidance says. Some models never stop with white space.
                overrides={
                    "item_separator": ",",
                    "key_separator": ":",
                    "whitespace_pattern": _WHITE_SPACE,
                    "lenient": False,
                },
            )


def _refusal(reason: str, param: str) -> InvalidRequest:
    reason = _PLACE.sub("", reason)
    return InvalidRequest(f"the JSON schema cannot be followed: {reason.strip()[:_MAX_REASON_CHARS]}", param=param)


def _wrapped(tokenizer: Tokenizer) -> LLTokenizer | None:
    """None for the tokenizers that llguidance does not know the bytes of, and those that have no end."""
    if not tokenizer.eos_ids:
        return None
    slices = LLTokenizer.json_slices()
    try:
        return LLTokenizer(tokenizer.backend.to_str(), eos_token=sorted(tokenizer.eos_ids), slices=slices)
    except ValueError:
        return None
