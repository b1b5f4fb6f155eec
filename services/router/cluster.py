"""Does what the cluster's machine says: follows the membership, watches instances, hands out credits, gives leases back."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import aclosing, contextmanager, suppress
from typing import Protocol

from triptych.domain.embedding import LeaseId
from triptych.domain.instance import InstanceLoad, ModelInfo
from triptych.domain.membership import Member, MembershipSnapshot, MemberState
from triptych.domain.timeline import Readiness
from triptych.errors import DeadlineExceeded, TriptychError, Unavailable
from triptych.machine.router.cluster import ENCODE, TEXT, ClusterMachine
from triptych.machine.router.cluster_events import (
    AskAgain,
    ClusterEffect,
    ClusterEvent,
    Connect,
    Disconnect,
    InstanceSeen,
    InstanceSuspected,
    LoadReported,
    MemberJoined,
    MemberLeaving,
    MemberLeft,
    Noticed,
    Tick,
    WakeAt,
)
from triptych.machine.router.shared_events import CreditReturned, Granted, Refused, TextPoolLost
from triptych.policy.policies import Policies
from triptych.policy.routing import Pool
from triptych.ports import Clock, InstanceClient, Membership, Rng

from .connection import Connection
from .settings import RouterSettings

logger = logging.getLogger(__name__)

_ASK_S = 0.25
"""For so long a request waits for text instances that were away and are asked again."""


class Scope(Protocol):
    """Owns background tasks (``runtime.tasks.TaskScope``). ``spawn`` raises RuntimeError when it takes no more."""

    def spawn(self, work: Coroutine[object, object, None], *, name: str) -> None: ...


class Applicant(Protocol):
    """A request, which may have asked for places."""

    def answered(self, answer: Granted | Refused | TextPoolLost) -> None: ...


class Cluster:
    """The router's instances. All methods but ``release`` return at once."""

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
    ) -> None:
        """``connect`` makes the client of an address; it is closed when the member is gone and no call runs."""
        self._membership = membership
        self._connect = connect
        self._settings = settings
        self._clock = clock
        self._scope = scope
        self._machine = ClusterMachine(
            settings.cluster,
            policies,
            rng,
            arena_retry_s=settings.attempts.arena_retry_s,
            retry_after_s=settings.capacity.retry_after_s,
        )
        self._snapshot = MembershipSnapshot()
        self._connections: dict[str, Connection] = {}
        self._applicants: dict[int, Applicant] = {}
        self._text_back = asyncio.Event()
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_s = 0.0

    # --- what it knows -----------------------------------------------------------------------------------------------

    @property
    def model(self) -> ModelInfo | None:
        return self._machine.model

    @property
    def kv_tokens(self) -> int:
        """Most tokens that any usable text instance keeps for one request; 0 where that is not known."""
        return self._machine.kv_tokens

    @property
    def text_lost(self) -> bool:
        """Whether there has been no text instance for the whole grace."""
        return self._machine.text_lost

    @property
    def outstanding_credits(self) -> int:
        """Credits of items and dispatches that have not come back: none when nothing runs."""
        return self._machine.outstanding

    @property
    def waiting_for_credits(self) -> int:
        """Requests that wait for room in the encoders' arenas."""
        return self._machine.waiting

    def instances_by_state(self) -> dict[tuple[str, ...], int]:
        """How many instances there are, by role (``E``, ``PD`` ...; empty before it was seen) and state."""
        return {("" if role is None else role.value, state): n for (role, state), n in self._machine.states().items()}

    @property
    def membership(self) -> MembershipSnapshot:
        """The one that is followed."""
        return self._snapshot

    @property
    def membership_fault(self) -> str:
        """Why the source of members cannot be read now; empty when it can."""
        return self._membership.fault

    @property
    def encoders(self) -> Pool:
        """The instances that encode as they are believed to be now."""
        return self._machine.pool(ENCODE, self._clock())

    @property
    def texts(self) -> Pool:
        """The instances that prefill and decode as they are believed to be now."""
        return self._machine.pool(TEXT, self._clock())

    def readiness(self) -> Readiness:
        return self._machine.readiness()

    def validate(self) -> None:
        """Raise AssertionError where an invariant does not hold."""
        self._machine.validate()

    @contextmanager
    def call(self, name: str) -> Iterator[InstanceClient]:
        """Around a call to an instance. Raises InstanceLost within it once it is given up, Unavailable for none."""
        connection = self._connections.get(name)
        if connection is None:
            raise Unavailable("the instance has left")
        with connection.call() as client:
            yield client

    # --- what happens ------------------------------------------------------------------------------------------------

    def join(self, request: int, applicant: Applicant) -> None:
        """From now on the request of this number may ask for places."""
        self._applicants[request] = applicant

    def leave(self, request: int) -> None:
        del self._applicants[request]

    def feed(self, event: ClusterEvent) -> None:
        self._apply(self._machine.handle(event, self._clock()))
        if self._machine.text_lost:
            self._text_back.clear()
        else:
            self._text_back.set()

    async def ask_for_text(self) -> None:
        """Ask whoever is away, and wait a moment: a process that was stopped may have gone on since it was asked."""
        for connection in self._connections.values():
            connection.wanted.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(_ASK_S):
                await self._text_back.wait()

    def release(self, name: str, lease_ids: tuple[LeaseId, ...], credits_: tuple[int, ...]) -> None:
        """Give leases back in the background, and after that the credits that go with them."""
        if not lease_ids:
            self._return(credits_)
            return
        try:
            self._scope.spawn(self._release(name, lease_ids, credits_), name="release")
        except RuntimeError:
            # The process is ending: the leases run out by themselves.
            logger.info("%d leases at %s are left to run out", len(lease_ids), name)
            self._return(credits_)

    async def _release(self, name: str, lease_ids: tuple[LeaseId, ...], credits_: tuple[int, ...]) -> None:
        try:
            async with asyncio.timeout(self._settings.control_timeout_s):
                with self.call(name) as encoder:
                    await encoder.release(lease_ids)
        except TimeoutError:
            logger.warning("%s did not take %d leases back in time; they run out", name, len(lease_ids))
        except TriptychError as error:
            logger.info("%s did not take %d leases back (%s); they run out", name, len(lease_ids), error.code)
        finally:
            self._return(credits_)

    def _return(self, credits_: tuple[int, ...]) -> None:
        for credit in credits_:
            self.feed(CreditReturned(credit))

    def _apply(self, effects: list[ClusterEffect]) -> None:
        for effect in effects:
            match effect:
                case Granted(request) | Refused(request) if request in self._applicants:
                    self._applicants[request].answered(effect)
                case Granted(_, grants):
                    self._return(tuple(grant.credit for grant in grants))
                case TextPoolLost():
                    for applicant in list(self._applicants.values()):
                        applicant.answered(effect)
                case Connect(name):
                    self._open(name)
                case Disconnect(name):
                    self._connections.pop(name).over.set()
                case AskAgain(name):
                    if (connection := self._connections.get(name)) is not None:
                        connection.suspect.set()
                case WakeAt(at_s, reason):
                    logger.debug("to be woken at %g s: %s", at_s, reason)
                    self._wake(at_s)
                case Noticed(name, what):
                    logger.info("%s: %s", name, what)

    def _wake(self, at_s: float) -> None:
        """The earliest time counts: an effect done before this one may have led to an event that set an earlier one."""
        if self._alarm is not None:
            if self._alarm_s <= at_s:
                return
            self._alarm.cancel()
        self._alarm_s = at_s
        self._alarm = asyncio.get_running_loop().call_later(max(0.0, at_s - self._clock()), self._tick)

    def _tick(self) -> None:
        self._alarm = None
        self.feed(Tick())

    # --- membership --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to follow the membership, and to watch every member, in the scope."""
        self._scope.spawn(self._follow_membership(), name="membership")

    def close(self) -> None:
        """Let go of the timer; the watches end with the scope."""
        if self._alarm is not None:
            self._alarm.cancel()

    async def _follow_membership(self) -> None:
        async with aclosing(self._membership.snapshots()) as snapshots:
            async for snapshot in snapshots:
                if snapshot.version <= self._snapshot.version:
                    logger.warning("membership %d came after %d", snapshot.version, self._snapshot.version)
                    continue
                previous, self._snapshot = self._snapshot, snapshot
                for member in snapshot.since(previous):
                    logger.info("membership %d: %s is %s", snapshot.version, member.address, member.state)
                    self.feed(_change(member))

    def _open(self, name: str) -> None:
        connection = self._connections[name] = Connection(name, self._connect(name))
        self._scope.spawn(self._attend(connection), name=f"watch {name}")

    async def _attend(self, connection: Connection) -> None:
        """Watch a member until it is forgotten and no call to it runs any more."""
        try:
            async with asyncio.TaskGroup() as group:
                watching = group.create_task(self._watch(connection), name=f"watch {connection.name}")
                await connection.over.wait()
                watching.cancel()
            connection.give_up_calls()
            await connection.idle()
        finally:
            await connection.client.close()

    async def _watch(self, connection: Connection) -> None:
        """Ask who it is, then follow its load; when that breaks, begin again, less and less often while it is away."""
        name = connection.name
        delay_s = self._settings.reconnect_min_s
        while True:
            # A suspicion from before the answer is settled by it; one from later ends the watch that follows.
            connection.suspect.clear()
            try:
                async with asyncio.timeout(self._settings.control_timeout_s):
                    info = await connection.client.describe()
                self.feed(InstanceSeen(name, info))
                delay_s = self._settings.reconnect_min_s
                if await self._follow(connection):
                    continue
            except TimeoutError:
                logger.debug("%s does not answer", name)
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
        """Take load reports in until they stop, or there is a reason to ask who it is again; whether nothing is wrong.

        An instance whose heartbeat is lost may have been stopped: the calls that wait for it are given up too.
        """
        name, suspect, news = connection.name, connection.suspect, _News()
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(self._take_in(name, connection.client.watch_load(), news), name=f"load {name}")
            asked = group.create_task(_tell(suspect, news), name=f"suspicion of {name}")
            try:
                while not news.over and not suspect.is_set() and await news.within(self._settings.heartbeat_timeout_s):
                    pass
            finally:
                reading.cancel()
                asked.cancel()
        if not news.over and not suspect.is_set():
            logger.warning("the heartbeat of %s is lost: no report for %g s", name, self._settings.heartbeat_timeout_s)
            self.feed(InstanceSuspected(name))
            connection.give_up_calls()
        return news.planned

    async def _take_in(self, name: str, loads: AsyncGenerator[InstanceLoad], news: "_News") -> None:
        try:
            async with aclosing(loads):
                async for load in loads:
                    self.feed(LoadReported(name, load))
                    news.tell()
        except DeadlineExceeded:
            news.planned = True  # no call is without an end; a watch is just begun again
        except TriptychError as error:
            logger.debug("%s: %s", name, error.code)
        news.over = True
        news.tell()


def _change(member: Member) -> MemberJoined | MemberLeaving | MemberLeft:
    match member.state:
        case MemberState.ACTIVE:
            return MemberJoined(member)
        case MemberState.LEAVING:
            return MemberLeaving(member.address)
        case MemberState.LEFT:
            return MemberLeft(member.address)


class _News:
    """What a watch hears of."""

    def __init__(self) -> None:
        self.over = False
        """There will be no further report."""
        self.planned = False
        """The reports ended because their time was over."""
        self._event = asyncio.Event()

    def tell(self) -> None:
        self._event.set()

    async def within(self, timeout_s: float) -> bool:
        """Wait for news; whether there were any."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        except TimeoutError:
            return False
        self._event.clear()
        return True


async def _tell(suspect: asyncio.Event, news: _News) -> None:
    await suspect.wait()
    news.tell()
