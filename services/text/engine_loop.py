"""The one loop that drives the text engine: sequences join and leave between its steps.

The engine lives in one thread, behind an ``Offload``; the loop hands it additions and cancellations, lets it step, and
hands the tokens to whoever waits for them. Nothing polls: without sequences the loop waits.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from triptych.domain.generation import FinishReason
from triptych.errors import EngineFailure, TriptychError, Unavailable
from triptych.ports import Clock, EngineOutput, EngineRequest, Offload, TextEngine

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Tokens:
    """What was ready together. ``finish_reason`` is set with the last of a sequence."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None


class Sequence:
    """One sequence in the engine, as its reader sees it.

    Tokens wait here until they are read: at most ``max_tokens`` of them, however slow the reader is.
    """

    def __init__(self, on_over: Callable[[], None]) -> None:
        self._on_over = on_over
        self._tokens: list[int] = []
        self._finish_reason: FinishReason | None = None
        self._error: TriptychError | None = None
        self._changed = asyncio.Event()
        self.joined_s: float | None = None
        """When the engine took it in, on the loop's clock."""
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None

    async def joined(self) -> None:
        """Return once the engine has taken it in. Raises what the engine said when it did not."""
        while self.joined_s is None and self._error is None:
            await self._wait()
        if self.joined_s is None and self._error is not None:
            raise self._error

    async def next(self) -> Tokens:
        """All tokens that are ready, at least one unless the sequence is over. Raises EngineFailure."""
        while not self._tokens and self._finish_reason is None and self._error is None:
            await self._wait()
        if self._error is not None:
            raise self._error
        tokens, self._tokens = tuple(self._tokens), []
        return Tokens(tokens, self._finish_reason)

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _join(self, now_s: float) -> None:
        self.joined_s = now_s
        self._changed.set()

    def _deliver(self, output: EngineOutput, now_s: float) -> None:
        if self.first_token_s is None:
            self.first_token_s = now_s
        self.last_token_s = now_s
        self._tokens.extend(output.token_ids)
        self._changed.set()
        if output.finish_reason is not None:
            self._finish_reason = output.finish_reason
            self._over()

    def _fail(self, error: TriptychError) -> None:
        self._error = error
        self._changed.set()
        self._over()

    def _over(self) -> None:
        self._on_over()


@dataclass(frozen=True, slots=True)
class _Joining:
    """A sequence that the engine has not seen yet."""

    request: EngineRequest
    sequence: Sequence
    on_copied: Callable[[], None]


class EngineLoop:
    """Owns the engine. ``run`` is to be started once; everything else may be called from then on."""

    def __init__(self, engine: TextEngine, thread: Offload, *, clock: Clock, on_change: Callable[[], None]) -> None:
        """``thread`` runs one call at a time. ``on_change`` is called when ``pending_tokens`` may have changed."""
        self._engine = engine
        self._thread = thread
        self._clock = clock
        self._on_change = on_change
        self._joining: dict[str, _Joining] = {}
        self._live: dict[str, Sequence] = {}
        self._cancelled: set[str] = set()
        self._wake = asyncio.Event()
        self._engine_pending_tokens = 0

    @property
    def pending_tokens(self) -> int:
        """Prompt tokens not yet prefilled plus tokens that may still be decoded."""
        joining = (one.request for one in self._joining.values())
        return self._engine_pending_tokens + sum(len(r.token_ids) + (r.sampling.max_tokens or 0) for r in joining)

    def submit(self, request: EngineRequest, *, on_copied: Callable[[], None], on_over: Callable[[], None]) -> Sequence:
        """Hand a sequence to the engine. Both callbacks are called once, on the event loop.

        ``on_copied``: the engine reads the request's tensors no more, for it has copied or refused them, or never
        saw them. ``on_over``: the sequence has no place in the engine any more, whether its tokens were read or not.
        """
        sequence = Sequence(on_over)
        self._joining[request.request_id] = _Joining(request, sequence, on_copied)
        self._wake.set()
        return sequence

    def cancel(self, request_id: str) -> None:
        """Forget a sequence before the engine's next step; one that is over or unknown is fine."""
        if (joining := self._joining.pop(request_id, None)) is not None:
            joining.on_copied()
            joining.sequence._over()  # noqa: SLF001 - the loop is the writing end of a sequence
        elif (sequence := self._live.pop(request_id, None)) is not None:
            self._cancelled.add(request_id)
            self._wake.set()
            sequence._over()  # noqa: SLF001 - the loop is the writing end of a sequence

    async def run(self) -> None:
        """Drive the engine until cancelled; then every sequence fails with Unavailable."""
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
            for sequence in (*self._live.values(), *(one.sequence for one in self._joining.values())):
                sequence._fail(error)  # noqa: SLF001 - the loop is the writing end of a sequence

    async def _apply(self) -> None:
        """Let the engine forget who left and take in who came."""
        if not (self._joining or self._cancelled):
            return
        joining, self._joining = self._joining, {}
        cancelled, self._cancelled = self._cancelled, set()
        self._live.update((request_id, one.sequence) for request_id, one in joining.items())
        refused = await self._thread.run(self._exchange, cancelled, [one.request for one in joining.values()])
        now_s = self._clock()
        for request_id, one in joining.items():
            one.on_copied()
            if request_id not in refused:
                one.sequence._join(now_s)  # noqa: SLF001
            elif self._live.get(request_id) is one.sequence:
                self._fail(request_id, refused[request_id])

    def _exchange(self, cancelled: set[str], requests: list[EngineRequest]) -> dict[str, Exception]:
        """In the engine's thread. Returns who was refused, and why."""
        refused: dict[str, Exception] = {}
        for request_id in cancelled:
            try:
                self._engine.cancel(request_id)
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
            for request_id, sequence in before.items():
                if self._live.get(request_id) is sequence:
                    self._fail(request_id, error)
            return
        now_s = self._clock()
        for output in outputs:
            self._deliver(output, now_s)
        if not has_work:
            for request_id in list(self._live):
                self._fail(request_id, EngineFailure("the engine lost the sequence"))

    def _deliver(self, output: EngineOutput, now_s: float) -> None:
        sequence = self._live.get(output.request_id)
        if sequence is None:
            return  # cancelled during the step
        if output.error is not None:
            self._fail(output.request_id, output.error)
            return
        if output.finish_reason is not None:
            del self._live[output.request_id]
        sequence._deliver(output, now_s)  # noqa: SLF001

    def _step_once(self) -> tuple[list[EngineOutput], bool]:
        """In the engine's thread."""
        outputs = self._engine.step() if self._engine.has_work else []
        self._engine_pending_tokens = self._engine.pending_tokens
        return outputs, self._engine.has_work

    def _fail(self, request_id: str, error: Exception) -> None:
        """End a live sequence; the engine is told to forget it, whatever it thinks itself."""
        self._cancelled.add(request_id)
        if not isinstance(error, TriptychError):
            logger.error("the engine failed on request %s", request_id, exc_info=error)
            error = EngineFailure("the engine failed on this request")
        self._live.pop(request_id)._fail(error)  # noqa: SLF001
