"""Whether an instance that could go on with an answer itself hands it over after the prefill; and whether there is KV memory for one.

An instance without the decode stage always transfers.
"""

from collections.abc import Sequence
from typing import Protocol

from triptych.domain.record import record

LEAST_OUTPUT_TOKENS = 32
"""Shorter answers are over in about the time that their keys and values take to travel."""
ANY_ROOM = 1 << 40
"""KV tokens of an instance that does not say how many it can hold."""


class TransferRule(Protocol):
    """Whether to transfer an answer of ``expected_tokens`` for each choice. ``here_tokens`` are those that the instance is still
    expected to decode, ``there_tokens`` those of the least loaded other one that takes its keys and values.
    """

    def __call__(self, *, expected_tokens: int, here_tokens: int, there_tokens: int) -> bool: ...


def always(*, expected_tokens: int, here_tokens: int, there_tokens: int) -> bool:
    """Transfer whatever the loads."""
    del expected_tokens, here_tokens, there_tokens
    return True


def by_need(*, expected_tokens: int, here_tokens: int, there_tokens: int) -> bool:
    """A long answer, if the other one has less to decode even with it."""
    return expected_tokens >= LEAST_OUTPUT_TOKENS and there_tokens + expected_tokens < here_tokens


@record
class KvRoom:
    """Room in the KV memory of an instance that decodes, in tokens."""

    kv_tokens: int
    """All the KV memory; 0 if unknown."""
    own_tokens: int
    """What the answers of this router take there, with what is expected of them."""
    free_tokens: int | None = None
    """Of its last report; None if unknown."""
    new_tokens: int = 0
    """What this router has given to it since then."""
    idle: bool = False
    """Whether it has nothing to do, as far as is known."""

    @property
    def room(self) -> int:
        """Tokens of further answers that it has memory for."""
        whole = self.kv_tokens or ANY_ROOM
        if self.idle:
            return whole
        reported = whole if self.free_tokens is None else self.free_tokens - self.new_tokens
        return min(whole - self.own_tokens, reported)


def has_room(rooms: Sequence[int], needed: int, promised: int) -> bool:
    """Whether one of the instances has room for an answer, and all of them together have it beside what is ``promised`` to
    answers that are still being prefilled.
    """
    return max(rooms, default=0) >= needed and sum([max(0, room) for room in rooms]) - promised >= needed
