"""How much of the encoders' arenas open calls of ``Resolve`` may hold, so that chats always have the rest."""

from collections import Counter
from collections.abc import Callable, Mapping

from triptych.domain.item_plan import Content
from triptych.errors import InvalidRequest, Overloaded

Sizes = Mapping[Content, int]
"""Bytes of embeddings in an arena."""


class HeldShare:
    """Bytes of embeddings that open calls hold or are about to. What several of them hold counts once."""

    def __init__(self, arena_bytes: Callable[[], int], share: float, *, retry_after_s: float) -> None:
        """``arena_bytes`` gives the bytes of all arenas, 0 if they are unknown; ``share`` is of these."""
        self._arena_bytes = arena_bytes
        self._share = share
        self._retry_after_s = retry_after_s
        self._calls: Counter[Content] = Counter()
        self._sizes: dict[Content, int] = {}

    @property
    def nbytes(self) -> int:
        return sum(self._sizes.values())

    def take(self, sizes: Sizes, param: str) -> None:
        """Count what a call holds until ``give_back``. ``param`` is the field of the request that names it.

        Raises Overloaded if other calls hold too much, InvalidRequest if this one alone is too large.
        """
        # While no encoder is known, nothing can be held; the request then waits for one, or fails.
        if most := int(self._share * self._arena_bytes()):
            own, held = sum(sizes.values()), self.nbytes
            more = sum(nbytes for content, nbytes in sizes.items() if content not in self._sizes)
            if own > most:
                raise InvalidRequest(
                    f"the request's embeddings take {own} bytes, open calls of Resolve may hold {most}", param=param
                )
            if more and held + more > most:
                raise Overloaded(
                    f"open calls of Resolve hold {held} of {most} bytes of embeddings, this one needs {more} more",
                    retry_after_s=self._retry_after_s,
                )
        for content, nbytes in sizes.items():
            self._calls[content] += 1
            self._sizes.setdefault(content, nbytes)

    def give_back(self, sizes: Sizes) -> None:
        """The call that took these has ended."""
        for content in sizes:
            self._calls[content] -= 1
            if not self._calls[content]:
                del self._calls[content], self._sizes[content]
