"""Runs the cluster machine: follows the membership, watches instances, grants credits, releases leases."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractContextManager, aclosing, suppress
from typing import Protocol

from triptych.domain.embedding import LeaseId
from triptych.domain.membership import Member, MembershipSnapshot, MemberState
from triptych.errors import DeadlineExceeded, TriptychError, Unavailable
from triptych.machine.router.backlogs import CostsOf
from triptych.machine.router.cluster import ClusterMachine
from triptych.machine.router.cluster_events import (
    ClusterEffect,
    ClusterEvent,
    ClusterTick,
    Connect,
    DescribeAgain,
    Disconnect,
    InstanceSeen,
    InstanceSuspected,
    LoadReported,
    Logged,
    MemberJoined,
    MemberLeaving,
    MemberLeft,
    WakeAt,
    WatchAgain,
)
from triptych.machine.router.instances import ENCODE
from triptych.machine.router.losses import Loss
from triptych.machine.router.shared_events import (
    CreditReturned,
    Granted,
    LeasesReturned,
    LeasesTaken,
    Moved,
    PlaceRefused,
    Release,
    TextPoolLost,
    released_together,
)
from triptych.policy.placement.pool import Pool
from triptych.policy.policies import Policies
from triptych.ports import Clock, InstanceClient, Membership, Rng

from .connection import Connection
from .settings import RouterSettings

logger = logging.getLogger(__name__)

_SAYS_IT_LIVES_S = 0.5
"""How long an instance may take to say that it has not ended, of which a request was lost with two."""
_ASK_S = 0.25
"""How long a request waits for unreachable text instances to answer a retry."""
_MAX_UNRELEASED = 16_384
"""Leases of one instance that wait for the call before theirs; further ones are left to expire."""


class Scope(Protocol):
    """Owns background tasks (``runtime.tasks.TaskScope``). ``spawn`` raises RuntimeError once it is closed."""

    def spawn(self, work: Coroutine[object, object, None], *, name: str) -> None: ...


class Requester(Protocol):
    """A request, as the receiver of the cluster's answers to it."""

    def feed(self, event: Granted | PlaceRefused | TextPoolLost | Moved) -> None: ...


class Cluster:
    """The router's instances. No method blocks; ``ask_for_text`` and ``wait_until`` alone wait."""

    def __init__(
        self,
        membership: Membership,
        connect: Callable[[str], InstanceClient],
        *,
        settings: RouterSettings,
        policies: Policies,
        clock: Clock,
        scope: Scope,
        rng: Rng,
        costs: CostsOf = lambda _: None,
    ) -> None:
        """``connect`` makes a client for an address; it is closed once the member is gone and no call is running.

        ``costs`` are those of profiles.
        """
        self._membership = membership
        self._connect = connect
        self._settings = settings
        self._clock = clock
        self._scope = scope
        self.machine = ClusterMachine(
            settings.cluster,
            policies,
            rng,
            arena_retry_s=settings.attempts.arena_retry_s,
            retry_after_s=settings.capacity.retry_after_s,
            costs=costs,
            max_keys=settings.resolved_keys,
        )
        """The router's knowledge of the cluster, for reading: ``feed`` changes it."""
        self._snapshot = MembershipSnapshot()
        self._connections: dict[str, Connection] = {}
        self._requesters: dict[int, Requester] = {}
        self.prefix_leases = {"granted": 0, "refused": 0}
        """Leases on segments of prompts' prefixes that were asked for, by whether they were there in time."""
        self._releases: dict[str, list[Release]] = {}
        """By instance: what waits for a running call."""
        self._all_released = asyncio.Event()
        self._all_released.set()
        self._text_back = asyncio.Event()
        self._changed = asyncio.Event()
        self._waits = 0
        """Number of those who wait for a change."""
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_s = 0.0

    # --- state -------------------------------------------------------------------------------------------------------

    @property
    def encoders(self) -> Pool:
        """The instances that encode, with their load now."""
        return self.machine.instances.pool(ENCODE, self._clock())

    def longest_waits_s(self) -> dict[int, float]:
        """By priority, the longest time that a request has waited for room in the encoders' arenas."""
        return self.machine.longest_waits_s(self._clock())

    @property
    def membership(self) -> MembershipSnapshot:
        """The current snapshot."""
        return self._snapshot

    @property
    def membership_fault(self) -> str:
        """Why the source of members cannot be read; empty if it can."""
        return self._membership.fault

    def validate(self) -> None:
        """Raise AssertionError where an invariant does not hold."""
        self.machine.validate()

    def call(self, name: str) -> AbstractContextManager[InstanceClient]:
        """Context of a call to an instance.

        Raises Unavailable if there is no such instance, InstanceLost inside when the call is given up.
        """
        connection = self._connections.get(name)
        if connection is None:
            raise Unavailable("the instance has left")
        return connection.call()

    def epoch_of(self, name: str) -> int:
        """The epoch under which an instance is known; 0 if it is not."""
        instance = self.machine.instances.by_name.get(name)
        return 0 if instance is None or instance.info is None else instance.info.epoch

    async def surviving(self, lost: Iterable[Loss]) -> frozenset[Loss]:
        """Losses of instances that still answer: only the connection to them had broken. An instance that says nothing has ended."""

        async def survives(loss: Loss) -> bool:
            try:
                async with asyncio.timeout(_SAYS_IT_LIVES_S):
                    with self.call(loss.name) as instance:
                        return (await instance.describe()).epoch == loss.epoch
            except (TimeoutError, TriptychError):
                return False

        asked = sorted(lost, key=lambda loss: (loss.name, loss.epoch))
        answers = await asyncio.gather(*map(survives, asked))
        return frozenset(loss for loss, lives in zip(asked, answers, strict=True) if lives)

    # --- events ------------------------------------------------------------------------------------------------------

    def register(self, request: int, requester: Requester) -> None:
        """Register the receiver of answers to a request."""
        self._requesters[request] = requester

    def unregister(self, request: int) -> None:
        del self._requesters[request]

    def feed(self, event: ClusterEvent) -> None:
        if effects := self.machine.handle(event, self._clock()):
            self._apply(effects)
        if self._waits:
            self._changed.set()
        if not self._text_back.is_set() and not self.machine.text_lost:
            self._text_back.set()

    async def wait_until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Return whether the condition holds, at the latest after so long. It is checked after each event."""
        self._waits += 1
        try:
            async with asyncio.timeout(timeout_s):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        finally:
            self._waits -= 1
        return True

    async def ask_for_text(self) -> bool:
        """Retry unreachable instances at once and wait a moment: a stopped process may have resumed.

        Returns whether a text instance is usable.
        """
        self._text_back.clear()
        for connection in self._connections.values():
            connection.wanted.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(_ASK_S):
                await self._text_back.wait()
        return not self.machine.text_lost

    def release(self, release: Release) -> None:
        """Release leases in the background, then return their credit.

        There is one call per instance at a time; leases that come meanwhile go with the next one. The instance counts as in use
        until its call has ended.
        """
        name = release.name
        if not release.lease_ids:
            self._return(() if release.credit is None else (release.credit,))
            return
        if release.credit is None:
            self.feed(LeasesTaken(name, release.lease_ids))
        if (waiting := self._releases.get(name)) is None:
            try:
                self._scope.spawn(self._release_all(name), name="release")
                self._releases[name] = [release]
                self._all_released.clear()
            except RuntimeError:
                # The process is ending: the leases expire.
                self._leave_to_expire(name, [release])
        elif sum([len(known.lease_ids) for known in (*waiting, release)]) > _MAX_UNRELEASED:
            self._leave_to_expire(name, [release])
        else:
            waiting.append(release)

    async def released(self) -> None:
        """Return once no lease is being released. A call to release some takes ``control_timeout_s`` at most."""
        await self._all_released.wait()

    def _leave_to_expire(self, name: str, releases: Sequence[Release]) -> None:
        lease_ids, credits_ = released_together(releases)
        logger.info("%d leases at %s are left to expire", len(lease_ids), name)
        self.feed(LeasesReturned(name, lease_ids, credits_))

    async def _release_all(self, name: str) -> None:
        try:
            while releases := self._releases[name]:
                self._releases[name] = []
                await self._release(name, *released_together(releases))
        finally:
            left = self._releases.pop(name)
            if not self._releases:
                self._all_released.set()
            if left:  # the process is ending
                self._leave_to_expire(name, left)

    async def _release(self, name: str, lease_ids: tuple[LeaseId, ...], credits_: tuple[int, ...]) -> None:
        try:
            async with asyncio.timeout(self._settings.control_timeout_s):
                with self.call(name) as encoder:
                    await encoder.release(lease_ids)
        except TimeoutError:
            logger.warning("%s did not release %d leases in time; they expire", name, len(lease_ids))
        except TriptychError as error:
            logger.info("%s did not release %d leases (%s); they expire", name, len(lease_ids), error.code)
        finally:
            self.feed(LeasesReturned(name, lease_ids, credits_))

    def _return(self, credits_: Sequence[int]) -> None:
        for credit in credits_:
            self.feed(CreditReturned(credit))

    def _apply(self, effects: list[ClusterEffect]) -> None:  # noqa: C901, PLR0912 - one dispatch
        for effect in effects:
            match effect:
                case Granted(request) | PlaceRefused(request) | Moved(request) if request in self._requesters:
                    self._requesters[request].feed(effect)
                case Granted(_, grants):
                    self._return(tuple(grant.credit for grant in grants))
                case Moved(_, _, grant):
                    self._return(() if grant is None else (grant.credit,))
                case TextPoolLost():
                    for requester in list(self._requesters.values()):
                        requester.feed(effect)
                case Connect(name):
                    self._open(name)
                case Disconnect(name):
                    self._connections.pop(name).ended.set()
                case DescribeAgain(name):
                    if (connection := self._connections.get(name)) is not None:
                        connection.suspect.set()
                case WatchAgain(name):
                    if (connection := self._connections.get(name)) is not None:
                        connection.out_of_step = True
                case WakeAt(at_s, reason):
                    logger.debug("wake at %g s: %s", at_s, reason)
                    self._wake(at_s)
                case Logged(name, what):
                    logger.info("%s: %s", name, what)

    def _wake(self, at_s: float) -> None:
        """Keep the earliest time: an effect applied before may have led to an event that set an earlier one."""
        if self._alarm is not None:
            if self._alarm_s <= at_s:
                return
            self._alarm.cancel()
        self._alarm_s = at_s
        self._alarm = asyncio.get_running_loop().call_later(max(0.0, at_s - self._clock()), self._tick)

    def _tick(self) -> None:
        self._alarm = None
        self.feed(ClusterTick())

    # --- membership --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start following the membership and watching every member."""
        self._scope.spawn(self._follow_membership(), name="membership")

    def close(self) -> None:
        """Cancel the timer. The watches end with the scope."""
        if self._alarm is not None:
            self._alarm.cancel()

    async def _follow_membership(self) -> None:
        async with aclosing(self._membership.snapshots()) as snapshots:
            async for snapshot in snapshots:
                if snapshot.version <= self._snapshot.version:
                    logger.warning(
                        "ignored membership %d, which came after %d", snapshot.version, self._snapshot.version
                    )
                    continue
                previous, self._snapshot = self._snapshot, snapshot
                for member in snapshot.since(previous):
                    logger.info("membership %d: %s is %s", snapshot.version, member.address, member.state)
                    self.feed(_change(member))

    def _open(self, name: str) -> None:
        connection = self._connections[name] = Connection(name, self._connect(name))
        self._scope.spawn(self._run_connection(connection), name=f"watch {name}")

    async def _run_connection(self, connection: Connection) -> None:
        """Watch a member until it is forgotten and no call to it is running."""
        try:
            async with asyncio.TaskGroup() as group:
                watching = group.create_task(self._watch(connection), name=f"watch {connection.name}")
                await connection.ended.wait()
                watching.cancel()
            connection.give_up_calls()
            await connection.idle()
        finally:
            await connection.client.close()

    async def _watch(self, connection: Connection) -> None:
        """Get the instance's description, then follow its load. On failure start over, with exponential backoff."""
        name = connection.name
        delay_s = self._settings.reconnect_min_s
        last_answer_s = self._clock()
        while True:
            # A new description settles earlier suspicions; a later one ends the watch below.
            connection.suspect.clear()
            connection.out_of_step = False
            try:
                async with asyncio.timeout(self._settings.control_timeout_s):
                    info = await connection.client.describe()
                last_answer_s = self._clock()
                self.feed(InstanceSeen(name, info))
                delay_s = self._settings.reconnect_min_s
                planned = await self._follow(connection)
                last_answer_s = self._clock()
                if planned:
                    await asyncio.sleep(self._settings.reconnect_min_s)  # an instance may end every watch at once
                    continue
            except TimeoutError:
                logger.debug("%s does not answer", name)
                if self._clock() - last_answer_s >= self._settings.heartbeat_timeout_s:
                    connection.give_up_calls()
            except TriptychError as error:
                logger.debug("%s: %s", name, error.code)
            self.feed(InstanceSuspected(name))
            connection.wanted.clear()
            await asyncio.sleep(self._settings.reconnect_min_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await connection.wanted.wait()
            delay_s = min(2 * delay_s, self._settings.reconnect_max_s)

    async def _follow(self, connection: Connection) -> bool:
        """Read load reports until they stop or the instance must be described again. Returns whether nothing failed.

        When the heartbeat is lost the process may be stopped, so calls to it are given up too.
        """
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(self._read_reports(connection), name=f"load {connection.name}")
            suspecting = group.create_task(connection.suspect.wait(), name=f"suspicion of {connection.name}")
            await asyncio.wait((reading, suspecting), return_when=asyncio.FIRST_COMPLETED)
            reading.cancel()
            suspecting.cancel()
        return not reading.cancelled() and reading.result()

    async def _read_reports(self, connection: Connection) -> bool:
        """Returns whether the reports ended at the call's deadline, or start over as one is missing."""
        name, limit_s, loop = connection.name, self._settings.heartbeat_timeout_s, asyncio.get_running_loop()
        try:
            async with asyncio.timeout(limit_s) as heartbeat, aclosing(connection.client.watch_load()) as loads:
                async for load in loads:
                    heartbeat.reschedule(loop.time() + limit_s)
                    self.feed(LoadReported(name, load))
                    if connection.out_of_step:
                        return True
        except DeadlineExceeded:
            return True  # every call has a deadline: start the watch again
        except TriptychError as error:
            logger.debug("%s: %s", name, error.code)
        except TimeoutError:
            logger.warning("the heartbeat of %s is lost: no report for %g s", name, limit_s)
            self.feed(InstanceSuspected(name))
            connection.give_up_calls()
        return False


def _change(member: Member) -> MemberJoined | MemberLeaving | MemberLeft:
    match member.state:
        case MemberState.ACTIVE:
            return MemberJoined(member)
        case MemberState.LEAVING:
            return MemberLeaving(member.address)
        case MemberState.LEFT:
            return MemberLeft(member.address)
