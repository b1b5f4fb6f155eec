"""The loop that drives the text engine: requests join and leave between its steps.

The engine runs in one thread, behind an ``Offload``. The loop passes it additions and cancellations, runs its steps,
and delivers the tokens. Between steps it also copies keys and values, beside decodes a bounded number of bytes each time, so that
they hold those up little. It does not poll: while no step would do anything it waits. If the instance also encodes, the encoder
runs between steps (``device_scheduler.py``).
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, TypeVar

from triptych.domain.engine import EngineOutput, EngineRequest
from triptych.domain.queue_position import QueuePosition
from triptych.errors import EngineFailure, InstanceLost, TriptychError, Unavailable
from triptych.machine.text.unbegun import UnbegunPositions
from triptych.policy.batching import ALL_NBYTES
from triptych.policy.iteration import Iteration
from triptych.ports import Clock, Offload, TextEngine

from .device_scheduler import DeviceScheduler
from .sequences import Sequences

logger = logging.getLogger(__name__)

T = TypeVar("T")

_ALONE = Iteration(prefill=True, encode=False)
"""Without an encoder."""


@dataclass(frozen=True, slots=True)
class _Joining:
    """A request not yet added to the engine."""

    request: EngineRequest
    sequences: Sequences
    on_copied: Callable[[], None]
    tokens: int
    """Of its prompt, and the most that may be generated."""


@dataclass(frozen=True, slots=True)
class _Copy:
    """A call of the engine between two steps."""

    call: Callable[[], Any]
    nbytes: int
    result: asyncio.Future[Any]


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The engine's load after a call."""

    has_work: bool = False
    can_step: bool = False
    pending_tokens: int = 0
    waiting: AbstractSet[str] = frozenset()
    """Requests not started yet."""
    prefill_queue_position: QueuePosition | None = None
    awaiting: AbstractSet[str] = frozenset()
    """Requests with a choice that has started, and whose keys and values arrive."""
    free_tokens: int | None = None
    computed: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    """Positions computed of each choice, of the requests that are followed."""


class EngineLoop:
    """Owns the engine. Start ``run`` once; all other methods may be called from then on."""

    def __init__(
        self,
        engine: TextEngine,
        thread: Offload,
        *,
        clock: Clock,
        on_change: Callable[[], None],
        on_gap: Callable[[float], None],
        on_step: Callable[[float], None],
        scheduler: DeviceScheduler | None = None,
        most_copied_bytes: Callable[[], int] = lambda: ALL_NBYTES,
    ) -> None:
        """``thread`` runs one call at a time. ``on_change`` is called when ``pending_tokens`` may have changed.

        ``on_gap`` gets the seconds between two tokens of a choice, ``on_step`` those of each step. ``scheduler`` is set if an
        encoder shares the thread. ``most_copied_bytes``: of copies between two steps, unless a single one has more.
        """
        self._most_copied_bytes = most_copied_bytes
        self._copies: deque[_Copy] = deque()
        self._followed: dict[str, tuple[tuple[int, ...], Callable[[Mapping[int, int]], None]]] = {}
        """Requests with their choices, and whom to tell of their computed positions."""
        self._kv = engine.kv
        self._has_ended = False
        self._scheduler = scheduler
        if scheduler is not None:
            scheduler.vision_encoder.when_ready(self._wake_up)
        self._on_gap = on_gap
        self._on_step = on_step
        self._engine = engine
        self._thread = thread
        self._clock = clock
        self._on_change = on_change
        self._joining: dict[str, _Joining] = {}
        self._adding: dict[str, _Joining] = {}
        """Being passed to the engine, which has not reported its load since."""
        self._live: dict[str, Sequences] = {}
        self._unbegun = UnbegunPositions()
        """Of those of them that have not begun."""
        self._cancelled: set[tuple[str, int | None]] = set()
        self._wake = asyncio.Event()
        self._is_lost = False
        self.load = EngineLoad(free_tokens=engine.kv_free_tokens)
        """As of the last call; for reading."""

    @property
    def pending_tokens(self) -> int:
        """Prompt tokens not yet prefilled plus tokens that may still be decoded."""
        tokens = self.load.pending_tokens
        for joining in (*self._joining.values(), *self._adding.values()):
            tokens += joining.tokens
        return tokens

    @property
    def requests(self) -> tuple[int, int]:
        """Number of requests that the engine has not started, and of those that it has."""
        unbegun = len(self._unbegun.by_request)
        return len(self._joining) + unbegun, len(self._live) - unbegun

    def submit(
        self, request: EngineRequest, tokens: int, *, on_copied: Callable[[], None], on_over: Callable[[], None]
    ) -> Sequences:
        """Pass a request to the engine. ``tokens``: of its prompt, and the most that may be generated. Both callbacks are called once, on
        the event loop.

        ``on_copied``: the engine no longer reads the request's tensors: it copied them, refused them, or never got
        them. ``on_over``: the request has left the engine, whether its tokens were read or not.
        """
        sequences = Sequences(request.begun, on_over, self._on_gap)
        if self._has_ended:
            on_copied()
            sequences.fail(_ending())
            return sequences
        self._joining[request.request_id] = _Joining(request, sequences, on_copied, tokens)
        self._wake.set()
        return sequences

    def follow(self, request_id: str, choices: tuple[int, ...], tell: Callable[[Mapping[int, int]], None]) -> None:
        """Until ``unfollow``, ``tell`` after each call of the engine how many positions of each choice are computed."""
        self._followed[request_id] = choices, tell

    def unfollow(self, request_id: str) -> None:
        self._followed.pop(request_id, None)

    def between(self, call: Callable[[], T], nbytes: int = 0) -> "asyncio.Future[T]":
        """Call the engine between two steps, when it has got what was submitted before. ``nbytes``: that the call copies.

        Calls run in order; cancelling one that runs does not interrupt it. Raises Unavailable if the loop has ended.
        """
        if self._has_ended:
            raise _ending()
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._copies.append(_Copy(call, nbytes, result))
        self._wake.set()
        return result

    def cancel(self, request_id: str) -> None:
        """Remove a request before the engine's next step. Finished or unknown ones are ignored."""
        if (joining := self._joining.pop(request_id, None)) is not None:
            joining.on_copied()
            joining.sequences.close()
        elif request_id in self._live:
            self._cancelled.add((request_id, None))
            self._wake.set()
            self._leave(request_id).close()

    def cancel_choice(self, request_id: str, choice: int) -> None:
        """Remove one choice of a request in the engine. Finished ones are ignored."""
        if (sequences := self._live.get(request_id)) is not None:
            self._cancelled.add((request_id, choice))
            self._wake.set()
            sequences.drop(choice)
            if sequences.is_over:
                self._leave(request_id)

    def lose(self) -> None:
        """The engine cannot go on, as it has noticed between two steps: its next step says so, and is made now."""
        self._is_lost = True
        self._wake.set()

    async def run(self) -> None:
        """Drive the engine until cancelled; then every request fails with Unavailable.

        Raises InstanceLost when the engine cannot go on. The requests that it had begun have failed with it, the others with Unavailable.
        """
        try:
            while True:
                can_step = self._can_step
                if not (can_step or self._encode_ready):
                    await self._wake.wait()
                self._wake.clear()
                if self._joining or self._cancelled or self._copies or self._unbegun.by_request:
                    await self._apply()
                    can_step = self._can_step
                iteration = (
                    _ALONE
                    if self._scheduler is None
                    else self._scheduler.next(
                        prefill_queue_position=self.load.prefill_queue_position, can_step=can_step
                    )
                )
                encoder = self._scheduler if iteration.encode else None
                if encoder is not None and encoder.turns.encode_first:
                    await encoder.encode()
                    can_step = self._can_step
                if can_step or self._is_lost:
                    await self._step(iteration)
                if encoder is not None and not encoder.turns.encode_first:
                    await encoder.encode()
                self._on_change()
                # Let readers run between steps even if the engine runs on this thread (virtual time).
                await asyncio.sleep(0)
        finally:
            error = _ending()
            for sequences in (*self._live.values(), *(entry.sequences for entry in self._joining.values())):
                sequences.fail(error)
            self._has_ended = True
            for copy in self._copies:
                _fail_copy(copy, error)

    @property
    def _can_step(self) -> bool:
        return bool(self._live) and self.load.can_step

    @property
    def _encode_ready(self) -> bool:
        return self._scheduler is not None and self._scheduler.encode_ready

    def _wake_up(self) -> None:
        self._wake.set()

    async def _apply(self) -> None:
        """Pass cancelled and new requests to the engine, and the new queue positions of those that are lost by now."""
        joining, self._joining = self._joining, {}
        for request_id, entry in joining.items():
            self._live[request_id] = entry.sequences
            self._unbegun.add(request_id, entry.request.queue_position)
        lost = self._unbegun.lost(self._clock()) if self._unbegun.by_request else []
        copies = self._next_copies() if self._copies else []
        if not (joining or self._cancelled or lost or copies):
            return
        self._adding = joining
        cancelled, self._cancelled = self._cancelled, set()
        requests = [entry.request for entry in joining.values()]
        refused, results, load = await self._thread.run(self._exchange, cancelled, requests, lost, copies)
        self._adding, self.load = {}, load
        if load.computed:
            self._tell_followers(load)
        for copy, (result, error) in zip(copies, results, strict=True):
            if error is not None:
                _fail_copy(copy, error)
            elif not copy.result.done():
                copy.result.set_result(result)
        for request_id, entry in joining.items():
            entry.on_copied()
            if request_id in refused and self._live.get(request_id) is entry.sequences:
                self._fail(request_id, refused[request_id])

    def _next_copies(self) -> list[_Copy]:
        """Take the copies to run now."""
        copies: list[_Copy] = []
        nbytes, most_nbytes = 0, self._most_copied_bytes()
        while self._copies and (not copies or nbytes + self._copies[0].nbytes <= most_nbytes):
            copy = self._copies.popleft()
            if not copy.result.cancelled():
                copies.append(copy)
                nbytes += copy.nbytes
        if self._copies:
            self._wake.set()  # for the others
        return copies

    def _tell_followers(self, load: EngineLoad) -> None:
        for request_id, computed in load.computed.items():
            if (followed := self._followed.get(request_id)) is not None:
                followed[1](computed)

    def _exchange(
        self,
        cancelled: set[tuple[str, int | None]],
        requests: list[EngineRequest],
        lost: list[tuple[str, QueuePosition]],
        copies: Sequence[_Copy],
    ) -> tuple[dict[str, Exception], list[tuple[Any, Exception | None]], EngineLoad]:
        """Runs in the engine's thread. Returns the refused requests, and the results or errors of the copies."""
        refused: dict[str, Exception] = {}
        for request_id, choice in cancelled:
            try:
                self._engine.cancel(request_id, choice)
            except Exception:
                logger.exception("the engine failed to cancel request %s", request_id)
        for request in requests:
            try:
                self._engine.add(request)
            except Exception as error:  # noqa: BLE001 - reported to its caller
                refused[request.request_id] = error
        for request_id, queue_position in lost:
            self._engine.reorder(request_id, queue_position)
        results: list[tuple[Any, Exception | None]] = []
        for copy in copies:
            try:
                results.append((copy.call(), None))
            except Exception as error:  # noqa: BLE001 - reported to its caller
                results.append((None, error))
        return refused, results, self._engine_load()

    async def _step(self, iteration: Iteration) -> None:
        began_s = self._clock()
        try:
            outputs, load = await self._thread.run(self._step_once, iteration)
        except InstanceLost as error:
            waiting, ending = await self._thread.run(lambda: self._engine.waiting), _ending()
            for request_id in list(self._live):
                self._fail(request_id, ending if request_id in waiting else error)  # those have no part in it
            raise
        except Exception as error:  # noqa: BLE001 - reported to the callers
            for request_id in list(self._live):
                self._fail(request_id, error)
            return
        now_s, self.load = self._clock(), load
        self._on_step(now_s - began_s)
        if load.computed:
            self._tell_followers(load)
        if unbegun := self._unbegun.by_request:
            for request_id in [name for name in unbegun if name not in load.waiting or name in load.awaiting]:
                self._unbegun.discard(request_id)
                self._live[request_id].join(began_s)
        for output in outputs:
            self._deliver(output, now_s)
        if not self.load.has_work:
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
        if output.request_id in self._unbegun.by_request:  # another choice, which goes on as well, still waits
            self._unbegun.discard(output.request_id)
        if sequences.is_over:
            self._leave(output.request_id)

    def _step_once(self, iteration: Iteration) -> tuple[list[EngineOutput], EngineLoad]:
        """Runs in the engine's thread."""
        outputs: list[EngineOutput] = []
        if self._engine.has_work or self._is_lost:
            outputs = self._engine.step() if self._scheduler is None else self._scheduler.step(iteration)
        return outputs, self._engine_load()

    def _engine_load(self) -> EngineLoad:
        """Runs in the engine's thread."""
        prefill_queue_position = None if self._scheduler is None else self._scheduler.engine.prefill_queue_position
        computed: dict[str, dict[int, int]] = {}
        awaiting: AbstractSet[str] = frozenset()
        if self._kv is not None:
            if pairs := self._kv.awaiting:
                awaiting = {request_id for request_id, _ in pairs}
            for request_id, (choices, _) in list(self._followed.items()):
                computed[request_id] = {choice: self._kv.computed(request_id, choice) for choice in choices}
        return EngineLoad(
            self._engine.has_work,
            self._engine.can_step,
            self._engine.pending_tokens,
            self._engine.waiting,
            prefill_queue_position,
            awaiting,
            self._engine.kv_free_tokens,
            computed,
        )

    def _fail(self, request_id: str, error: Exception) -> None:
        """End a live request with an error, and cancel it in the engine."""
        self._cancelled.add((request_id, None))
        self._wake.set()
        if not isinstance(error, TriptychError):
            logger.error("the engine failed on request %s", request_id, exc_info=error)
            error = EngineFailure("the engine failed on this request")
        self._leave(request_id).fail(error)

    def _leave(self, request_id: str) -> Sequences:
        self._unbegun.discard(request_id)
        return self._live.pop(request_id)


def _ending() -> Unavailable:
    """Why what has not begun fails."""
    return Unavailable("the instance is shutting down")


def _fail_copy(copy: _Copy, error: Exception) -> None:
    if not copy.result.done():
        copy.result.set_exception(error)
