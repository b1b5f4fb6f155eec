"""A host whose cores all processes share: engines, preparation, and what services and clients take beside them.

Without a host each engine and each preparing core of an instance has a processor of its own, and services take no time.
"""

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import ceil, isfinite
from typing import Any, Self

from triptych.virtual.offload import Kind

_INSTANT_S = 2e-9
"""Timers are as much too early."""


class BadHost(ValueError):
    """A description of a host that cannot be used. The message says what and where."""


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU time of a piece of work on a core alone, seconds: of one that comes alone, and of one that comes while the process has others, which need no
    further waking.
    """

    alone_s: float = 0.0
    together_s: float = 0.0

    def s(self, *, alone: bool) -> float:
        return self.alone_s if alone else self.together_s

    def times(self, number: int) -> "Cost":
        return Cost(number * self.alone_s, number * self.together_s)

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.alone_s + other.alone_s, self.together_s + other.together_s)


NOTHING = Cost()


@dataclass(frozen=True, slots=True)
class FrontCosts:
    """Of one process that requests and answers pass."""

    request: Cost = NOTHING
    """A request without items, on its way in."""
    item: Cost = NOTHING
    """More for each item."""
    message: Cost = NOTHING
    """A message of an answer, on its way out."""
    end: Cost = NOTHING
    """More after the last message ..."""
    item_end: Cost = NOTHING
    """... and for each item of the request; also what is done for it before it comes, as nothing waits for that."""


@dataclass(frozen=True, slots=True)
class TextCosts:
    """Of a text instance, beside what its engine's profile has. But for items no step runs meanwhile."""

    request: Cost = NOTHING
    """Alone: the engine has no other."""
    item: Cost = NOTHING
    """To take in an embedding, in the instance's event loop. Steps run meanwhile."""
    end: Cost = NOTHING
    """More for a request at its end."""
    export: Cost = NOTHING
    """More for a request that goes on at another instance, after its first token and before its keys and values can be pulled."""
    transfer: Cost = NOTHING
    """More for a request whose keys and values come from another instance, before it goes on, ..."""
    transfer_end: Cost = NOTHING
    """... and what nothing waits for; of the router and both instances."""
    step_s: float = 0.0
    sequence_s: float = 0.0
    """More for each sequence in a step."""


@dataclass(frozen=True, slots=True)
class EncoderCosts:
    """Of an encoder, beside preparation and passes."""

    item: Cost = NOTHING
    """Alone: no other is prepared or encoded."""
    end: Cost = NOTHING
    """More for each item after its pass: nothing waits for that."""


@dataclass(frozen=True, slots=True)
class Host:
    """Cores that all processes share, and the CPU time that services and clients take. A process's own event loop does one thing at a time."""

    cores: float
    """A part of one may be taken by what is not simulated."""
    slice_s: float = 0.0005
    """How long a piece of work keeps a core for which others wait. Linux lets it for up to 1.4 ms (on two cores), but services' threads wait
    for each other more often; the default fits a service beside two engines.
    """
    pass_speed: float = 1.0
    """Speed of a core in a pass (``Kind``) while no other makes one and all have work, over what it has alone: they share caches and memory.
    Costs are those of a core alone.
    """
    decode_speed: float = 1.0
    """Speed of a core that decodes while all others make passes."""
    decodes_speed: float = 1.0
    """Speed of a core that decodes while all others decode too, for other instances."""
    client: FrontCosts = FrontCosts()
    gateway: FrontCosts = FrontCosts()
    router: FrontCosts = FrontCosts()
    text: TextCosts = TextCosts()
    encoder: EncoderCosts = EncoderCosts()

    @property
    def front(self) -> Sequence[tuple[str, FrontCosts]]:
        """The processes that a request passes, in order; answers pass them the other way."""
        return (("client", self.client), ("gateway", self.gateway), ("router", self.router))

    @property
    def places(self) -> int:
        """Pieces of work that run at a time."""
        return ceil(self.cores)

    def speed(self, kind: Kind, others: Sequence[Kind]) -> float:
        """CPU time that a core gives to this kind of work per second while others do theirs, as a core alone would count it."""
        slowed = 0.0
        if kind is Kind.PASS:
            slowed = (len(others) - others.count(Kind.PASS)) * (1.0 - self.pass_speed)
        elif kind is Kind.DECODE:
            slowed = others.count(Kind.PASS) * (1.0 - self.decode_speed)
            slowed += others.count(Kind.DECODE) * (1.0 - self.decodes_speed)
        return self.cores / self.places * (1.0 - slowed / max(1, self.places - 1))

    @classmethod
    def parse(cls, document: Mapping[str, Any]) -> Self:
        """Read a document with the names of the fields: costs are tables, a ``Cost`` is ``[alone, together]``. Raises BadHost."""
        values = _checked("", document, cls(1.0))
        host = cls(**{"cores": 0.0, **values})
        if host.cores <= 0:
            raise BadHost("cores is missing, or not above 0")
        if host.slice_s <= 0:
            raise BadHost("slice_s is not above 0")
        for name in ("pass_speed", "decode_speed", "decodes_speed"):
            if not 0 < (speed := getattr(host, name)) <= 1:
                raise BadHost(f"{name} is not above 0 and at most 1: {speed}")
        return host


def _checked(name: str, document: object, like: Any) -> dict[str, Any]:
    """The values of a table that has fields of ``like``. Raises BadHost."""
    if not isinstance(document, Mapping):
        raise BadHost(f"{name.rstrip('.')} is not a table")
    known = {field.name: getattr(like, field.name) for field in fields(like)}
    if unknown := sorted(document.keys() - known.keys()):
        raise BadHost(f"there is no {name}{unknown[0]}; there are {', '.join(sorted(known))}")
    values: dict[str, Any] = {}
    for key, value in document.items():
        match known[key]:
            case float():
                values[key] = _number(name + key, value)
            case Cost():
                if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
                    raise BadHost(f"{name}{key} is not [alone, together]: {value!r}")
                values[key] = Cost(*(_number(name + key, seconds) for seconds in value))
            case costs:
                values[key] = type(costs)(**_checked(f"{name}{key}.", value, costs))
    return values


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or value < 0:
        raise BadHost(f"{name} is not a number from 0 on: {value!r}")
    return float(value)


@dataclass(eq=False, slots=True)
class _Piece:
    """Work for one core."""

    left_s: float
    """CPU time that it still needs."""
    done: asyncio.Future[None]
    kind: Kind
    began_s: float = 0.0
    """When it got its core."""
    known_s: float = 0.0
    """Up to when ``left_s`` counts what it had."""


@dataclass(slots=True)
class HostCores:
    """Owner of the work that runs on a host's cores, in virtual time. What waits for a core gets one in order: a free one, or that of a piece
    which has had it for ``slice_s`` and waits again then.
    """

    host: Host
    given_s: float = 0.0
    """CPU time of all pieces, as their processes would count it."""
    _running: list[_Piece] = field(default_factory=list)
    _waiting: deque[_Piece] = field(default_factory=deque)
    _timer: asyncio.TimerHandle | None = None
    _loops: dict[str, deque[tuple[float, asyncio.Future[None]]]] = field(default_factory=dict)
    """What event loops have to do, the first of which runs."""

    def run(self, cost_s: float, kind: Kind = Kind.OTHER) -> asyncio.Future[None]:
        """Begin a piece of work; the future is done when it has had ``cost_s`` of CPU time, whether somebody waits or not."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Piece(cost_s, done, kind))
        self._schedule()
        return done

    def run_in_loop(self, process: str, cost: Cost) -> asyncio.Future[None]:
        """As ``run``, after what this process's event loop has to do already."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = self._loops.setdefault(process, deque())
        waiting.append((cost.s(alone=not waiting), done))
        if len(waiting) == 1:
            self._run_first(process)
        return done

    def run_through(self, work: Sequence[tuple[str, Cost]]) -> asyncio.Future[float]:
        """Run work one after the other in the event loops of these processes; the future gives when the last was done."""
        loop = asyncio.get_running_loop()
        passed: asyncio.Future[float] = loop.create_future()
        left = iter(work)

        def go_on(_: object = None) -> None:
            if (following := next(left, None)) is not None:
                self.run_in_loop(*following).add_done_callback(go_on)
            elif not passed.done():
                passed.set_result(loop.time())

        go_on()
        return passed

    def _run_first(self, process: str) -> None:
        waiting = self._loops[process]
        cost_s, done = waiting[0]

        def end(_: asyncio.Future[None]) -> None:
            waiting.popleft()
            if not done.done():
                done.set_result(None)
            if waiting:
                self._run_first(process)

        self.run(cost_s).add_done_callback(end)

    def _schedule(self) -> None:
        """Note what was done, and give cores to what is next."""
        loop = asyncio.get_running_loop()
        now_s, places = loop.time(), self.host.places
        for piece, speed in self._speeds():
            self.given_s += (now_s - piece.known_s) * self.host.cores / places
            piece.left_s -= (now_s - piece.known_s) * speed
            piece.known_s = now_s
        for piece in [piece for piece in self._running if piece.left_s <= _INSTANT_S]:
            self._running.remove(piece)
            if not piece.done.done():
                piece.done.set_result(None)
        gives_way = [piece for piece in self._running if now_s - piece.began_s >= self.host.slice_s - _INSTANT_S]
        for piece in gives_way[: max(0, len(self._waiting) - (places - len(self._running)))]:
            self._running.remove(piece)
            self._waiting.append(piece)
        while self._waiting and len(self._running) < places:
            piece = self._waiting.popleft()
            piece.began_s = piece.known_s = now_s
            self._running.append(piece)
        if self._timer is not None:
            self._timer.cancel()
        next_s = [piece.left_s / speed for piece, speed in self._speeds()]
        if self._waiting:
            next_s += [piece.began_s + self.host.slice_s - now_s for piece in self._running]
        self._timer = loop.call_later(max(0.0, min(next_s)), self._schedule) if next_s else None

    def _speeds(self) -> list[tuple[_Piece, float]]:
        """What runs, and how fast."""
        kinds = [piece.kind for piece in self._running]
        return [
            (piece, self.host.speed(piece.kind, kinds[:number] + kinds[number + 1 :]))
            for number, piece in enumerate(self._running)
        ]
