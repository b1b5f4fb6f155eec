"""The source of randomness that is passed to pure code."""

from typing import Protocol


class Rng(Protocol):
    """Satisfied by ``random.Random``."""

    def random(self) -> float: ...

    def getrandbits(self, k: int, /) -> int: ...
