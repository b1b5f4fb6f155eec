"""Sampling parameters: how tokens are drawn, which log-probabilities are returned, and when to stop.

The fields of ``SamplingParams`` are the single table of parameters: name, type, default, bounds, and the name in the
OpenAI API. The wire, the gateway, the SDK and admission derive theirs from it (``PARAMETERS``).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from types import MappingProxyType
from typing import Any, Self, TypeVar, get_type_hints

from triptych.domain.bounds import MAX_INT31, Between, Bound, Many, Pair, Size
from triptych.domain.rng import Rng

T = TypeVar("T")


class Grammar(Enum):
    """Grammar that an answer must match."""

    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    LARK = "lark"
    """A grammar in Lark syntax. Only the router makes these, for tool calls."""


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """``schema`` is a JSON Schema as text, or a grammar; empty for JSON_OBJECT."""

    grammar: Grammar
    schema: str = ""


TOKEN_ID = Between(0, MAX_INT31)
BIAS = Pair(TOKEN_ID, Between(-100, 100))
SCHEMA = Size(4 << 20)
"""Limit for a JSON Schema or grammar; the router's settings are tighter."""
SEED_BITS = 63


def _parameter(default: T, bound: Bound | None, about: str = "", *, api_name: str | None = None) -> T:
    """A row of the table. ``about`` is the REST API's description, ``api_name`` the parameter's name there."""
    return field(default=default, metadata={"bound": bound, "about": about, "api_name": api_name})


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Defaults are the OpenAI API's. A ``seed`` of None draws a random one per request.

    ``policy.admission`` enforces the bounds; engines rely on them.
    """

    temperature: float = _parameter(1.0, Between(0, 2), "0 is greedy.")
    top_p: float = _parameter(1.0, Between(0, 1), "0 keeps the likeliest token alone.")
    top_k: int = _parameter(0, Between(-1, MAX_INT31), "Keep the k most likely tokens; 0 and -1 keep all.")
    min_p: float = _parameter(0.0, Between(0, 1), "Keep tokens at least this fraction as likely as the likeliest.")
    seed: int | None = _parameter(None, Between(-(2**63), 2**63 - 1))
    """Choice ``i`` draws with (seed, i, position)."""
    n: int = _parameter(1, Between(1, 16), "Answers to the same prompt.")
    max_tokens: int | None = _parameter(None, Between(1, MAX_INT31))
    """Most tokens to generate; None for the rest of the context."""
    min_tokens: int = _parameter(
        0,
        Between(0, MAX_INT31),
        "End-of-sequence tokens, stop strings and stop ids are ignored before this many tokens.",
    )
    stop: tuple[str, ...] = _parameter((), Many(64, Size(1024, low=1), "strings"))
    stop_token_ids: tuple[int, ...] = _parameter((), Many(4096, TOKEN_ID, "tokens"))
    ignore_eos: bool = _parameter(False, None)
    repetition_penalty: float = _parameter(
        1.0, Between(1e-9, 10), "Applies to prompt and answer; above 1 discourages repetition."
    )
    """Logits are divided by it: with less they could leave the range of float32."""
    frequency_penalty: float = _parameter(0.0, Between(-2, 2))
    """Applies to the answer, by each token's count."""
    presence_penalty: float = _parameter(0.0, Between(-2, 2))
    """Applies to the answer, to each token in it."""
    logit_bias: tuple[tuple[int, float], ...] = _parameter((), Many(4096, BIAS, "tokens"))
    """(token id, value added to its logit)."""
    special_tokens: bool = _parameter(False, None, api_name="skip_special_tokens")
    """Whether the answer's text shows special tokens; the API has the opposite."""
    logprobs: int | None = _parameter(None, Between(0, 20), api_name="top_logprobs")
    """Number of alternatives to return per token, beside the chosen one; None returns no log-probabilities."""
    response_format: ResponseFormat | None = _parameter(None, None)
    """The schema's bound is ``SCHEMA``."""

    def seeded(self, rng: Rng) -> Self:
        """Sampling with a seed: a drawn one if there is none."""
        return self if self.seed is not None else replace(self, seed=rng.getrandbits(SEED_BITS))


@dataclass(frozen=True, slots=True)
class Parameter:
    """A row of the table. ``kind`` is the type of the field."""

    name: str
    kind: Any
    default: Any
    bound: Bound | None
    api_name: str
    about: str


def _parameters() -> Mapping[str, Parameter]:
    kinds = get_type_hints(SamplingParams)
    rows = {
        row.name: Parameter(
            row.name,
            kinds[row.name],
            row.default,
            row.metadata["bound"],
            row.metadata["api_name"] or row.name,
            row.metadata["about"],
        )
        for row in fields(SamplingParams)
    }
    return MappingProxyType(rows)


PARAMETERS = _parameters()
