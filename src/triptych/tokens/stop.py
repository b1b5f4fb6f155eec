"""Stop strings over a stream of text."""

from collections.abc import Sequence
from typing import NamedTuple


class StopResult(NamedTuple):
    """``text`` may be sent now; once ``stopped`` is set nothing follows."""

    text: str
    stopped: bool


class StopStrings:
    """Ends a text before the stop string that is complete first, however the text is cut into pieces.

    No more is held back than may turn out to be the beginning of a stop string. Of strings that are complete at the
    same character, the one that starts first counts. Empty strings are ignored.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self._stopped = False

    def feed(self, text: str) -> StopResult:
        """Take a piece of text; what comes back may be older text than that."""
        if self._stopped:
            return StopResult("", stopped=True)
        text = self._held + text
        matches = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if matches:
            self._stopped, self._held = True, ""
            return StopResult(text[: min(matches)[1]], stopped=True)
        safe = len(text) - self._possible_prefix(text)
        self._held = text[safe:]
        return StopResult(text[:safe], stopped=False)

    def flush(self) -> str:
        """What is still held back, when the text has ended without a stop string."""
        text, self._held = self._held, ""
        return text

    def _possible_prefix(self, text: str) -> int:
        """Length of the longest end of ``text`` with which some stop string begins."""
        longest = min(len(text), max((len(stop) - 1 for stop in self._stops), default=0))
        for length in range(longest, 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
