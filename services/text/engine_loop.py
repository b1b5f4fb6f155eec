"""The one loop that drives the text engine: requests join and leave between its steps.

The engine lives in one thread, behind an ``Offload``; the loop hands it additions and cancellations, lets it step, and
hands the tokens to whoever waits for them. Nothing polls: without requests the loop waits. Where the instance encodes
as well, this is the only loop too: the tower has its turns between steps (``device_scheduler.py``).
"""

import asyncio
import logging
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from triptych.errors import EngineFailure, TriptychError, Unavailable
from triptych.policy.iteration import Iteration
from triptych.ports import Clock, EngineOutput, EngineRequest, Offload, TextEngine

from .device_scheduler import DeviceScheduler
from .sequences import Sequences

logger = logging.getLogger(__name__)

_ALONE = Iteration(prefill=True, encode=False)
"""Of an instance that does not encode."""


@dataclass(frozen=True, slots=True)
class _Joining:
    """A request that the engine has not seen yet."""

    request: EngineRequest
    sequences: Sequences
    on_copied: Callable[[], None]


@dataclass(frozen=True, slots=True)
class _Exchanged:
    """What the engine said of who left and who came."""

    refused: dict[str, Exception]
    load: "_Load"


@dataclass(frozen=True, slots=True)
class _Stepped:
    """What the engine said after a step."""

    outputs: list[EngineOutput]
    has_work: bool
    load: "_Load"


@dataclass(frozen=True, slots=True)
class _Load:
    """What the engine says of itself."""

    pending_tokens: int = 0
    waiting: AbstractSet[str] = frozenset()
    """Requests that have not begun."""
    prefill_ready: bool = False


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
        scheduler: DeviceScheduler | None = None,
    ) -> None:
        """``thread`` runs one call at a time. ``on_change`` is called when ``pending_tokens`` may have changed.

        ``on_gap`` is told how long, in seconds, a choice waited from one token to the next. ``scheduler`` is there where
        the engine is not alone in its thread.
        """
        self._scheduler = scheduler
        if scheduler is not None:
            scheduler.tower.when_ready(self._wake_up)
        self._on_gap = on_gap
        self._engine = engine
        self._thread = thread
        self._clock = clock
        self._on_change = on_change
        self._joining: dict[str, _Joining] = {}
        self._live: dict[str, Sequences] = {}
        self._cancelled: set[tuple[str, int | None]] = set()
        self._wake = asyncio.Event()
        self._load = _Load()

    @property
    def pending_tokens(self) -> int:
        """Prompt tokens not yet prefilled plus tokens that may still be decoded."""
        joining = (one.request for one in self._joining.values())
        return self._load.pending_tokens + sum(
            len(request.token_ids) + request.sampling.n * (request.sampling.max_tokens or 0) for request in joining
        )

    @property
    def waiting_requests(self) -> int:
        """Those that the engine has not begun."""
        return len(self._joining) + sum(one.joined_s is None for one in self._live.values())

    @property
    def running_requests(self) -> int:
        return sum(one.joined_s is not None for one in self._live.values())

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
            joining.sequences.close()
        elif (sequences := self._live.pop(request_id, None)) is not None:
            self._cancelled.add((request_id, None))
            self._wake.set()
            sequences.close()

    def cancel_choice(self, request_id: str, choice: int) -> None:
        """Forget one choice of a request that the engine has taken in; one that is over is fine."""
        if (sequences := self._live.get(request_id)) is not None:
            self._cancelled.add((request_id, choice))
            self._wake.set()
            sequences.drop(choice)
            if sequences.is_over:
                del self._live[request_id]

    async def run(self) -> None:
        """Drive the engine until cancelled; then every request fails with Unavailable."""
        try:
            while True:
                if not (self._joining or self._live or self._cancelled or self._encode_ready):
                    self._wake.clear()
                    await self._wake.wait()
                await self._apply()
                iteration = (
                    _ALONE if self._scheduler is None else self._scheduler.next(prefill_ready=self._load.prefill_ready)
                )
                if self._live:
                    await self._step(iteration)
                if self._scheduler is not None and iteration.encode:
                    await self._scheduler.encode()
                self._on_change()
                # Readers get their turn between steps even where the engine's thread is this one (virtual time).
                await asyncio.sleep(0)
        finally:
            error = Unavailable("the instance is shutting down")
            for sequences in (*self._live.values(), *(one.sequences for one in self._joining.values())):
                sequences.fail(error)

    @property
    def _encode_ready(self) -> bool:
        return self._scheduler is not None and self._scheduler.encode_ready

    def _wake_up(self) -> None:
        self._wake.set()

    async def _apply(self) -> None:
        """Let the engine forget who left and take in who came."""
        if not (self._joining or self._cancelled):
            return
        joining, self._joining = self._joining, {}
        cancelled, self._cancelled = self._cancelled, set()
        self._live.update((request_id, one.sequences) for request_id, one in joining.items())
        exchanged = await self._thread.run(self._exchange, cancelled, [one.request for one in joining.values()])
        self._load, refused = exchanged.load, exchanged.refused
        for request_id, one in joining.items():
            one.on_copied()
            if request_id in refused and self._live.get(request_id) is one.sequences:
                self._fail(request_id, refused[request_id])

    def _exchange(self, cancelled: set[tuple[str, int | None]], requests: list[EngineRequest]) -> _Exchanged:
        """In the engine's thread."""
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
        return _Exchanged(refused, self._engine_load())

    async def _step(self, iteration: Iteration) -> None:
        before, began_s = dict(self._live), self._clock()
        try:
            stepped = await self._thread.run(self._step_once, iteration)
        except Exception as error:  # noqa: BLE001 - the engine's state is unknown: all of its sequences end here
            for request_id, sequences in before.items():
                if self._live.get(request_id) is sequences:
                    self._fail(request_id, error)
            return
        self._load, now_s = stepped.load, self._clock()
        for request_id, sequences in before.items():
            if sequences.joined_s is None and request_id not in stepped.load.waiting:
                sequences.join(began_s)
        for output in stepped.outputs:
            self._deliver(output, now_s)
        if not stepped.has_work:
            for request_id in list(self._live):
                self._fail(request_id, EngineFailure("the engine lost the request"))

    def _deliver(self, output: EngineOutput, now_s: float) -> None:
        sequences = self._live.get(output.request_id)
        if sequences is None:
            return  # cancelled during the step
        if output.error is not None:
            self._fail(output.request_id, output.error)
            return
        sequences.deliver(output, now_s)
        if sequences.is_over:
            del self._live[output.request_id]

    def _step_once(self, iteration: Iteration) -> _Stepped:
        """In the engine's thread."""
        outputs: list[EngineOutput] = []
        if self._engine.has_work:
            outputs = self._engine.step() if self._scheduler is None else self._scheduler.step(iteration)
        return _Stepped(outputs, self._engine.has_work, self._engine_load())

    def _engine_load(self) -> _Load:
        """In the engine's thread."""
        prefill_ready = self._scheduler is not None and self._scheduler.engine.prefill_ready
        return _Load(self._engine.pending_tokens, self._engine.waiting, prefill_ready)

    def _fail(self, request_id: str, error: Exception) -> None:
        """End a live request; the engine is told to forget it, whatever it thinks itself."""
        self._cancelled.add((request_id, None))
        if not isinstance(error, TriptychError):
            logger.error("the engine failed on request %s", request_id, exc_info=error)
            error = EngineFailure("the engine failed on this request")
        self._live.pop(request_id).fail(error)
