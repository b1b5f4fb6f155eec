"""Whether an instance gets the prefix of a prompt from other instances, which have computed it, instead of computing it itself."""

from typing import Protocol

from triptych.domain.record import record

LEAST_TOKENS = 512
"""Shorter beginnings are computed in about the time that leases and pulls take."""
_MARGIN = 2.0
"""Predicted times are often wrong, and a pull takes bandwidth and a holder's time as well."""


@record
class PrefixGain:
    """Gain of a beginning that others hold, beyond what the instance has itself."""

    tokens: int
    compute_s: float | None = None
    """To compute it there; None if no profile says."""
    pull_s: float | None = None
    """To pull it; None if no profile says."""


class Prefixes(Protocol):
    """Whether to pull it."""

    def __call__(self, gain: PrefixGain) -> bool: ...


def always(gain: PrefixGain) -> bool:
    """Pull whatever there is."""
    return gain.tokens > 0


def by_cost(gain: PrefixGain) -> bool:
    """A long one; where profiles tell, if computing it takes clearly longer than pulling it."""
    if gain.tokens < LEAST_TOKENS:
        return False
    return gain.compute_s is None or gain.pull_s is None or gain.compute_s > _MARGIN * gain.pull_s
