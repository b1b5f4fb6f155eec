"""Pulls of an instance into its own memory, over links that transfers share, and the leases that it then releases."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import ceil

from triptych.domain.embedding import LeaseId, Ticket
from triptych.domain.queue_position import QueuePosition
from triptych.errors import LeaseLost, TriptychError
from triptych.machine.text.tensor_cache import TensorCache
from triptych.machine.text.tensor_effects import (
    Acquired,
    CachedSlot,
    Effect,
    StartPull,
    StopPull,
    TensorsRefused,
    WakeAt,
)
from triptych.policy.transport import MEMORY

from ..agenda import Agenda  # noqa: TID252 - of the simulator
from ..engines import Activity  # noqa: TID252
from ..network import Flow, TimedLinks  # noqa: TID252
from .encoder import SimArena

_IDLE_S = 600.0
"""A connection to a holder that was not used for so long is made anew (``transport.peer_pool``)."""

Then = Callable[[tuple[CachedSlot, ...] | TriptychError], None]


@dataclass(slots=True)
class _Peer:
    """The connection to a holder."""

    is_open: bool = False
    used_s: float = 0.0
    users: int = 0
    waiting: list[Callable[[], None]] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class _Pull:
    start: StartPull
    began_s: float
    flow: Flow | None = None
    is_stopped: bool = False


class SimReceiver:
    """``transport.receiver.TensorReceiver`` over the same machine, without contents."""

    def __init__(
        self,
        name: str,
        cache: TensorCache,
        links: TimedLinks,
        holders: Mapping[str, SimArena],
        agenda: Agenda,
        activity: Activity,
        *,
        control_s: float,
        sweep_interval_s: float,
    ) -> None:
        """``holders``: what all instances hold, by their names; it may grow."""
        self.cache = cache
        self._name = name
        self._links = links
        self._holders = holders
        self._agenda = agenda
        self._activity = activity
        self._control_s = control_s
        self._sweep_interval_s = sweep_interval_s
        self._wanted: dict[str, Then] = {}
        self._peers: defaultdict[str, _Peer] = defaultdict(_Peer)
        self._pulls: dict[int, _Pull] = {}
        self._unreleased: dict[str, list[LeaseId]] = {}

    def acquire(
        self,
        request_id: str,
        tickets: tuple[Ticket, ...],
        queue_position: QueuePosition,
        then: Then,
        *,
        transient: bool = False,
    ) -> None:
        """Call ``then`` when all are here, or they cannot be. From here on the receiver releases the tickets' leases."""
        self._wanted[request_id] = then
        now_s = self._agenda.now_s
        self._apply(self.cache.acquire(request_id, tickets, queue_position, now_s, transient=transient))

    def leave(self, request_id: str) -> None:
        self._wanted.pop(request_id, None)
        self._apply(self.cache.leave(request_id, self._agenda.now_s))

    def copies_gone(self, request_id: str) -> None:
        self._apply(self.cache.copies_gone(request_id, self._agenda.now_s))

    def tick(self) -> None:
        self._apply(self.cache.tick((), self._agenda.now_s))

    def _apply(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case StartPull():
                    self._agenda.soon(self._connect, effect)
                case Acquired(request_id, slots):
                    if (then := self._wanted.pop(request_id, None)) is not None:
                        self._agenda.soon(then, slots)
                case TensorsRefused(request_id, error):
                    if (then := self._wanted.pop(request_id, None)) is not None:
                        self._agenda.soon(then, error)
                case Ticket():
                    self.release(effect)
                case StopPull(pull_id):
                    if (pull := self._pulls.get(pull_id)) is not None and not pull.is_stopped:
                        pull.is_stopped = True
                        self._agenda.soon(self._stop, pull)
                case WakeAt(at_s):
                    self._agenda.at(max(at_s, self._agenda.now_s), self.tick)
                case _:
                    pass  # evicted, or waits for room

    # --- pulls -------------------------------------------------------------------------------------------------------

    def _connect(self, start: StartPull) -> None:
        agenda, holder = self._agenda, start.ticket.holder
        pull = self._pulls[start.pull_id] = _Pull(start, agenda.now_s)
        if holder == self._name:
            self._arrived(pull)
            return
        peer = self._peer(holder)
        peer.users += 1
        if peer.is_open:
            self._transfer(pull)
            return
        peer.waiting.append(lambda: self._transfer(pull))
        if len(peer.waiting) == 1:
            agenda.after(2 * self._control_s, self._connected, peer)

    def _peer(self, holder: str) -> _Peer:
        """The connection, unless it was closed as it was idle."""
        peer = self._peers[holder]
        if not peer.users and peer.is_open:
            every_s = self._sweep_interval_s
            closes_s = every_s * ceil((peer.used_s + _IDLE_S) / every_s)
            peer.is_open = closes_s > self._agenda.now_s
        return peer

    def _connected(self, peer: _Peer) -> None:
        peer.is_open = True
        first, *others = peer.waiting
        peer.waiting = []
        first()
        for transfer in others:
            self._agenda.soon(transfer)

    def _transfer(self, pull: _Pull) -> None:
        """The bytes travel, after the links' latency."""
        if pull.is_stopped:
            return
        links = self._links.path(pull.start.ticket.holder, self._name)
        self._agenda.after(self._links.flows.latency_s(links), self._flow, pull, links, self._agenda.now_s)

    def _flow(self, pull: _Pull, links: tuple[str, ...], began_s: float) -> None:
        nbytes = pull.start.ticket.slot_nbytes
        if pull.is_stopped:
            return
        if nbytes:
            pull.flow = self._links.transfer(links, nbytes, lambda: self._flowed(pull, began_s))
        else:
            self._flowed(pull, began_s)

    def _flowed(self, pull: _Pull, began_s: float) -> None:
        if pull.is_stopped:
            return
        ticket, now_s = pull.start.ticket, self._agenda.now_s
        self._activity.pulled(began_s, now_s, ticket.slot_nbytes)
        self._leave_peer(ticket.holder)
        if self._holders[ticket.holder].machine.may_read(ticket.lease_id, ticket.offset, ticket.slot_nbytes, now_s):
            self._arrived(pull)
        else:
            del self._pulls[pull.start.pull_id]
            error = LeaseLost("the holder does not know the lease")
            self._apply(self.cache.pull_failed(pull.start.pull_id, error, now_s))

    def _leave_peer(self, holder: str) -> None:
        peer = self._peers[holder]
        peer.users -= 1
        peer.used_s = self._agenda.now_s

    def _arrived(self, pull: _Pull) -> None:
        pull_id = pull.start.pull_id
        del self._pulls[pull_id]
        now_s = self._agenda.now_s
        self._apply(self.cache.pulled(pull_id, MEMORY, now_s - pull.began_s, now_s))

    def _stop(self, pull: _Pull) -> None:
        """Stop a pull that nobody needs."""
        if self._pulls.pop(pull.start.pull_id, None) is None:
            return
        if pull.flow is not None:
            self._links.cancel(pull.flow)
        holder = pull.start.ticket.holder
        if holder != self._name:
            self._leave_peer(holder)
            self._peers[holder].is_open = False
        self._apply(self.cache.pull_stopped(pull.start.pull_id, self._agenda.now_s))

    # --- leases ------------------------------------------------------------------------------------------------------

    def release(self, ticket: Ticket) -> None:
        """Release its lease at its holder. There is one call per holder at a time."""
        holder = ticket.holder
        unreleased = self._unreleased.get(holder)
        if unreleased is None:
            unreleased = self._unreleased[holder] = []
            self._agenda.soon(self._release_next, holder)
        unreleased.append(ticket.lease_id)

    def _release_next(self, holder: str) -> None:
        lease_ids = self._unreleased[holder]
        if not lease_ids:
            del self._unreleased[holder]
            return
        self._unreleased[holder] = []
        if holder == self._name:
            self._holders[holder].release(lease_ids)
            self._release_next(holder)
            return
        self._peers[holder].users += 1
        self._agenda.after(self._control_s, self._release_at, holder, lease_ids)

    def _release_at(self, holder: str, lease_ids: list[LeaseId]) -> None:
        self._holders[holder].release(lease_ids)
        self._agenda.after(self._control_s, self._released, holder)

    def _released(self, holder: str) -> None:
        self._leave_peer(holder)
        self._release_next(holder)
