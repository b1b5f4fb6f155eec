"""Stop strings in streamed text."""

from collections.abc import Sequence
from typing import NamedTuple


class StopResult(NamedTuple):
    """``text`` may be sent now; after ``stopped`` nothing follows."""

    text: str
    stopped: bool


class StopStrings:
    """Ends a text before the stop string that is completed first, however the text is chunked.

    Only a possible beginning of a stop string is held back. Of strings completed at the same character, the one that
    starts first counts. Empty strings are ignored.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self._stopped = False

    def feed(self, text: str, *, counts: bool = True) -> StopResult:
        """Add a piece of text. Returns text that is safe to send, which may be older.

        With ``counts=False`` a stop string completed by this piece is ignored.
        """
        if self._stopped:
            return StopResult("", stopped=True)
        if not self._stops:
            return StopResult(text, stopped=False)
        held, text = len(self._held), self._held + text
        # Matches that end within the held text were ignored before.
        hits = ((text.find(stop, max(0, held - len(stop) + 1)), stop) for stop in self._stops if counts)
        matches = [(start + len(stop), start) for start, stop in hits if start >= 0]
        if matches:
            self._stopped, self._held = True, ""
            return StopResult(text[: min(matches)[1]], stopped=True)
        safe = len(text) - self._possible_prefix(text)
        self._held = text[safe:]
        return StopResult(text[:safe], stopped=False)

    def flush(self) -> str:
        """The held text, when the answer ends without a stop string."""
        text, self._held = self._held, ""
        return text

    def _possible_prefix(self, text: str) -> int:
        """Length of the longest suffix of ``text`` that is a prefix of a stop string."""
        longest = min(len(text), max((len(stop) - 1 for stop in self._stops), default=0))
        for length in range(longest, 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
