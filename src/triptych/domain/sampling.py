"""How the next token is chosen, what is told about it, and when to stop."""

from dataclasses import dataclass
from enum import Enum


class Grammar(Enum):
    """What an answer is held to."""

    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    LARK = "lark"
    """Any grammar, in Lark's form. The router's own, for tool calls: nobody else can ask for one."""


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """``schema`` is a JSON Schema as text, or a grammar; empty for JSON_OBJECT."""

    grammar: Grammar
    schema: str = ""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Defaults are the OpenAI API's. ``temperature`` 0 is greedy. ``seed`` None draws one per request.

    Bounds are checked by ``policy.admission``; an engine may rely on them.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    min_p: float = 0.0
    """Keep tokens that are at least this fraction as likely as the likeliest; 0 keeps all."""
    seed: int | None = None
    n: int = 1
    """Answers to the same prompt. Choice ``i`` draws with (seed, i, position)."""
    max_tokens: int | None = None
    """Most tokens to generate; None means as many as the context leaves."""
    min_tokens: int = 0
    """No end-of-sequence token, stop string or stop id counts before so many tokens."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    """Over prompt and answer; above 1 discourages what is there already."""
    frequency_penalty: float = 0.0
    """Over the answer, by how often a token is there."""
    presence_penalty: float = 0.0
    """Over the answer, by whether a token is there."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit)."""
    logprobs: int | None = None
    """How many alternatives are told per token, beside the one that was chosen; None tells nothing."""
    response_format: ResponseFormat | None = None
