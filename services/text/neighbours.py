"""Encoders met ahead of the first pull: described and connected to in the background, and again when they restart.

Connecting takes up to a second: nothing of that is for a request to wait for. One task for each encoder, so that one
that hangs or is gone delays nobody who needs another; a pull that comes while its encoder is being connected to
shares that attempt.
"""

import asyncio
import logging

from triptych.errors import TriptychError
from triptych.runtime.tasks import TaskScope
from triptych.transport.probe import PeerBook

from .holders import HolderDirectory

logger = logging.getLogger(__name__)

_FIRST_RETRY_S = 0.05


class Neighbours:
    """``start`` it once its scope is open; it ends with the scope."""

    def __init__(self, holders: HolderDirectory, peers: PeerBook, *, scope: TaskScope, interval_s: float) -> None:
        """``interval_s``: how often an encoder is asked who it is, and the longest wait after a failure."""
        self._holders = holders
        self._peers = peers
        self._scope = scope
        self._interval_s = interval_s

    def start(self) -> None:
        for place in range(len(self._holders)):
            self._scope.spawn(self._keep(place), name=f"meet-encoder-{place}")

    async def _keep(self, place: int) -> None:
        """An encoder that restarted is found by its epoch, a link that failed by its absence from the book."""
        failures = 0
        while True:
            try:
                info = (await self._holders.describe(place)).info
                await self._peers.meet(info.instance_id, info.epoch, info.offers)
            except (TriptychError, TimeoutError) as error:
                if failures == 0:
                    logger.info("encoder %d of %d cannot be met yet: %s", place + 1, len(self._holders), error)
                pause_s = min(self._interval_s, _FIRST_RETRY_S * 2 ** min(failures, 16))
                failures += 1
            else:
                failures, pause_s = 0, self._interval_s
            await asyncio.sleep(pause_s)
