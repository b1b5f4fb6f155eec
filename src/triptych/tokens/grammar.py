"""Response formats as grammars over a model's tokens, through ``llguidance``: no torch, and bounded in time and memory."""

from collections import OrderedDict
from threading import Lock
from typing import Self

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from triptych.domain.sampling import Grammar, ResponseFormat
from triptych.errors import InvalidRequest
from triptych.tokens.tokenizer import Tokenizer

MAX_CACHED = 32
_PARAM = "response_format"
_ANY_OBJECT = '{"type": "object"}'
_MAX_REASON_CHARS = 300
_WHITE_SPACE = r" |\n( {0,32}|\t{0,8})"
"""Between the tokens of JSON: a space, or the beginning of an indented line."""


class JsonGrammar:
    """``ports.TokenGrammar``."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def fork(self) -> Self:
        return type(self)(self._matcher.deep_copy())

    def allowed(self) -> bytes:
        mask = self._matcher.compute_bitmask()
        self._check()
        return mask

    def accept(self, token_id: int) -> None:
        self._matcher.consume_token(token_id)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():  # of tokens that are allowed nothing else can go wrong
            raise InvalidRequest("the response format has become too complex to follow", param=_PARAM)


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
        self._cached: OrderedDict[ResponseFormat, JsonGrammar] = OrderedDict()
        self._lock = Lock()

    def start(self, response_format: ResponseFormat) -> JsonGrammar:
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

    def _compile(self, response_format: ResponseFormat) -> JsonGrammar:
        if self._tokenizer is None:
            raise InvalidRequest("this model's tokenizer cannot be held to a response format", param=_PARAM)
        schema = _ANY_OBJECT if response_format.grammar is Grammar.JSON_OBJECT else response_format.schema
        try:
            text = LLMatcher.grammar_from_json_schema(
                schema,
                # Whatever the schema's own x-guidance says. Some models never stop with white space.
                overrides={
                    "item_separator": ",",
                    "key_separator": ":",
                    "whitespace_pattern": _WHITE_SPACE,
                    "lenient": False,
                },
            )
        except ValueError as error:
            raise _refusal(str(error)) from None
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=self._limits)
        if not matcher.is_error():
            matcher.deep_copy().compute_bitmask()
        if matcher.is_error():
            raise _refusal(matcher.get_error())
        return JsonGrammar(matcher)


def _refusal(reason: str) -> InvalidRequest:
    return InvalidRequest(f"the JSON schema cannot be followed: {reason.strip()[:_MAX_REASON_CHARS]}", param=_PARAM)


def _wrapped(tokenizer: Tokenizer) -> LLTokenizer | None:
    """None for the tokenizers that llguidance does not know the bytes of, and those that have no end."""
    if not tokenizer.eos_ids:
        return None
    slices = LLTokenizer.json_slices()
    try:
        return LLTokenizer(tokenizer.backend.to_str(), eos_token=sorted(tokenizer.eos_ids), slices=slices)
    except ValueError:
        return None
