"""Between a request's text stream and its caller: a caller who reads slowly never holds the text instance up."""

import asyncio
from collections import deque
from collections.abc import Sequence

from triptych.domain.generation import ChatEvent, TokenChunk
from triptych.errors import TriptychError

MERGE_TOKENS = 64
MOST_EVENTS = 64


class StreamBuffer:
    """One writer, one reader. What waits is bounded by the answer.

    The reader gets what waits together: up to ``MOST_EVENTS`` at a time, and chunks merged up to ``MERGE_TOKENS`` each.
    """

    def __init__(self) -> None:
        self._events: deque[ChatEvent] = deque()
        self._filled = asyncio.Event()
        self._closed = False
        self._error: TriptychError | None = None

    def put(self, event: ChatEvent) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(event, TokenChunk) and isinstance(last, TokenChunk) and _may_merge(last, event):
            self._events[-1] = TokenChunk(
                last.token_ids + event.token_ids, last.text + event.text, last.choice, last.logprobs + event.logprobs
            )
        else:
            self._events.append(event)
        self._filled.set()

    def close(self, error: TriptychError | None) -> None:
        """Nothing more will come; the reader gets what is there, then ``error`` if there is one."""
        self._closed, self._error = True, error
        self._filled.set()

    async def get(self) -> Sequence[ChatEvent]:
        """The next events; none when it is over. Raises what it was closed with."""
        while not self._events:
            if self._closed:
                if self._error is not None:
                    raise self._error
                return ()
            self._filled.clear()
            await self._filled.wait()
        return [self._events.popleft() for _ in range(min(len(self._events), MOST_EVENTS))]


def _may_merge(last: TokenChunk, event: TokenChunk) -> bool:
    return last.choice == event.choice and len(last.token_ids) < MERGE_TOKENS
