"""When an instance that encodes, and has the language model as well, takes text requests (HeteroServe, section 5.3).

Vision first: it takes some only while it has no items, and while so many requests wait elsewhere that these cannot soon begin.
"""

from enum import Enum
from typing import Protocol

from triptych.domain.record import record

MOST_MOVES = 4
"""How often a request goes from where it waits to a lender."""


class LenderState(Enum):
    ENCODE_ONLY = "encode only"
    """An encoder that gets no text requests."""
    LENDING = "lending"
    FULL = "full"
    """An encoder that lends, and has as many requests as it may have."""


@record
class Lender:
    """A lender, as far as it is known."""

    state: LenderState
    items: int
    """Items that it encodes, or that are on their way to it."""
    requests: int
    """Text requests that wait or run there."""
    most: int
    """Requests that it may have."""


class Lending(Protocol):
    """The next state of a lender. ``waiting`` are the requests that text instances have not started, and ``above`` how many of them
    the text instances can well do without it.
    """

    def __call__(self, lender: Lender, *, waiting: int, above: int) -> LenderState: ...


def idle(lender: Lender, *, waiting: int, above: int) -> LenderState:
    """Begin to lend above ``above``, and end at its first item or below half of that, so that it does not change to and fro."""
    lends = lender.state is not LenderState.ENCODE_ONLY
    if lender.items or not (2 * waiting >= above if lends else waiting > above):
        return LenderState.ENCODE_ONLY
    return LenderState.FULL if lender.requests >= lender.most else LenderState.LENDING
