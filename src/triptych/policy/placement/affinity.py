"""Whether an item should go to an encoder that holds its embedding, or is encoding it, rather than to the one with least to do."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from triptych.domain.item_plan import Content

_WRONG_SHARE = 0.1
"""Of the hints of what an encoder holds; they are told to routers within milliseconds, so far fewer are wrong."""


class Holding(NamedTuple):
    """An encoder that is believed to have an embedding, or to have it soon."""

    name: str
    """Address of the encoder."""
    encoding: bool = False
    """Whether it is encoding it now."""
    published: bool = False
    """Whether it says itself what it holds, so that the hint ends when the embedding does."""


Having = Callable[[Content], Sequence[Holding]]
"""The encoders that are believed to have a content's embedding."""


def nothing_held(content: Content) -> Sequence[Holding]:
    """No embedding is known."""
    del content
    return ()


def pays(holding: Holding, pending: float, elsewhere: float, item: float) -> bool:
    """Whether the item should go there, rather than be encoded elsewhere.

    ``pending`` is the work of that encoder, ``elsewhere`` that of the other one without the item, ``item`` that of the item:
    all in tokens, or all in seconds.

    An item that is being encoded is somewhere in what is pending there: half of that comes before it. It may be done later
    than elsewhere by its own work, as that much work is saved. One that is held is served at once, or if that is wrong, after
    what is pending and itself. Where the encoder does not publish what it holds, how often that is wrong is unknown: it may
    have the item's work more to do, which is what a right hint saves.
    """
    if holding.encoding:
        return (pending + item) / 2 <= elsewhere + 2 * item
    if holding.published:
        return _WRONG_SHARE * (pending + item) <= elsewhere + item
    return pending <= elsewhere + item


def counted(holding: Holding, item: int) -> int:
    """The item's tokens, as far as they are further work for that encoder."""
    return 0 if holding.encoding or holding.published else item
