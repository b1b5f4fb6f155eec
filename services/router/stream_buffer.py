"""Buffers a request's events, so that a slow caller never blocks the text instance."""

import asyncio
from collections.abc import Sequence

from triptych.domain.generation import ChatEvent, TokenChunk
from triptych.errors import TriptychError

MERGE_TOKENS = 64
MOST_EVENTS = 64


class StreamBuffer:
    """One writer, one reader. The length of the answer bounds what is buffered.

    The reader gets up to ``MOST_EVENTS`` events at a time, with chunks merged up to ``MERGE_TOKENS`` tokens each.
    """

    def __init__(self) -> None:
        self._events: list[ChatEvent] = []
        self._reader: asyncio.Future[None] | None = None
        """Set while the reader waits."""
        self._closed = False
        self._error: TriptychError | None = None

    def put(self, events: Sequence[ChatEvent]) -> None:
        waiting = self._events
        for event in events:
            last = waiting[-1] if waiting else None
            if isinstance(event, TokenChunk) and isinstance(last, TokenChunk) and _may_merge(last, event):
                waiting[-1] = TokenChunk(
                    last.token_ids + event.token_ids,
                    last.text + event.text,
                    last.choice,
                    last.logprobs + event.logprobs,
                )
            else:
                waiting.append(event)
        self._wake()

    def close(self, error: TriptychError | None) -> None:
        """End the stream: the reader gets what is buffered, then ``error`` if there is one."""
        self._closed, self._error = True, error
        self._wake()

    async def get(self) -> Sequence[ChatEvent]:
        """The next events; none at the end. Raises the error given to ``close``."""
        if not self._events and not self._closed:
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        if not self._events and self._error is not None:
            raise self._error
        events, self._events = self._events[:MOST_EVENTS], self._events[MOST_EVENTS:]
        return events

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


def _may_merge(last: TokenChunk, event: TokenChunk) -> bool:
    return last.choice == event.choice and len(last.token_ids) < MERGE_TOKENS
