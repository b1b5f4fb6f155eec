"""When the prefix of a prompt is sent to a text instance although items are still being encoded."""

from typing import Protocol

LEAST_TOKENS = 128
"""Shorter beginnings are computed in about the time that a call takes."""


class Dispatch(Protocol):
    """Whether to send a beginning of ``tokens``, after one of ``sent_tokens`` (0: none); items after it are missing."""

    def __call__(self, *, tokens: int, sent_tokens: int) -> bool: ...


def prefix(*, tokens: int, sent_tokens: int) -> bool:
    """Send each that is at least twice as long as the one before.

    A beginning is sent with its items each time, so that all of them together cost at most twice the longest.
    """
    return tokens >= max(LEAST_TOKENS, 2 * sent_tokens)
