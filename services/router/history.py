"""The timelines of the most recently finished requests."""

from collections import OrderedDict

from triptych.domain.timeline import Timeline


class History:
    """Owner of a router's timelines: keeps the last ``limit`` timelines by request id."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._timelines: OrderedDict[str, Timeline] = OrderedDict()

    def __len__(self) -> int:
        return len(self._timelines)

    def add(self, timeline: Timeline) -> None:
        self._timelines[timeline.request_id] = timeline
        self._timelines.move_to_end(timeline.request_id)
        while len(self._timelines) > self._limit:
            self._timelines.popitem(last=False)

    def get(self, request_id: str) -> Timeline | None:
        return self._timelines.get(request_id)
