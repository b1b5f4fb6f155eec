"""How many tokens answers will have, as a router expects from those that have ended.

Within a class each token is taken to be the last one with the same probability (a geometric length). So the mean is
what is still to come, whatever a sequence has generated, and a limit cuts off a known share. The mean is that of the
last few hundred answers. Those that their limit has ended count with their tokens, but not as ends. Answers that were
cancelled or failed do not count.
"""

from dataclasses import dataclass
from math import ceil, expm1

_HALF_LIFE = 200
"""Answers after which one counts half."""
_FADE = 0.5 ** (1 / _HALF_LIFE)
_PRIOR_TOKENS = 256
"""Mean of a class of which nothing is known ..."""
_PRIOR_ANSWERS = 8
"""... as if so many answers had been seen."""
_FEWEST_ENDS = 1e-6
"""Answers that never end by themselves have no mean: only their limits count."""


@dataclass(slots=True)
class _Seen:
    """Tokens and ends of the answers of one class. Older ones fade."""

    tokens: float = float(_PRIOR_TOKENS * _PRIOR_ANSWERS)
    ends: float = float(_PRIOR_ANSWERS)
    mean: float = float(_PRIOR_TOKENS)
    """Tokens of an answer without a limit, at least 1."""

    def add(self, tokens: int, *, end: bool) -> None:
        self.tokens = _FADE * self.tokens + tokens
        self.ends = _FADE * self.ends + end
        self.mean = max(1.0, self.tokens / max(self.ends, _FEWEST_ENDS))


class ExpectedOutput:
    """Owner of how many tokens answers will have.

    Part of ``machine.router.cluster.ClusterMachine``, which alone changes it. ``with_items`` is the class of an answer: to items as well,
    or to text alone; None stands for either.
    """

    def __init__(self) -> None:
        self._seen: dict[bool | None, _Seen] = {}

    def predict(self, with_items: bool | None, max_tokens: int) -> int:
        """Tokens of an answer of at most ``max_tokens``, and never more than these. At least 1, if that many may come."""
        mean = self._seen.get(with_items, _NOTHING_SEEN).mean
        return min(max_tokens, ceil(-mean * expm1(-max_tokens / mean)))

    def observe(self, with_items: bool, tokens: int, *, by_itself: bool) -> None:
        """An answer is over. ``by_itself``: not because of its limit."""
        for answer_class in (with_items, None):
            if (seen := self._seen.get(answer_class)) is None:
                seen = self._seen[answer_class] = _Seen()
            seen.add(tokens, end=by_itself)

    def forget(self) -> None:
        """Another model is served."""
        self._seen.clear()


_NOTHING_SEEN = _Seen()
