"""How the next token is chosen, and when to stop."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Defaults are the OpenAI API's. ``temperature`` 0 is greedy. ``seed`` None draws one per request.

    Bounds are checked by ``policy.admission``; an engine may rely on them.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    seed: int | None = None
    max_tokens: int | None = None
    """Most tokens to generate; None means as many as the context leaves."""
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
