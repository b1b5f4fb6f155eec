"""Retries: only of errors that may go away, with backoff, within a budget.

The budget is a token bucket, as in gRPC's retry throttling: a retry takes a token, a success returns part of one. When
a server fails for everyone, the bucket empties and retries stop adding to its load.
"""

from dataclasses import dataclass

from triptych.errors import TriptychError
from triptych.ports import Rng


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """``RetryPolicy(max_attempts=1)`` never retries."""

    max_attempts: int = 4
    """Calls in total, including the first."""
    initial_backoff_s: float = 0.1
    """Bound of the first wait; it doubles with every attempt. Waits are uniform from 0 to the bound."""
    max_backoff_s: float = 5.0
    budget: float = 10.0
    """Retries that a client may spend in a row, over all its calls."""
    refill: float = 0.1
    """Retries that each success restores."""

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise ValueError(f"max_attempts is {self.max_attempts}, the least is 1")
        if min(self.initial_backoff_s, self.max_backoff_s, self.budget, self.refill) < 0:
            raise ValueError("a retry policy has no negative values")


class Retries:
    """The remaining retry budget of one client."""

    def __init__(self, policy: RetryPolicy, rng: Rng) -> None:
        self._policy = policy
        self._rng = rng
        self._left = policy.budget

    def succeeded(self) -> None:
        self._left = min(self._policy.budget, self._left + self._policy.refill)

    def wait_s(self, error: TriptychError, attempt: int, remaining_s: float) -> float | None:
        """Wait before attempt ``attempt + 1``; None to raise the error instead.

        ``remaining_s`` is the time left until the caller's deadline. The wait is the server's ``retry_after_s`` plus
        jitter, so that clients refused together do not return together.
        """
        policy = self._policy
        if not error.retryable or attempt >= policy.max_attempts or self._left < 1:
            return None
        bound_s = min(policy.max_backoff_s, policy.initial_backoff_s * 2.0 ** (attempt - 1))
        wait_s = (error.retry_after_s or 0.0) + bound_s * self._rng.random()
        if wait_s >= remaining_s:
            return None
        self._left -= 1
        return wait_s
