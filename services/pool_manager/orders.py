"""Orders to the scaler: one sender per pool, so that a scaler that hangs delays that pool only."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

from triptych.domain.scaling import PoolName
from triptych.domain.store import Fence
from triptych.errors import Deposed, InternalError, NotFound, TriptychError
from triptych.machine.pool_manager.pool_events import OrderFailed, OrderTaken, RemoveInstance, ScaleTo
from triptych.policy.retrying import pause_s
from triptych.ports import Clock, Scaler

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_REPEAT_REMOVAL_S = 10.0
"""An accepted removal is sent again if it is still wanted after this long."""


class Orders:
    """Sends the newest size of one pool, then which instances to stop, until the scaler accepts it. A removal waits for a size that
    fails: before it, the scaler would replace what is removed.

    ``fence`` is asked before every call, and nothing is sent without one: what is under way is then forgotten. So is the removal
    of an instance that ``works`` again.
    """

    def __init__(
        self,
        pool: PoolName,
        scaler: Scaler,
        *,
        fence: Callable[[], Fence | None],
        answer: Callable[[OrderFailed | OrderTaken], None],
        works: Callable[[str], bool],
        timeout_s: float,
        clock: Clock,
    ) -> None:
        self._pool = pool
        self._scaler = scaler
        self._fence = fence
        self._answer = answer
        self._works = works
        self._timeout_s = timeout_s
        self._clock = clock
        self._size: ScaleTo | None = None
        self._removals: dict[str, str] = {}
        """Reasons by instance."""
        self._removed: dict[str, float] = {}
        """Times when the scaler accepted the removal of an instance."""
        self._news = asyncio.Event()
        self._closed = False
        self.sent: Counter[tuple[str, str]] = Counter()
        """Orders by kind (``scale``, ``remove``) and outcome (``accepted``, ``failed``)."""

    def scale(self, order: ScaleTo) -> None:
        """A newer size replaces an older one that was not accepted yet."""
        self._size = order
        self._news.set()

    def remove(self, order: RemoveInstance) -> None:
        fresh_s = self._clock() - _REPEAT_REMOVAL_S
        self._removed = {name: at_s for name, at_s in self._removed.items() if at_s > fresh_s}
        if order.instance_id not in self._removed:
            self._removals[order.instance_id] = order.reason
            self._news.set()

    def close(self) -> None:
        self._closed = True
        self._news.set()

    async def run(self) -> None:
        """Send orders until closed."""
        failures = 0
        while not self._closed:
            self._news.clear()
            if self._fence() is None:
                self._forget()
            if self._size is None and not self._removals:
                failures = 0
                await self._news.wait()
            elif await self._send_next():
                failures = 0
            else:
                failures += 1
                pause = pause_s(str(self._pool), failures, first_s=_FIRST_PAUSE_S, longest_s=_LONGEST_PAUSE_S)
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._news.wait()

    def _forget(self) -> None:
        self._size = None
        self._removals.clear()
        self._removed.clear()

    async def _send_next(self) -> bool:
        """Send the next order; whether it is done with."""
        if (size := self._size) is not None:
            error = await self._send("scale", f"{size.size} instances, {size.reason}", size.size)
            done = error is None or isinstance(error, Deposed)
            if self._size is size and done:
                self._size = None
            self._answer(OrderTaken(size.number) if error is None else OrderFailed(size.number, str(error)))
            return done
        instance, reason = next(iter(self._removals.items()))
        if self._works(instance):  # it was cut off, and is not any more
            del self._removals[instance]
            return True
        error = await self._send("remove", f"stop {instance}, {reason}", instance)
        reason = self._removals.pop(instance, reason)
        done = error is None or isinstance(error, NotFound | Deposed)
        if done:
            self._removed[instance] = self._clock()
        else:
            self._removals[instance] = reason  # the others first
        return done

    async def _send(self, kind: str, order: str, argument: int | str) -> Exception | None:
        fence = self._fence()
        if fence is None:
            return Deposed("this manager no longer leads")
        try:
            async with asyncio.timeout(self._timeout_s):
                if isinstance(argument, int):
                    await self._scaler.scale(self._pool, argument, fence.token)
                else:
                    await self._scaler.remove(self._pool, argument, fence.token)
        except TimeoutError:
            error: Exception = TimeoutError(f"it did not answer within {self._timeout_s:g} s")
        except TriptychError as refused:
            error = refused
        except Exception:
            logger.exception("pool %s: the scaler has a defect", self._pool)
            error = InternalError("it has a defect")
        else:
            self.sent[kind, "accepted"] += 1
            logger.info("pool %s: ordered: %s", self._pool, order)
            return None
        self.sent[kind, "failed"] += 1
        logger.warning("pool %s: not ordered: %s: %s", self._pool, order, error)
        return error
