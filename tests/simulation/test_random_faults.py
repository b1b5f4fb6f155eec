"""The whole cluster under random faults of every kind.

Of each kind of instance at most one is in trouble at a time, and in some seeds one of two routers, so that there is always a spare
one: then every request ends in its right answer, within its deadline, but for one that two crashes hit before it got further. Nothing
is left, invariants hold, and a seed runs the same way each time.
"""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.examples import seeds
from tests.simulation.cluster import EncoderNode, RouterNode, SimCluster, TextNode, World
from tests.simulation.test_cluster import check_right, now_s, simulate
from tests.simulation.workload import Ask, make_asks, play
from triptych.domain.embedding import Ticket
from triptych.domain.membership import MemberState
from triptych.domain.stage import Role
from triptych.errors import DeadlineExceeded, EngineFailure, TransferFailed
from triptych.machine.arena.arena import ArenaMachine
from triptych.machine.arena.published import PublishedContents
from triptych.machine.encoder.batch_queue import BatchQueue
from triptych.machine.router.attainment import AttainmentRecorder
from triptych.machine.router.cluster import ClusterMachine
from triptych.machine.router.cluster_limits import ClusterLimits
from triptych.machine.router.losses import MOST_ENDED
from triptych.machine.router.promises import Promises
from triptych.machine.router.request import RequestLimits, RequestMachine
from triptych.machine.router.request_events import AttemptKind, Generate
from triptych.machine.router.shared_events import Moved
from triptych.machine.router.wait_predictor import WaitPredictor
from triptych.machine.text.tensor_cache import TensorCache
from triptych.policy import dispatching
from triptych.policy.policies import PolicyNames
from triptych.rpc.routers import Routers
from triptych.services.text.jobs import Jobs
from triptych.virtual.links import Fault, Link

ROOT = Path(__file__).parents[2]
_GROUPS = 30
"""Tests of some seeds each."""
_AT_ONCE = 10
"""Seeds of one test."""
_USUAL = 3
"""So many groups are in ``make test``: at least one of each kind of world below."""
_EARLY = 3
"""Of so many seeds one has routers that send prefixes of prompts early, however short these are."""
_KEPT = 5
"""Of so many seeds one has instances that pull what others have kept of a prompt, as when it is sent again after a loss."""
_APART = 3
"""Of so many seeds one has instances that prefill and instances that decode."""
_LENDING = 5
"""Of so many seeds one, if its instances are not apart, has encoders that lend their time to text requests."""
_ROUTERS = 7
"""Of so many seeds one has two routers that are in trouble as well, and clients that use both."""
_REQUESTS = 18
_DURATION_S = 5.0
_TIMEOUT_S = 30.0
_INSTANCES = 3
"""Of each kind."""
_LOST_CALLS = 0.02
_FAILED_PULLS = 0.02
_ATTEMPTS = 6
"""Twice the default: calls and pulls fail at random as well, which a request may meet more often than an instance that dies."""
_LENDS_READILY = ClusterLimits(lend_above=0, lent_patience_s=0.05)
"""Few requests wait at a time."""
REPLAYED = range(8)
"""Seeds with all variants, of which other processes must say the same."""
_LATE_SHARE = 0.01
"""Share of a seed's requests that may end by their deadline."""


class Kind(StrEnum):
    """What happens to a process; all but the last three for a while."""

    CRASH = "it dies, and is started again"
    PAUSE = "it is stopped, and goes on"
    SLOW = "its engine takes ten times as long"
    PARTITION = "some of the ways to it deliver nothing"
    LATE = "calls to it take long"
    BREAK = "all running calls to it break"
    CLOCK = "its clock steps"
    REPLACE = "it leaves, and another one joins"


_TEXT_SPEEDS = ("step_s", "prefill_token_s")
_SPEEDS = {Role.E: ("prepare_s", "batch_s", "token_s")} | dict.fromkeys(
    (Role.PD, Role.P, Role.D, Role.EPD), _TEXT_SPEEDS
)
"""Of their engines."""
_SLOWER = 10.0
_LATE_S = 1.0
_KV_ARENAS_NBYTES = (0, 4 << 10, 1 << 20)
_KV_TOKENS = (800, 1 << 20)
"""In the smaller, a few answers fill the memory."""
_DAMAGED_SEGMENTS = 0.02
_LEASES_S = (3.0, 60.0)
"""The shorter ones end while an instance is in trouble."""
_ARENAS_NBYTES = (4 << 10, 16 << 10, 1 << 20)
"""In the smallest, a few images fill the arena."""
_LASTS_S = (0.2, 1.5)
_APART_S = (0.3, 1.0)


Node = EncoderNode | TextNode | RouterNode


@dataclass(frozen=True, slots=True)
class Trouble:
    at_s: float
    role: Role | None
    """Of an instance; None: a router."""
    kind: Kind
    lasts_s: float
    pick: float
    """Chooses the victim."""
    forward: bool
    """How a clock steps."""


def roles(seed: int) -> tuple[Role, ...]:
    """The kinds of instances."""
    if seed % _APART == 1:
        return (Role.E, Role.P, Role.D)
    return (Role.EPD, Role.PD) if seed % _LENDING == 3 else (Role.E, Role.PD)


def has_routers(seed: int) -> bool:
    """Whether its clients use routers that can fail."""
    return seed % _ROUTERS == 2


def kinds(role: Role | None) -> list[Kind]:
    """A router has no engine."""
    return [kind for kind in Kind if role is not None or kind is not Kind.SLOW]


def plan(seed: int) -> list[Trouble]:
    """Plan troubles, one after the other for each kind of process."""
    rng, steps = Random(f"{seed}/troubles"), Random(f"{seed}/steps")
    troubles: list[Trouble] = []
    for role in (*roles(seed), None) if has_routers(seed) else roles(seed):
        at_s = rng.uniform(*_APART_S)
        while at_s < _DURATION_S:
            trouble = Trouble(
                at_s, role, rng.choice(kinds(role)), rng.uniform(*_LASTS_S), rng.random(), steps.random() < 0.5
            )
            troubles.append(trouble)
            at_s += trouble.lasts_s + rng.uniform(*_APART_S)
    return troubles


def _crashes(seed: int) -> int:
    return sum(trouble.kind is Kind.CRASH for trouble in plan(seed))


def workload(seed: int) -> list[Ask]:
    """In two waves, so that instances are busy; one of twenty clients leaves."""
    rng = Random(f"{seed}/clients")
    asks = make_asks(seed, _REQUESTS, images=(0, 3), rate_per_s=None, timeout_s=_TIMEOUT_S)
    return [
        replace(
            ask, at_s=rng.uniform(0, _DURATION_S), leave_after_s=rng.uniform(0, 0.5) if rng.random() < 0.05 else None
        )
        for ask in asks
    ]


class Troubles:
    """Carries out a plan. ``routers`` are those of the clients."""

    def __init__(self, cluster: SimCluster, routers: Routers | None) -> None:
        self._cluster = cluster
        self._routers = routers
        self._joined = 0

    async def run(self, troubles: Sequence[Trouble]) -> None:
        """Until the last one is over."""
        async with asyncio.TaskGroup() as group:
            for role in dict.fromkeys(trouble.role for trouble in troubles):
                group.create_task(self._in_turn([trouble for trouble in troubles if trouble.role is role]))

    async def _in_turn(self, troubles: Sequence[Trouble]) -> None:
        began_s = now_s()
        for trouble in troubles:
            await asyncio.sleep(began_s + trouble.at_s - now_s())
            nodes = [node for node in self._nodes(trouble.role) if node.is_up and not node.drained]
            await self._happen(trouble, nodes[int(trouble.pick * len(nodes))])

    def _nodes(self, role: Role | None) -> Sequence[Node]:
        if role is None:
            return self._cluster.routers
        if role is Role.E:
            return self._cluster.encoders
        if role is Role.EPD:
            return self._cluster.hybrids
        return [text for text in self._cluster.texts if text.role is role and text not in self._cluster.hybrids]

    async def _happen(self, trouble: Trouble, node: Node) -> None:
        match trouble.kind:
            case Kind.BREAK:
                for link in node.links:
                    link.break_calls()
            case Kind.CLOCK:
                node.clock_ahead_s += (1.0 + 2.0 * trouble.pick) * (1 if trouble.forward else -1)
            case Kind.REPLACE:
                await (self._replace_router(node) if trouble.role is None else self._replace(trouble.role, node))
            case _:
                end = await _begin(trouble, node)
                await asyncio.sleep(trouble.lasts_s)
                if (ending := end()) is not None:
                    await ending

    async def _replace_router(self, node: Node) -> None:
        assert self._routers is not None
        self._joined += 1
        self._cluster.routers.append(RouterNode(f"router-joined-{self._joined}", self._cluster))
        names = [router.name for router in self._cluster.routers]
        self._routers.use(names, leaving=[node.name])
        await node.drain()
        self._routers.use(name for name in names if name != node.name)
        await node.kill()

    async def _replace(self, role: Role, node: Node) -> None:
        self._joined += 1
        joining = f"{_LETTERS[role]}-joined-{self._joined}"
        await self._cluster.boot(role, joining)
        self._cluster.membership.set(joining, MemberState.ACTIVE)
        self._cluster.membership.set(node.name, MemberState.LEAVING)
        await node.drain()
        self._cluster.membership.set(node.name, None)
        await node.kill()


_LETTERS = {Role.E: "e", Role.EPD: "h", Role.PD: "t", Role.P: "p", Role.D: "d"}
"""With which the names of instances begin."""


async def _begin(trouble: Trouble, node: Node) -> Callable[[], Awaitable[None] | None]:
    """Returns what ends it."""
    match trouble.kind:
        case Kind.CRASH:
            await node.kill()
            return node.start
        case Kind.PAUSE:
            node.hang()
            return node.go_on
        case Kind.PARTITION:
            cut = node.links[int(trouble.pick * len(node.links)) :]
            for link in cut:
                link.stall()
            return partial(_resume, cut)
        case Kind.LATE:
            return _changed(node.links, {"latency_s": lambda _: lambda: _LATE_S})
        case _:
            assert not isinstance(node, RouterNode)
            assert trouble.role is not None
            return _changed([node.engine], {name: lambda usual: _SLOWER * usual for name in _SPEEDS[trouble.role]})


def _resume(links: Sequence[Link[Any]]) -> None:
    for link in links:
        link.resume()


def _changed(things: Sequence[object], changes: Mapping[str, Callable[[Any], Any]]) -> Callable[[], None]:
    """Change attributes; returns what changes them back."""
    usual = [(changed, name, getattr(changed, name)) for changed in things for name in changes]
    for changed, name, value in usual:
        setattr(changed, name, changes[name](value))

    def back() -> None:
        for changed, name, value in usual:
            setattr(changed, name, value)

    return back


_WITH_EVENTS = (ClusterMachine, RequestMachine)
_CHECKED: Mapping[type, Sequence[str]] = dict.fromkeys(_WITH_EVENTS, ("handle",)) | {
    ArenaMachine: ("reserve", "commit", "abandon", "grant", "release", "sweep"),
    BatchQueue: ("arrive", "prepared", "leave", "take", "done"),
    TensorCache: ("acquire", "pulled", "pull_failed", "pull_stopped", "leave", "copies_gone", "tick"),
    WaitPredictor: ("prepared", "encoded", "answering", "ended"),
    Promises: ("promise", "take"),
    AttainmentRecorder: ("prepared", "dispatched", "answering", "ended", "refused", "roll"),
    PublishedContents: ("encoding", "held", "segment", "encoding_ended", "gone"),
    Jobs: ("add", "enters_engine", "got_tokens", "ended"),
}
"""What changes each machine."""


@contextmanager
def checked() -> Iterator[None]:
    """The invariants of the machines are checked after every event, and not only every second."""
    with pytest.MonkeyPatch.context() as patch:
        for machine, mutators in _CHECKED.items():
            for name in mutators:
                patch.setattr(machine, name, _checking(getattr(machine, name)))
        yield


@contextmanager
def sent_early() -> Iterator[None]:
    """Every prefix of a prompt is long enough."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatching, "LEAST_TOKENS", 1)
        yield


def _checking(mutator: Callable[..., Any]) -> Callable[..., Any]:
    def checking(machine: Any, *event: Any, **more: Any) -> Any:
        effects = mutator(machine, *event, **more)
        machine.validate()
        return effects

    return checking


def run(seed: int) -> list[tuple[float, str, str]]:
    """One seed. Returns its decisions."""
    rng = Random(f"{seed}/world")

    def fault(link: str, method: str) -> Fault:
        del link, method
        return rng.choice((Fault.REQUEST_LOST, Fault.REPLY_LOST)) if rng.random() < _LOST_CALLS else Fault.NONE

    async def before_pull(reader: str, ticket: Ticket) -> None:
        del reader, ticket
        await asyncio.sleep(rng.expovariate(200))
        if rng.random() < _FAILED_PULLS:
            raise TransferFailed("on purpose")

    async def scenario(cluster: SimCluster) -> None:
        async with cluster.clients() if has_routers(seed) else nullcontext() as routers, asyncio.TaskGroup() as group:
            playing = group.create_task(play(routers or cluster.router, workload(seed)))
            group.create_task(Troubles(cluster, routers).run(plan(seed)))
        stayed = [reply for reply in playing.result() if not reply.left]
        late = [reply for reply in stayed if isinstance(reply.error, DeadlineExceeded)]
        assert len(late) <= _LATE_SHARE * len(stayed), f"{len(late)} of {len(stayed)} have missed their deadlines"
        suspects = [reply for reply in stayed if isinstance(reply.error, EngineFailure)]
        assert len(suspects) <= (_crashes(seed) >= MOST_ENDED), f"{len(suspects)} failed as if they had ended instances"
        check_right([reply for reply in stayed if reply not in late + suspects])

    is_early, is_apart, lends = seed % _EARLY == 0, Role.P in roles(seed), Role.EPD in roles(seed)
    is_kept = seed % _KEPT == _KEPT - 1
    own = Random(f"{seed}/apart")

    def damage(ticket: Ticket) -> bool:
        return ticket.holder.startswith(("p", "d")) and own.random() < _DAMAGED_SEGMENTS

    world = World(
        seed=seed,
        encoders=0 if lends else _INSTANCES,
        hybrids=_INSTANCES if lends else 0,
        texts=0 if is_apart else _INSTANCES,
        prefills=_INSTANCES if is_apart else 0,
        decodes=_INSTANCES if is_apart else 0,
        routers=2 if has_routers(seed) else 0,
        encoder_arena_bytes=rng.choice(_ARENAS_NBYTES),
        text_arena_bytes=rng.choice(_ARENAS_NBYTES),
        kv_arena_bytes=own.choice(_KV_ARENAS_NBYTES) if is_apart else 1 << 20,
        kv_tokens=own.choice(_KV_TOKENS) if is_apart else 1 << 20,
        chunk_tokens=own.choice((16, 1 << 20)) if is_apart else 1 << 20,
        damage=damage,
        fault=fault,
        before_pull=before_pull,
        router={
            "attempts": RequestLimits(
                max_encode_attempts=_ATTEMPTS,
                max_text_attempts=_ATTEMPTS,
                max_lease_s=own.choice(_LEASES_S) if is_apart else 60.0,
            ),
            "policies": PolicyNames(
                dispatch="prefix" if is_early else "complete",
                lending="idle" if lends else "always",
                prefixes="always" if is_kept else "never",
            ),
            "cluster": _LENDS_READILY,
        },
        text={"encode_first": lends, "kv_prefixes": is_kept},
        max_running=2 if lends else 64,
    )
    with sent_early() if is_early else nullcontext():
        return simulate(world, scenario)


@pytest.mark.parametrize("group", seeds(_GROUPS, usual=_USUAL))
def test_with_a_spare_instance_every_request_is_answered_whatever_happens(group: int) -> None:
    with checked():
        for seed in range(group * _AT_ONCE, (group + 1) * _AT_ONCE):
            run(seed)


@pytest.mark.parametrize("seed", [412, 1061, 1355])
def test_a_request_waits_for_text_instances_of_which_each_was_lost(seed: int) -> None:
    run(seed)


def test_a_seed_runs_the_same_way_each_time() -> None:
    first = run(3)
    assert run(3) == first
    assert run(4) != first


_REPLAY = """
from hashlib import sha256
from tests.simulation.test_random_faults import REPLAYED, run
print(*(sha256(repr(run(seed)).encode()).hexdigest() for seed in REPLAYED))
"""


def test_a_seed_runs_the_same_way_in_every_process() -> None:
    """Hashes of strings differ between processes, by which sets of names are ordered."""
    told = [
        subprocess.run(
            [sys.executable, "-c", _REPLAY],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},  # noqa: TID251 - a child gets all of it
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for hash_seed in ("1", "2")
    ]
    assert told[0] == told[1]
    assert len(set(told[0])) == len(REPLAYED)


def test_beginnings_are_sent_early_in_some_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    handle = RequestMachine.handle

    def counting(machine: RequestMachine, *event: Any) -> Any:
        effects = handle(machine, *event)
        generates = [effect for effect in effects if isinstance(effect, Generate)]
        sent.extend(effect.tokens or 0 for effect in generates if effect.kind is AttemptKind.EARLY_PREFILL)
        return effects

    monkeypatch.setattr(RequestMachine, "handle", counting)
    run(1)
    assert not sent
    run(_EARLY)
    assert len(sent) >= _REQUESTS / 3


def test_every_kind_of_fault_happens_to_every_kind_of_process() -> None:
    planned = {(trouble.role, trouble.kind) for seed in range(10 * _AT_ONCE) for trouble in plan(seed)}
    assert planned == {(role, kind) for role in (*_SPEEDS, None) for kind in kinds(role)}


def test_answers_go_on_at_the_other_router_in_some_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Routers] = []
    clients = SimCluster.clients

    @asynccontextmanager
    async def kept(cluster: SimCluster) -> AsyncIterator[Routers]:
        async with clients(cluster) as routers:
            made.append(routers)
            yield routers

    monkeypatch.setattr(SimCluster, "clients", kept)
    run(2)
    run(3)
    assert [routers.continuations > 0 for routers in made] == [True]


def test_requests_are_moved_to_and_from_lenders_in_a_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[bool] = []
    handle = RequestMachine.handle

    def counting(machine: RequestMachine, *event: Any) -> Any:
        if isinstance(event[0], Moved):
            moved.append(event[0].grant is not None)
        return handle(machine, *event)

    monkeypatch.setattr(RequestMachine, "handle", counting)
    run(3)
    assert set(moved) == {False, True}
