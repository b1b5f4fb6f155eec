"""A continuation: a request with the tokens of each unfinished choice that its caller already has (docs/adr/0031)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ContinuedChoice:
    """A choice that has not ended, and the tokens of it that the caller has. They are not sent again."""

    choice: int
    token_ids: tuple[int, ...]


def begun(choices: int, continued: Sequence[ContinuedChoice]) -> Mapping[int, tuple[int, ...]]:
    """The choices to run of ``choices``, and the tokens that each has already: all of them, and none, for a new answer."""
    if not continued:
        return dict.fromkeys(range(choices), ())
    return {choice.choice: choice.token_ids for choice in continued}
