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

    def feed(self, text: str, *, counts: bool = True) -> StopResult:
        """Take a piece of text; what comes back may be older text than that.

        A stop string that this piece completes is passed over when it does not count.
        """
        if self._stopped:
            return StopResult("", stopped=True)
        held, text = len(self._held), self._held + text
        # What ends within the text that is held was passed over before.
        found = ((text.find(stop, max(0, held - len(stop) + 1)), stop) for stop in self._stops if counts)
        matches = [(start + len(stop), start) for start, stop in found if start >= 0]
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
