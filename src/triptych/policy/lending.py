"""When an instance that encodes, and has the language model as well, takes text requests (HeteroServe, section 5.3).

Vision first: it takes some only while it has no items, and while so many requests wait elsewhere that these cannot soon begin.
"""

from enum import Enum
from typing import Protocol

from triptych.domain.record import record
from triptych.policy.backlog import Work, ends_s
from triptych.policy.routing import Candidate


class LenderState(Enum):
    ENCODE_ONLY = "encode only"
    """It gets no text requests."""
    LENDING = "lending"
    FULL = "full"
    """It lends, and has as many requests as it may have."""


@record
class Lender:
    """What is known of one."""

    state: LenderState
    items: int
    """That it encodes, or that are on their way to it."""
    requests: int
    """That wait or run there."""
    most: int
    """Requests that it may have."""


class Lending(Protocol):
    """The next state of a lender. ``waiting`` are the requests that text instances have not started, and ``above`` how many of them
    the text instances can well do without it.
    """

    def __call__(self, lender: Lender, *, waiting: int, above: int) -> LenderState: ...


def idle(lender: Lender, *, waiting: int, above: int) -> LenderState:
    """It begins to lend above ``above``, and ends at its first item or below half of that, so that it does not change to and fro."""
    lends = lender.state is not LenderState.ENCODE_ONLY
    if lender.items or not (2 * waiting >= above if lends else waiting > above):
        return LenderState.ENCODE_ONLY
    return LenderState.FULL if lender.requests >= lender.most else LenderState.LENDING


def ends_earlier(here: Candidate, there: Candidate, work: Work) -> bool:
    """Whether a request that waits ``here``, the last of those that do, would be done earlier ``there``.

    What it asks for is part of the load here. In predicted seconds, or in tokens where these are not known.
    """
    end_here, end_there = (
        ends_s([here.backlog], Work(0, answer_tokens=work.answer_tokens)),
        ends_s([there.backlog], work),
    )
    if end_here is None or end_there is None:
        return there.pending_tokens + work.tokens + work.answer_tokens < here.pending_tokens
    return end_there[0] < end_here[0]
