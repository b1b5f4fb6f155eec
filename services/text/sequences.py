"""Delivers one request's tokens from the engine loop to its reader."""

import asyncio
import contextlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from math import inf

from triptych.domain.engine import EngineOutput
from triptych.errors import TriptychError


@dataclass(slots=True)
class _Choice:
    """One choice: what has not been read of it, and its times."""

    unread: list[EngineOutput] = field(default_factory=list)
    has_ended: bool = False
    """No further tokens will come."""
    first_token_s: float | None = None
    last_token_s: float | None = None
    cached_tokens: int = 0
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
        self._choices = {choice: _Choice() for choice in choices}
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

    def last_token_s(self, choice: int) -> float:
        """When the last token of a choice arrived, on the loop's clock; infinite before one did."""
        last_s = self._choices[choice].last_token_s
        return inf if last_s is None else last_s

    def decode_s(self, choice: int) -> float:
        """From the first token of a choice to its last; 0 before them."""
        known = self._choices[choice]
        if known.first_token_s is None or known.last_token_s is None:
            return 0.0
        return known.last_token_s - known.first_token_s

    def prefill_s(self, choice: int) -> float:
        """From the start of the computation to the first token of a choice; 0 before that."""
        first_s = self._choices[choice].first_token_s
        return 0.0 if first_s is None or self.joined_s is None else first_s - self.joined_s

    def preempted(self, choice: int) -> tuple[int, float]:
        """How often a choice was preempted, and the gaps between tokens in which it was, in seconds."""
        known = self._choices[choice]
        return known.preemptions, known.preempted_s

    async def joined(self) -> float:
        """Wait until the engine has started it; returns when that was. Raises the error if it failed before."""
        while self.joined_s is None and self._error is None:
            self._changed.clear()
            await self._changed.wait()
        if self.joined_s is not None:
            return self.joined_s
        raise self._error or AssertionError("it has begun, or failed")

    async def next(self) -> list[EngineOutput]:
        """All tokens that are ready, of at least one choice; one output of each choice. Raises EngineFailure.

        Must not be called once every choice has finished or was cancelled.
        """
        while self._error is None:
            await self._changed.wait()
            self._changed.clear()
            if ready := self.take():
                return ready
        raise self._error

    def take(self) -> list[EngineOutput]:
        """All tokens that are ready, maybe none."""
        ready: list[EngineOutput] = []
        for choice in self._choices.values():
            if choice.unread:
                outputs, choice.unread = choice.unread, []
                ready.append(outputs[0] if len(outputs) == 1 else _joined(outputs))
        return ready

    async def settled(self, within_s: float) -> None:
        """Wait ``within_s`` for tokens to collect, or until no more will come."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._ended.wait()

    def cached_tokens(self, choice: int) -> int:
        """Tokens that the engine's prefix cache had when a choice began."""
        return self._choices[choice].cached_tokens

    # --- writer ------------------------------------------------------------------------------------------------------

    def join(self, now_s: float) -> None:
        """The engine has started the request."""
        self.joined_s = now_s
        self._changed.set()

    def deliver(self, output: EngineOutput, now_s: float) -> None:
        """Add a step's tokens of one choice. Ignored if the choice was dropped during the step."""
        choice = self._choices[output.choice]
        if choice.has_ended:
            return
        if self.joined_s is None:  # another choice, which goes on as well, still waits
            self.join(now_s)
        if choice.first_token_s is None:
            choice.first_token_s = now_s
        if choice.last_token_s is not None:
            gap_s = now_s - choice.last_token_s
            self._on_gap(gap_s)
            self.longest_gap_s = max(self.longest_gap_s, gap_s)
            choice.preempted_s += gap_s if output.preemptions > choice.preemptions else 0.0
        choice.preemptions, choice.cached_tokens = output.preemptions, output.cached_tokens
        choice.last_token_s = now_s
        if output.token_ids or output.finish_reason is not None:
            choice.unread.append(output)
        self._changed.set()
        if output.finish_reason is not None:
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


def _joined(outputs: Sequence[EngineOutput]) -> EngineOutput:
    """One output of these, which are of one choice, in their order."""
    return replace(
        outputs[-1],
        token_ids=tuple(chain.from_iterable([output.token_ids for output in outputs])),
        scores=tuple(chain.from_iterable([output.scores for output in outputs])),
    )
