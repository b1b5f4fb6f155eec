"""Buffers a request's events, so that a slow caller never blocks the text instance."""

import asyncio
from collections import deque
from collections.abc import Sequence

from triptych.domain.generation import ChatEvent, TokenChunk
from triptych.errors import TriptychError

MERGE_TOKENS = 64
MOST_EVENTS = 64


class StreamBuffer:
    """One writer, one reader. The length of the answer bounds what is buffered.

    Events that were put together are delivered together. So a caller that has a token has all that was made of it, and can
    go on from there at another router. A choice's end comes with its last token. Beyond that the reader gets up to
    ``MOST_EVENTS`` events at a time, with chunks merged up to ``MERGE_TOKENS`` tokens each.
    """

    def __init__(self) -> None:
        self._groups: deque[list[ChatEvent]] = deque()
        """Events that are delivered together."""
        self._reader: asyncio.Future[None] | None = None
        """Set while the reader waits."""
        self._closed = False
        self._error: TriptychError | None = None

    def put(self, events: Sequence[ChatEvent]) -> None:
        group = self._groups[-1] if self._groups else []
        if not group or len(group) >= MOST_EVENTS or _merged(group[-1], events[0]) is None:
            group = []
            self._groups.append(group)
        for event in events:
            merged = _merged(group[-1], event) if group else None
            if merged is None:
                group.append(event)
            else:
                group[-1] = merged
        self._wake()

    def close(self, error: TriptychError | None) -> None:
        """End the stream: the reader gets what is buffered, then ``error`` if there is one."""
        self._closed, self._error = True, error
        self._wake()

    async def get(self) -> Sequence[ChatEvent]:
        """The next events; none at the end. Raises the error given to ``close``."""
        if not self._groups and not self._closed:
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        if not self._groups and self._error is not None:
            raise self._error
        events: list[ChatEvent] = []
        while self._groups and (not events or len(events) + len(self._groups[0]) <= MOST_EVENTS):
            events += self._groups.popleft()
        return events

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


def _merged(last: ChatEvent, event: ChatEvent) -> TokenChunk | None:
    """Join both events to one chunk, if they are chunks of one choice."""
    if not (isinstance(last, TokenChunk) and isinstance(event, TokenChunk)):
        return None
    if last.choice != event.choice or len(last.token_ids) >= MERGE_TOKENS:
        return None
    return TokenChunk(
        last.token_ids + event.token_ids, last.text + event.text, last.choice, last.logprobs + event.logprobs
    )
