"""Randomness as it is handed to what may not make its own."""

from typing import Protocol


class Rng(Protocol):
    """What ``random.Random`` satisfies."""

    def random(self) -> float: ...

    def getrandbits(self, k: int, /) -> int: ...
