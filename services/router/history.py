"""The most recently finished requests: their timelines, and what the chats among them asked for."""

from collections import OrderedDict, deque
from collections.abc import Iterable
from itertools import islice

from triptych.domain.recent import EndedChat, RecentChats
from triptych.domain.timeline import Timeline

MOST_AT_ONCE = 256
"""Chats of one answer: making a document of them must not hold up the event loop."""


class History:
    """Owner of what has ended at a router: keeps the timelines of the last ``limit`` requests by id, and as many chats."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._timelines: OrderedDict[str, Timeline] = OrderedDict()
        self._chats: deque[EndedChat] = deque(maxlen=limit)
        self._ended = 0
        """Chats that were ever added."""
        self._refused = self._unprepared = 0

    def __len__(self) -> int:
        return len(self._timelines)

    def add(self, timeline: Timeline) -> None:
        self._timelines[timeline.request_id] = timeline
        self._timelines.move_to_end(timeline.request_id)
        while len(self._timelines) > self._limit:
            self._timelines.popitem(last=False)

    def add_chat(self, chat: EndedChat) -> None:
        self._chats.append(chat)
        self._ended += 1

    def count_unprepared(self) -> None:
        """A chat ended before its sizes were known."""
        self._unprepared += 1

    def count_refused(self) -> None:
        """A chat was refused."""
        self._refused += 1

    def get(self, request_id: str) -> Timeline | None:
        return self._timelines.get(request_id)

    def since(self, position: int | None, running_since_s: Iterable[float], now_s: float) -> RecentChats:
        """The oldest chats from a position on, at most ``MOST_AT_ONCE``; from the present if there is none."""
        first = self._ended - len(self._chats)
        wanted = self._ended if position is None else min(max(position, 0), self._ended)
        start = max(wanted, first)
        chats = list(islice(self._chats, start - first, start - first + MOST_AT_ONCE))
        return RecentChats(
            position=start + len(chats),
            missed=start - wanted,
            chats=chats,
            left=self._ended - start - len(chats),
            refused=self._refused,
            unprepared=self._unprepared,
            running_since_s=list(running_since_s),
            now_s=now_s,
        )
