"""Delivers one request's tokens from the engine loop to its reader."""

import asyncio
import contextlib
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from triptych.domain.engine import EngineOutput, Scores
from triptych.domain.generation import FinishReason
from triptych.errors import TriptychError


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens of one choice that were ready together. ``finish_reason`` is set on its last."""

    choice: int
    token_ids: tuple[int, ...]
    scores: tuple[Scores, ...]
    finish_reason: FinishReason | None


@dataclass(slots=True)
class _Unread:
    """Tokens of one choice that have not been read."""

    token_ids: list[int] = field(default_factory=list)
    scores: list[Scores] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    has_ended: bool = False
    """No further tokens will come."""
    first_token_s: float | None = None
    last_token_s: float | None = None
    preemptions: int = 0
    preempted_s: float = 0.0
    """The gaps between tokens in which it was preempted."""


class Sequences:
    """One request in the engine with all its choices. The engine loop writes, one reader reads.

    At most ``max_tokens`` tokens per choice are buffered, however slow the reader is.
    """

    def __init__(self, choices: Collection[int], on_over: Callable[[], None], on_gap: Callable[[float], None]) -> None:
        """``choices`` are those that run. ``on_over`` is called once, when no further tokens of any of them will come.

        ``on_gap`` gets the seconds between two tokens of a choice.
        """
        self._choices = {choice: _Unread() for choice in choices}
        self._unfinished = len(choices)
        self.is_over = False
        """Every choice has finished or was dropped."""
        self._on_gap = on_gap
        self._on_over = on_over
        self._error: TriptychError | None = None
        self._changed = asyncio.Event()
        self._ended = asyncio.Event()
        self.joined_s: float | None = None
        """When the engine started it, on the loop's clock."""
        self.longest_gap_s = 0.0
        """Of those between two tokens of a choice."""

    def times_s(self, choice: int) -> tuple[float | None, float | None]:
        """When the first and last token of a choice arrived, on the loop's clock."""
        unread = self._choices[choice]
        return unread.first_token_s, unread.last_token_s

    def prefill_s(self, choice: int) -> float:
        """From the start of the computation to the first token of a choice; 0 before that."""
        first_s = self._choices[choice].first_token_s
        return 0.0 if first_s is None or self.joined_s is None else first_s - self.joined_s

    def preempted(self, choice: int) -> tuple[int, float]:
        """How often a choice was preempted, and the gaps between tokens in which it was, in seconds."""
        unread = self._choices[choice]
        return unread.preemptions, unread.preempted_s

    async def joined(self) -> float:
        """Wait until the engine has started it; returns when that was. Raises the error if it failed before."""
        while self.joined_s is None and self._error is None:
            self._changed.clear()
            await self._changed.wait()
        if self.joined_s is not None:
            return self.joined_s
        raise self._error or AssertionError("it has begun, or failed")

    async def next(self) -> list[Tokens]:
        """All tokens that are ready, of at least one choice. Raises EngineFailure.

        Must not be called once every choice has finished or was cancelled.
        """
        while self._error is None:
            await self._changed.wait()
            self._changed.clear()
            if ready := self.take():
                return ready
        raise self._error

    def take(self) -> list[Tokens]:
        """All tokens that are ready, maybe none."""
        ready: list[Tokens] = []
        for choice, unread in self._choices.items():
            if unread.token_ids or unread.finish_reason is not None:
                tokens, scores = tuple(unread.token_ids), tuple(unread.scores)
                ready.append(Tokens(choice, tokens, scores, unread.finish_reason))
                unread.token_ids, unread.scores, unread.finish_reason = [], [], None
        return ready

    async def settled(self, within_s: float) -> None:
        """Wait ``within_s`` for tokens to collect, or until no more will come."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._ended.wait()

    # --- writer ------------------------------------------------------------------------------------------------------

    def join(self, now_s: float) -> None:
        """The engine has started the request."""
        self.joined_s = now_s
        self._changed.set()

    def deliver(self, output: EngineOutput, now_s: float) -> None:
        """Add a step's tokens of one choice. Ignored if the choice was dropped during the step."""
        unread = self._choices[output.choice]
        if unread.has_ended:
            return
        if self.joined_s is None:  # another choice, which goes on as well, still waits
            self.join(now_s)
        if unread.first_token_s is None:
            unread.first_token_s = now_s
        if unread.last_token_s is not None:
            gap_s = now_s - unread.last_token_s
            self._on_gap(gap_s)
            self.longest_gap_s = max(self.longest_gap_s, gap_s)
            unread.preempted_s += gap_s if output.preemptions > unread.preemptions else 0.0
        unread.preemptions = output.preemptions
        unread.last_token_s = now_s
        unread.token_ids.extend(output.token_ids)
        unread.scores.extend(output.scores)
        self._changed.set()
        if output.finish_reason is not None:
            unread.finish_reason = output.finish_reason
            self.drop(output.choice)

    def drop(self, choice: int) -> None:
        """Ignore further tokens of this choice."""
        if not self._choices[choice].has_ended:
            self._choices[choice].has_ended = True
            self._unfinished -= 1
            if self._unfinished == 0:
                self.is_over = True
                self.close()

    def fail(self, error: TriptychError) -> None:
        """End the request with an error for its reader."""
        self._error = error
        self._changed.set()
        self.close()

    def close(self) -> None:
        """The request has left the engine: no more tokens will come."""
        self._ended.set()
        self._on_over()
