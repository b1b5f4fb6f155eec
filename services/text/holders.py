"""Who holds what a ticket promises: instance ids and epochs mapped to the encoders that the settings name.

A ticket names its holder by instance id and epoch, which say nothing about where it is. So the encoders are asked to
describe themselves, ahead of need (``neighbours.py``) and when a ticket names one that is not known yet; the answer
is kept until there is another one.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from triptych.domain.instance import InstanceInfo
from triptych.errors import TransferFailed, TriptychError
from triptych.ports import Encoder
from triptych.runtime.tasks import TaskScope

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Holder:
    """An encoder and what it said of itself."""

    encoder: Encoder
    info: InstanceInfo


class HolderDirectory:
    """Bounded by the number of encoders in the settings: one entry for each."""

    def __init__(self, encoders: Sequence[Encoder], *, scope: TaskScope, describe_timeout_s: float) -> None:
        self._encoders = tuple(encoders)
        self._scope = scope
        self._describe_timeout_s = describe_timeout_s
        self._known: dict[int, Holder] = {}
        """What each encoder (by its place in the settings) said last."""
        self._round: _Round | None = None

    def __len__(self) -> int:
        """Encoders in the settings, reachable or not."""
        return len(self._encoders)

    async def describe(self, place: int) -> Holder:
        """Ask the encoder at this place in the settings who it is now. Raises as its stub does, and TimeoutError."""
        encoder = self._encoders[place]
        async with asyncio.timeout(self._describe_timeout_s):
            holder = self._known[place] = Holder(encoder, await encoder.describe())
        return holder

    async def find(self, instance_id: str, epoch: int) -> Holder:
        """Raises TransferFailed when no encoder is that instance in that epoch, after asking them all once.

        One encoder that does not answer delays nobody who looks for another one.
        """
        asked_afresh = False
        while (holder := self._lookup(instance_id, epoch)) is None:
            if self._round is None:
                if asked_afresh:
                    raise TransferFailed(f"encoder {instance_id!r} (epoch {epoch}) is not reachable from here")
                self._ask_all()
                asked_afresh = True
            if self._round is not None:
                await self._round.next_answer()
        return holder

    def _lookup(self, instance_id: str, epoch: int) -> Holder | None:
        """What is known now; asks nobody. Both have to match: an instance may have moved from one place to another."""
        for holder in self._known.values():
            if (holder.info.instance_id, holder.info.epoch) == (instance_id, epoch):
                return holder
        return None

    def _ask_all(self) -> None:
        if self._encoders:
            self._round = _Round(len(self._encoders))
            for place in range(len(self._encoders)):
                self._scope.spawn(self._ask(self._round, place), name=f"describe-encoder-{place}")

    async def _ask(self, round_: "_Round", place: int) -> None:
        try:
            await self.describe(place)
        except (TriptychError, TimeoutError) as error:
            logger.warning("encoder %d of %d does not describe itself: %s", place + 1, len(self._encoders), error)
        finally:
            if round_.answered() == 0:
                self._round = None


class _Round:
    """Every encoder is asked once; whoever looks for one is woken at each answer."""

    def __init__(self, pending: int) -> None:
        self._pending = pending
        self._answer = asyncio.Event()

    def answered(self) -> int:
        """One more has answered or failed to. Returns how many have yet to."""
        self._pending -= 1
        self._answer.set()
        self._answer = asyncio.Event()
        return self._pending

    async def next_answer(self) -> None:
        await self._answer.wait()
