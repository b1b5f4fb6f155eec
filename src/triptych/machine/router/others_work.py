"""Whether other routers send work to the same instances, which a router learns only from load reports."""

_KEPT = 0.99
"""Of what was observed, with each further report."""
_MUCH = 0.2
"""Share of what the instances have to do. Of a single router it is none but for a moment: its own work counts until it knows of its end."""
_ENOUGH = 20
"""Requests or items that are reported as others' by chance, before there are many reports."""
_MOST = 1024
"""Of one report that count, as an instance may report nonsense."""


class OthersWork:
    """Part of ``machine.router.kept_pool.KeptPool``: how much of the last reports' requests or items is not this router's."""

    __slots__ = ("_others", "_reported", "is_much")

    def __init__(self) -> None:
        self.is_much = False
        self._reported = 0.0
        self._others = 0.0

    def observe(self, reported: int, own: int) -> None:
        """An instance reports so many, and this router has so many there."""
        if reported or own:
            reported = min(reported, _MOST)
            self._reported = _KEPT * self._reported + reported
            self._others = _KEPT * self._others + reported - min(own, _MOST)
            self.is_much = self._others > _MUCH * (self._reported + _ENOUGH)
