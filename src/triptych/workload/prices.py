"""What devices cost, for an hour and for what they answer."""

from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Prices:
    """Cost of devices, in dollars."""

    usd_per_hour: float
    usd_per_million_tokens: float
    """Of prompts and answers."""
    usd_per_thousand_requests: float

    @classmethod
    def of(cls, usd_per_hour: float, lasted_s: float, answered: int, tokens: int) -> Self | None:
        """Of devices that answered so many requests in that time, with so many tokens of prompts and answers. None if they answered none."""
        if not answered:
            return None
        dollars = usd_per_hour * lasted_s / 3600
        return cls(usd_per_hour, 1e6 * dollars / tokens, 1000 * dollars / answered)

    def __str__(self) -> str:
        return (
            f"${self.usd_per_hour:.2f} per hour, ${self.usd_per_thousand_requests:.2f} per thousand requests, "
            f"${self.usd_per_million_tokens:.2f} per million tokens"
        )
