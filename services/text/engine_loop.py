"""The one loop that drives the text engine: requests join and leave between its steps.

The engine lives in one thread, behind an ``Offload``; the loop hands it additions and cancellations, lets it step, and
hands the tokens to whoever waits for them. Nothing polls: without requests the loop waits.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from triptych.domain.generation import FinishReason
from triptych.errors import EngineFailure, TriptychError, Unavailable
from triptych.ports import Clock, EngineOutput, EngineRequest, Offload, Scores, TextEngine

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Tokens:
    """What was ready together of one choice. ``finish_reason`` is set with the last of it."""

    choice: int
    token_ids: tuple[int, ...]
    scores: tuple[Scores, ...]
    finish_reason: FinishReason | None


@dataclass(slots=True)
class _Unread:
    """What nobody has read yet of one choice."""

    token_ids: list[int] = field(default_factory=list)
    scores: list[Scores] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    over: bool = False
    """The engine will say no more of it."""
    first_token_s: float | None = None
    last_token_s: float | None = None

    @property
    def is_ready(self) -> bool:
        return bool(self.token_ids) or self.finish_reason is not None

    def take(self, choice: int) -> Tokens:
        tokens = Tokens(choice, tuple(self.token_ids), tuple(self.scores), self.finish_reason)
        self.token_ids, self.scores, self.finish_reason = [], [], None
        return tokens


class Sequences:
    """One request in the engine, with all its choices, as its reader sees it.

    Tokens wait here until they are read: at most ``max_tokens`` of each choice, however slow the reader is.
    """

    def __init__(self, choices: int, on_over: Callable[[], None], on_gap: Callable[[float], None]) -> None:
        self._choices = [_Unread() for _ in range(choices)]
        self._on_gap = on_gap
        self._on_over = on_over
        self._error: TriptychError | None = None
        self._changed = asyncio.Event()
        self._ended = asyncio.Event()
        self.joined_s: float | None = None
        """When the engine took it in, on the loop's clock."""

    def times_s(self, choice: int) -> tuple[float | None, float | None]:
        """When the first and the last token of a choice came, on the loop's clock."""
        unread = self._choices[choice]
        return unread.first_token_s, unread.last_token_s

    async def joined(self) -> None:
        """Return once the engine has taken it in. Raises what the engine said when it did not."""
        while self.joined_s is None and self._error is None:
            await self._wait()
        if self.joined_s is None and self._error is not None:
            raise self._error

    async def next(self) -> list[Tokens]:
        """All tokens that are ready, of one choice at least. Raises EngineFailure.

        Not to be called any more once every choice has had its finish reason, or was cancelled.
        """
        while self._error is None and not any(unread.is_ready for unread in self._choices):
            await self._wait()
        if self._error is not None:
            raise self._error
        return [unread.take(choice) for choice, unread in enumerate(self._choices) if unread.is_ready]

    async def settled(self, within_s: float) -> None:
        """Let tokens gather for so long, or until there will be no more."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._ended.wait()

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    @property
    def _is_over(self) -> bool:
        return all(unread.over for unread in self._choices)

    def _join(self, now_s: float) -> None:
        self.joined_s = now_s
        self._changed.set()

    def _deliver(self, output: EngineOutput, now_s: float) -> None:
        unread = self._choices[output.choice]
        if unread.over:
            return  # cancelled during the step
        if unread.first_token_s is None:
            unread.first_token_s = now_s
        if unread.last_token_s is not None:
            self._on_gap(now_s - unread.last_token_s)
        unread.last_token_s = now_s
        unread.token_ids.extend(output.token_ids)
        unread.scores.extend(output.scores)
        self._changed.set()
        if output.finish_reason is not None:
            unread.finish_reason = output.finish_reason
            unread.over = True
            if self._is_over:
                self._over()

    def _drop(self, choice: int) -> None:
        """What the engine says of this choice is not wanted any more."""
        if not self._choices[choice].over:
            self._choices[choice].over = True
            if self._is_over:
                self._over()

    def _fail(self, error: TriptychError) -> None:
        self._error = error
        self._changed.set()
        self._over()

    def _over(self) -> None:
        self._ended.set()
        self._on_over()


@dataclass(frozen=True, slots=True)
class _Joining:
    """A request that the engine has not seen yet."""

    request: EngineRequest
    sequences: Sequences
    on_copied: Callable[[], None]


class EngineLoop:
    """Owns the engine. ``run`` is to be started once; everything else may be called from then on."""

    def __init__(
        self,
        engine: TextEngine,
        thread: Offload,
        *,
        clock: Clock,
        on_change: Callable[[], None],
        on_gap: Callable[[float], None],
    ) -> None:
        """``thread`` runs one call at a time. ``on_change`` is called when ``pending_tokens`` may have changed.

        ``on_gap`` is told how long, in seconds, a choice waited from one token to the next.
        """
        self._on_gap = on_gap
        self._engine = engine
        self._thread = thread
        self._clock = clock
        self._on_change = on_change
        self._joining: dict[str, _Joining] = {}
        self._live: dict[str, Sequences] = {}
        self._cancelled: set[tuple[str, int | None]] = set()
        self._wake = asyncio.Event()
        self._engine_pending_tokens = 0

    @property
    def pending_tokens(self) -> int:
        """Prompt tokens not yet prefilled plus tokens that may still be decoded."""
        joining = (one.request for one in self._joining.values())
        return self._engine_pending_tokens + sum(
            len(request.token_ids) + request.sampling.n * (request.sampling.max_tokens or 0) for request in joining
        )

    def submit(
        self, request: EngineRequest, *, on_copied: Callable[[], None], on_over: Callable[[], None]
    ) -> Sequences:
        """Hand a request to the engine. Both callbacks are called once, on the event loop.

        ``on_copied``: the engine reads the request's tensors no more, for it has copied or refused them, or never
        saw them. ``on_over``: the request has no place in the engine any more, whether its tokens were read or not.
        """
        sequences = Sequences(request.sampling.n, on_over, self._on_gap)
        self._joining[request.request_id] = _Joining(request, sequences, on_copied)
        self._wake.set()
        return sequences

    def cancel(self, request_id: str) -> None:
        """Forget a request before the engine's next step; one that is over or unknown is fine."""
        if (joining := self._joining.pop(request_id, None)) is not None:
            joining.on_copied()
            joining.sequences._over()  # noqa: SLF001 - the loop is the writing end of what it hands out
        elif (sequences := self._live.pop(request_id, None)) is not None:
            self._cancelled.add((request_id, None))
            self._wake.set()
            sequences._over()  # noqa: SLF001

    def cancel_choice(self, request_id: str, choice: int) -> None:
        """Forget one choice of a request that the engine has taken in; one that is over is fine."""
        if (sequences := self._live.get(request_id)) is not None:
            self._cancelled.add((request_id, choice))
            self._wake.set()
            sequences._drop(choice)  # noqa: SLF001
            if sequences._is_over:  # noqa: SLF001
                del self._live[request_id]

    async def run(self) -> None:
        """Drive the engine until cancelled; then every request fails with Unavailable."""
        try:
            while True:
                if not (self._joining or self._live or self._cancelled):
                    self._wake.clear()
                    await self._wake.wait()
                await self._apply()
                if self._live:
                    await self._step()
                self._on_change()
                # Readers get their turn between steps even where the engine's thread is this one (virtual time).
                await asyncio.sleep(0)
        finally:
            error = Unavailable("the instance is shutting down")
            for sequences in (*self._live.values(), *(one.sequences for one in self._joining.values())):
                sequences._fail(error)  # noqa: SLF001

    async def _apply(self) -> None:
        """Let the engine forget who left and take in who came."""
        if not (self._joining or self._cancelled):
            return
        joining, self._joining = self._joining, {}
        cancelled, self._cancelled = self._cancelled, set()
        self._live.update((request_id, one.sequences) for request_id, one in joining.items())
        refused = await self._thread.run(self._exchange, cancelled, [one.request for one in joining.values()])
        now_s = self._clock()
        for request_id, one in joining.items():
            one.on_copied()
            if request_id not in refused:
                one.sequences._join(now_s)  # noqa: SLF001
            elif self._live.get(request_id) is one.sequences:
                self._fail(request_id, refused[request_id])

    def _exchange(self, cancelled: set[tuple[str, int | None]], requests: list[EngineRequest]) -> dict[str, Exception]:
        """In the engine's thread. Returns who was refused, and why."""
        refused: dict[str, Exception] = {}
        for request_id, choice in cancelled:
            try:
                self._engine.cancel(request_id, choice)
            except Exception:
                logger.exception("the engine failed to cancel request %s", request_id)
        for request in requests:
            try:
                self._engine.add(request)
            except Exception as error:  # noqa: BLE001 - told to the one whose request it is
                refused[request.request_id] = error
        self._engine_pending_tokens = self._engine.pending_tokens
        return refused

    async def _step(self) -> None:
        before = dict(self._live)
        try:
            outputs, has_work = await self._thread.run(self._step_once)
        except Exception as error:  # noqa: BLE001 - the engine's state is unknown: all of its sequences end here
            for request_id, sequences in before.items():
                if self._live.get(request_id) is sequences:
                    self._fail(request_id, error)
            return
        now_s = self._clock()
        for output in outputs:
            self._deliver(output, now_s)
        if not has_work:
            for request_id in list(self._live):
                self._fail(request_id, EngineFailure("the engine lost the request"))

    def _deliver(self, output: EngineOutput, now_s: float) -> None:
        sequences = self._live.get(output.request_id)
        if sequences is None:
            return  # cancelled during the step
        if output.error is not None:
            self._fail(output.request_id, output.error)
            return
        sequences._deliver(output, now_s)  # noqa: SLF001
        if sequences._is_over:  # noqa: SLF001
            del self._live[output.request_id]

    def _step_once(self) -> tuple[list[EngineOutput], bool]:
        """In the engine's thread."""
        outputs = self._engine.step() if self._engine.has_work else []
        self._engine_pending_tokens = self._engine.pending_tokens
        return outputs, self._engine.has_work

    def _fail(self, request_id: str, error: Exception) -> None:
        """End a live request; the engine is told to forget it, whatever it thinks itself."""
        self._cancelled.add((request_id, None))
        if not isinstance(error, TriptychError):
            logger.error("the engine failed on request %s", request_id, exc_info=error)
            error = EngineFailure("the engine failed on this request")
        self._live.pop(request_id)._fail(error)  # noqa: SLF001
