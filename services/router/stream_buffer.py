"""Buffers a request's events, so that a slow caller never blocks the text instance."""

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import chain

from triptych.domain.generation import ChatEvent, TokenChunk
from triptych.errors import TriptychError

MERGE_TOKENS = 64
MOST_EVENTS = 64


class StreamBuffer:
    """One writer, one reader. The length of the answer bounds what is buffered.

    Events that were put together are delivered together. So a caller that has a token has all that was made of it, and can
    go on from there at another router. A choice's end comes with its last token. Beyond that the reader gets up to
    ``MOST_EVENTS`` events at a time, in which chunks are merged up to ``MERGE_TOKENS`` tokens each.
    """

    def __init__(self, collect_s: float = 0.0) -> None:
        """``collect_s``: how long the events of one delivery wait for others before the end, seconds."""
        self._collect_s = collect_s
        self._groups: deque[Sequence[ChatEvent]] = deque()
        """Events that are delivered together."""
        self._reader: asyncio.Future[None] | None = None
        """Set while the reader waits: an event would cost twice as much, for each token."""
        self._ended = asyncio.Event()
        self._error: TriptychError | None = None

    def put(self, events: Sequence[ChatEvent]) -> None:
        self._groups.append(events)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def close(self, error: TriptychError | None) -> None:
        """End the stream: the reader gets what is buffered, then ``error`` if there is one."""
        self._error = error
        self._ended.set()
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def get(self) -> Sequence[ChatEvent]:
        """The next events; none at the end. Raises the error given to ``close``."""
        if not self._groups and not self._ended.is_set():
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        if self._collect_s and len(self._groups) < MOST_EVENTS:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._collect_s):
                    await self._ended.wait()
        if not self._groups and self._error is not None:
            raise self._error
        events: list[ChatEvent] = []
        while self._groups and (not events or len(events) + len(self._groups[0]) <= MOST_EVENTS):
            events += self._groups.popleft()
        return _merged(events) if len(events) > 1 else events


def _merged(events: Iterable[ChatEvent]) -> list[ChatEvent]:
    """The events, where chunks of one choice that follow each other are one."""
    merged: list[ChatEvent] = []
    chunks: list[TokenChunk] = []
    tokens = 0
    for event in (*events, None):
        if chunks and not (
            isinstance(event, TokenChunk) and event.choice == chunks[0].choice and tokens < MERGE_TOKENS
        ):
            merged.append(_joined(chunks))
            chunks, tokens = [], 0
        if isinstance(event, TokenChunk):
            chunks.append(event)
            tokens += len(event.token_ids)
        elif event is not None:
            merged.append(event)
    return merged


def _joined(chunks: Sequence[TokenChunk]) -> TokenChunk:
    """One chunk of these, which are of one choice."""
    if len(chunks) == 1:
        return chunks[0]
    return TokenChunk(
        tuple(chain.from_iterable([chunk.token_ids for chunk in chunks])),
        "".join([chunk.text for chunk in chunks]),
        chunks[0].choice,
        tuple(chain.from_iterable([chunk.logprobs for chunk in chunks])),
    )
