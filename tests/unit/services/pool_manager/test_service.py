"""The pool manager with members and watchers: real registrars and watchers, under virtual time, over links that fail."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from tests.loaded import LoadedProcess
from triptych import ports
from triptych.domain.instance import InstanceLimits, InstanceLoad, LimitsReport, StageLoad
from triptych.domain.membership import Member, MemberKind, MemberState
from triptych.domain.pool import Heartbeat, MemberCondition, MemberReport, Order, OrderKind, Registration, Watch
from triptych.domain.stage import Role, Stage
from triptych.errors import FailedPrecondition, InvalidRequest, NotFound, Overloaded, TriptychError, Unavailable
from triptych.machine.membership_view import ViewLimits
from triptych.machine.pool_manager.members import MemberLimits
from triptych.runtime.managed_membership import ManagedMembership
from triptych.runtime.manager_access import ManagerAccess
from triptych.runtime.metrics import Metrics
from triptych.runtime.registrar import Registrar
from triptych.runtime.tasks import TaskScope
from triptych.services.pool_manager import gauges
from triptych.services.pool_manager.build import build
from triptych.services.pool_manager.record import ManagerRecord
from triptych.services.pool_manager.service import PoolManagerService
from triptych.services.pool_manager.settings import PoolManagerSettings
from triptych.virtual import virtual_time
from triptych.virtual.links import Link, LinkedPoolManager
from triptych.virtual.world import virtual_world

SETTINGS = PoolManagerSettings(members=MemberLimits(max_members=8), max_watchers=2, max_unregistered=4)


class Process(LoadedProcess):
    """A member's process: its load, its drain, its registrar."""

    def __init__(self, site: "Site", name: str, epoch: int = 1, managers: tuple[str, ...] = ("m1:1",)) -> None:
        super().__init__()
        self.name = name
        self.drain_ends = asyncio.Event()
        self.told = Registration(MemberKind.INSTANCE, name, epoch, f"127.0.0.1:{ord(name[0])}", "model", role=Role.E)
        self.scope = TaskScope(name)
        access = ManagerAccess(managers)
        self.registrar = Registrar(
            self,
            self.introduce,
            self.drain,
            site.connect,
            access,
            self.scope,
            set_stages=self.set_stages,
            set_limits=self.set_limits,
        )
        self.registrar.start()

    async def introduce(self) -> Registration:
        return self.told

    async def drain(self) -> None:
        await super().drain()
        await self.drain_ends.wait()

    async def kill(self) -> None:
        await self.scope.close()


class Site:
    """Pool managers by address, and whoever calls them."""

    def __init__(self, managers: tuple[str, ...] = ("m1:1",)) -> None:
        self.clock: ports.Clock = asyncio.get_running_loop().time
        self.links: dict[str, Link[Any]] = {}
        self.services: dict[str, PoolManagerService] = {}
        self._scopes: dict[str, TaskScope] = {}
        self._incarnations = 0
        self.processes: list[Process] = []
        self.watchers = TaskScope("watchers")
        self.metrics = Metrics()
        """Of the manager that was started last."""
        for name in managers:
            self.boot(name)

    def boot(self, name: str = "m1:1") -> None:
        """Start a manager that knows nothing."""
        self._incarnations += 1
        world = virtual_world(name, self._incarnations)
        self._scopes[name] = world.scope
        self.metrics = Metrics()
        service = build(SETTINGS, world, hour=lambda: 0.0, record=ManagerRecord(self.metrics))
        gauges.watch(self.metrics, service)
        self.services[name] = service
        if name in self.links:
            self.links[name].restart(service)
        else:
            self.links[name] = Link(name, service)

    def metric(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(f"triptych_pool_{name}", {"model_name": "model"} | labels)

    async def kill(self, name: str = "m1:1") -> None:
        self.links[name].kill()
        await self._scopes[name].close()

    def connect(self, address: str) -> LinkedPoolManager:
        return LinkedPoolManager(self.links[address])

    def start(self, name: str, epoch: int = 1, managers: tuple[str, ...] = ("m1:1",)) -> Process:
        process = Process(self, name, epoch, managers)
        self.processes.append(process)
        return process

    def watch(self, managers: tuple[str, ...] = ("m1:1",), **wanted: Any) -> "Watcher":
        access = ManagerAccess(managers)
        source = ManagedMembership(self.connect, access, ViewLimits(), clock=self.clock, name="w", **wanted)
        watcher = Watcher(source)
        self.watchers.spawn(watcher.run(), name="watcher")
        return watcher

    async def close(self) -> None:
        for process in self.processes:
            await process.kill()
        await self.watchers.close()
        for scope in self._scopes.values():
            await scope.close()


def age_s(watcher: "Watcher") -> float:
    """How old its list is, as its metric says."""
    (family,) = watcher.source.metrics()
    return float(family.samples[0].value)


class Watcher:
    """Follows a membership, as a router does."""

    def __init__(self, source: ManagedMembership) -> None:
        self.source = source
        self.members: dict[str, Member] = {}
        self.snapshots = 0

    async def run(self) -> None:
        async with aclosing(self.source.snapshots()) as snapshots:
            async for snapshot in snapshots:
                self.snapshots += 1
                self.members = {member.address: member for member in snapshot.members}

    def state(self, process: Process) -> str:
        """``suspected`` or the member's state; empty if it is not listed."""
        member = self.members.get(process.told.address)
        return "" if member is None else "suspected" if member.suspected else member.state.value


@asynccontextmanager
async def site(managers: tuple[str, ...] = ("m1:1",)) -> AsyncGenerator[Site]:
    made = Site(managers)
    try:
        yield made
        for service in made.services.values():
            service.validate()
    finally:
        await made.close()


def virtually(main: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Run the test under virtual time."""

    def test() -> None:
        virtual_time.run(main(), seed=1, limit_s=7200)

    test.__name__ = main.__name__
    return test


@virtually
async def test_a_watcher_learns_of_members_that_join_drain_and_leave() -> None:
    async with site() as here:
        watcher, a = here.watch(), here.start("a")
        await asyncio.sleep(1)
        b = here.start("b")
        await asyncio.sleep(1)
        assert (watcher.state(a), watcher.state(b)) == ("active", "active")
        assert watcher.members["127.0.0.1:97"] == Member("127.0.0.1:97", role=Role.E, model="model", epoch=1)
        async with asyncio.TaskGroup() as group:
            group.create_task(a.drain())  # as SIGTERM does
            await asyncio.sleep(0.5)
            assert (watcher.state(a), watcher.state(b)) == ("leaving", "active")
            a.drain_ends.set()
        await a.registrar.leave()
        await asyncio.sleep(0.1)
        assert (watcher.state(a), watcher.state(b)) == ("", "active")


@virtually
async def test_a_process_that_dies_is_suspected_then_lost_and_its_successor_replaces_it_at_once() -> None:
    async with site() as here:
        watcher, a, b = here.watch(), here.start("a"), here.start("b")
        await asyncio.sleep(1)
        await a.kill()
        await asyncio.sleep(2)
        assert watcher.state(a) == "active"
        await asyncio.sleep(2)
        assert watcher.state(a) == "suspected"
        await asyncio.sleep(8)
        status = await here.services["m1:1"].status()
        assert [member.registration.instance_id for pool in status.pools for member in pool.members] == ["b"]
        assert watcher.state(a) == "suspected", "the watcher decides by itself for a while"
        await asyncio.sleep(60)
        assert (watcher.state(a), watcher.state(b)) == ("", "active")
        await b.kill()
        again = here.start("b", epoch=2)
        await asyncio.sleep(0.1)
        assert watcher.members[again.told.address].epoch == 2


@virtually
async def test_a_manager_that_dies_and_restarts_empty_changes_nothing_for_a_watcher() -> None:
    async with site() as here:
        watcher, processes = here.watch(), [here.start(name) for name in "abc"]
        await asyncio.sleep(1)
        before = watcher.members
        await here.kill()
        await asyncio.sleep(100)
        assert watcher.members == before
        assert age_s(watcher) > 3
        assert watcher.source.fault == "no pool manager answers: unavailable"
        await processes[0].kill()
        here.boot()
        await asyncio.sleep(7)
        assert age_s(watcher) <= 1
        assert watcher.source.fault == ""
        assert [watcher.state(process) for process in processes] == ["suspected", "active", "active"]
        assert all(member.state is MemberState.ACTIVE for member in watcher.members.values())
        await asyncio.sleep(70)
        assert [watcher.state(process) for process in processes] == ["", "active", "active"]


@virtually
async def test_a_manager_that_is_stopped_and_goes_on_changes_nothing_for_a_watcher() -> None:
    async with site() as here:
        watcher, processes = here.watch(), [here.start(name) for name in "ab"]
        await asyncio.sleep(1)
        before, snapshots = watcher.members, watcher.snapshots
        here.links["m1:1"].stall()
        await asyncio.sleep(60)
        assert watcher.source.fault
        here.links["m1:1"].resume()
        await asyncio.sleep(10)
        assert watcher.source.fault == ""
        assert watcher.members == before
        assert watcher.snapshots >= snapshots
        assert {watcher.state(process) for process in processes} == {"active"}


@virtually
async def test_a_manager_that_is_cut_off_from_all_members_takes_none_away_from_a_watcher() -> None:
    async with site() as here:
        watcher, processes = here.watch(), [here.start(name) for name in "abc"]
        await asyncio.sleep(1)
        for process in processes:
            await process.kill()  # to the manager; the watcher may reach them
        await asyncio.sleep(1000)
        assert {watcher.state(process) for process in processes} == {"suspected"}
        assert (await here.services["m1:1"].status()).pools == ()


@virtually
async def test_with_two_managers_every_member_is_at_both_and_a_watcher_follows_the_one_that_answers() -> None:
    both = ("m1:1", "m2:1")
    async with site(both) as here:
        watcher, process = here.watch(both), here.start("a", managers=both)
        await asyncio.sleep(1)
        assert process.registrar.registered == 2
        await here.kill("m1:1")
        late = here.start("b", managers=both)
        await asyncio.sleep(5)
        assert (watcher.state(process), watcher.state(late)) == ("active", "active")
        assert (process.registrar.registered, watcher.source.fault) == (1, "")


@virtually
async def test_an_order_to_drain_is_obeyed_and_the_drained_process_stays_until_it_is_stopped() -> None:
    async with site() as here:
        watcher, a = here.watch(), here.start("a")
        await asyncio.sleep(1)
        manager = here.services["m1:1"]
        await here.connect("m1:1").drain_instance("a", force=True)
        await asyncio.sleep(0.2)
        assert (a.draining, watcher.state(a)) == (True, "leaving")
        a.drain_ends.set()
        await asyncio.sleep(2)
        ((member,),) = [pool.members for pool in (await manager.status()).pools]
        assert (member.condition, watcher.state(a)) == (MemberCondition.DRAINED, "leaving")
        with pytest.raises(NotFound):
            await manager.drain_instance("b", force=False)


@virtually
async def test_of_two_that_drain_the_last_instances_at_once_one_is_refused() -> None:
    async with site() as here:
        a, b = here.start("a"), here.start("b")
        await asyncio.sleep(1)
        outcomes = await asyncio.gather(
            *(here.connect("m1:1").drain_instance(name, force=False) for name in ("a", "b")), return_exceptions=True
        )
        await asyncio.sleep(0.2)
        refused = [(name, outcome) for name, outcome in zip("ab", outcomes, strict=True) if outcome is not None]
        ((last, error),) = refused
        assert isinstance(error, FailedPrecondition)
        assert error.message.startswith(f"{last} is the last encoder of model: requests for model with images")
        assert {process.name: process.draining for process in (a, b)} == {"a": last != "a", "b": last != "b"}
        drained = "b" if last == "a" else "a"
        await here.connect("m1:1").drain_instance(drained, force=False)  # as it does already
        await here.connect("m1:1").drain_instance(last, force=True)
        await asyncio.sleep(0.2)
        assert (a.draining, b.draining) == (True, True)
        for process in (a, b):
            process.drain_ends.set()


@virtually
async def test_a_member_that_the_manager_has_forgotten_registers_again() -> None:
    async with site() as here:
        watcher, a = here.watch(), here.start("a")
        await asyncio.sleep(1)
        here.links["m1:1"].stall()
        await asyncio.sleep(20)  # its reports do not arrive, and its stream stays open
        assert (await here.services["m1:1"].status()).pools == ()
        here.links["m1:1"].resume()
        await asyncio.sleep(3)
        assert len((await here.services["m1:1"].status()).pools) == 1
        assert watcher.state(a) == "active"


@virtually
async def test_a_watcher_hears_of_its_model_and_its_kinds_only() -> None:
    async with site() as here:
        here.start("a")
        router = here.start("r")
        router.told = Registration(MemberKind.ROUTER, "r", 1, "127.0.0.1:9", "model")
        other = here.start("o")
        other.told = Registration(MemberKind.INSTANCE, "o", 1, "127.0.0.1:8", "other", role=Role.E)
        watcher = here.watch(model="model", kinds=(MemberKind.INSTANCE,))
        await asyncio.sleep(1)
        assert watcher.members.keys() == {"127.0.0.1:97"}


@virtually
async def test_a_slow_watcher_gets_the_newest_state_in_one_delta() -> None:
    async with site() as here:
        manager = here.services["m1:1"]
        async with aclosing(manager.watch(Watch())) as deltas:
            first = await anext(deltas)
            for name in "abcd":
                here.start(name)
                await asyncio.sleep(1)
            second = await anext(deltas)
            assert (first.full, first.members, second.full, len(second.members)) == (True, (), False, 4)


async def reports(*several: MemberReport, stays_open: bool = False) -> AsyncGenerator[MemberReport]:
    for report in several:
        yield report
    if stays_open:
        await asyncio.Event().wait()


async def answers(manager: PoolManagerService, given: AsyncGenerator[MemberReport]) -> list[Order] | TriptychError:
    found: list[Order] = []
    try:
        async with aclosing(manager.attend(given)) as orders:
            found.extend([order async for order in orders])
    except TriptychError as error:
        return error
    return found


def told(address: str = "127.0.0.1:1", name: str = "a") -> Registration:
    return Registration(MemberKind.INSTANCE, name, 1, address, "model", role=Role.E)


@virtually
async def test_streams_that_do_not_register_properly_are_refused() -> None:
    async with site() as here:
        manager = here.services["m1:1"]
        assert isinstance(await answers(manager, reports(stays_open=True)), InvalidRequest)
        assert isinstance(await answers(manager, reports(told("10.0.0.1:1"))), InvalidRequest), "beyond loopback"
        assert isinstance(await answers(manager, reports(told("nowhere"))), InvalidRequest)
        for bad in (told(name="a\nb"), replace(told(), model="x" * 241), replace(told(), model="x\x1b[0m")):
            assert isinstance(await answers(manager, reports(bad)), InvalidRequest), "no key of the store"
        unknown = await answers(manager, reports(Heartbeat(1, InstanceLoad({}))))
        assert isinstance(unknown, list)
        assert [order.kind for order in unknown] == [OrderKind.REREGISTER]
        assert await answers(manager, reports()) == []
        assert (await manager.status()).pools == ()


@virtually
async def test_a_stream_that_reports_and_does_not_register_ends_in_time() -> None:
    async def heartbeats() -> AsyncGenerator[MemberReport]:
        for sequence in range(1, 1000):
            yield Heartbeat(sequence, InstanceLoad({}))
            await asyncio.sleep(1)

    async with site() as here:
        began_s = here.clock()
        assert isinstance(await answers(here.services["m1:1"], heartbeats()), InvalidRequest)
        assert here.clock() - began_s == pytest.approx(SETTINGS.register_timeout_s)


@virtually
async def test_streams_without_a_member_make_room_for_each_other_and_for_members() -> None:
    async with site() as here:
        manager = here.services["m1:1"]
        members = [here.start(name) for name in "abcdefg"]
        await asyncio.sleep(1)
        async with asyncio.TaskGroup() as group:
            idle = [group.create_task(answers(manager, reports(stays_open=True))) for _ in range(50)]
            await asyncio.sleep(0.1)
            ended = [task.done() for task in idle]
            assert ended == [True] * (50 - SETTINGS.max_unregistered) + [False] * SETTINGS.max_unregistered
            assert all(isinstance(task.result(), Overloaded) for task in idle if task.done())
            members.append(here.start("h"))
            await asyncio.sleep(1)
            assert [member.registrar.registered for member in members] == [1] * 8
        await asyncio.sleep(1)
        assert [member.registrar.registered for member in members] == [1] * 8


@virtually
async def test_members_and_watchers_beyond_the_limits_are_refused() -> None:
    async with site() as here:
        manager = here.services["m1:1"]
        for name in "abcdefgh":
            here.start(name)
        await asyncio.sleep(1)
        refused = await answers(manager, reports(told("127.0.0.1:1", "z"), stays_open=True))
        assert isinstance(refused, Unavailable)
        assert "8 members" in refused.message
        async with aclosing(manager.watch(Watch())) as first, aclosing(manager.watch(Watch())) as second:
            await anext(first)
            await anext(second)
            with pytest.raises(Overloaded):
                await anext(manager.watch(Watch()))
        await anext(manager.watch(Watch()))


@virtually
async def test_a_manager_that_shuts_down_ends_the_streams_and_refuses_new_ones() -> None:
    async with site() as here:
        a, manager = here.start("a"), here.services["m1:1"]
        await asyncio.sleep(1)
        await manager.drain()
        await asyncio.sleep(0.1)
        assert a.registrar.registered == 0
        assert await manager.missing() == ("it is draining",)
        with pytest.raises(Unavailable):
            await anext(manager.watch(Watch()))


@virtually
async def test_a_member_that_reports_too_often_is_slowed_down_and_another_is_not() -> None:
    async with site() as here:
        for pause_s, reports, least_s, most_s in ((0.0, 50, 0.98, 1.1), (0.1, 10, 1.0, 1.02)):
            began_s = here.clock()

            async def heartbeats(pause_s: float = pause_s, reports: int = reports) -> AsyncGenerator[MemberReport]:
                yield told()
                for sequence in range(reports):
                    await asyncio.sleep(pause_s)
                    yield Heartbeat(sequence, InstanceLoad({}))

            assert await answers(here.services["m1:1"], heartbeats()) == [Order(OrderKind.REGISTERED)]
            assert least_s <= here.clock() - began_s <= most_s


def switchable(process: Process) -> None:
    """Let a process register as one that can switch to any role, and serves PD."""
    process.told = replace(process.told, role=Role.PD, switchable=Role.EPD)
    process.set_stages(Role.PD.stages, 8, "a test")


@virtually
async def test_an_order_to_switch_is_obeyed_and_seen_in_the_status() -> None:
    async with site() as here:
        manager = here.connect("m1:1")
        stays, moves = here.start("a"), here.start("b")
        for process in (stays, moves):
            switchable(process)
        await asyncio.sleep(1)
        serving = [here.metric("serving_instances", stage=stage) for stage in ("encode", "prefill", "decode")]
        assert serving == [0, 2, 2]
        await manager.switch_instance("b", Role.D, force=False)
        await asyncio.sleep(1)
        assert here.metric("serving_instances", stage="prefill") == 1
        assert here.metric("switch_pending_seconds") == 0
        assert here.metric("switches_total", from_role="PD", to_role="D", outcome="obeyed") == 1
        assert here.metrics.registry.get_sample_value("triptych_pool_switch_seconds_count") == 1
        assert (frozenset(moves.load().stages), moves.stages_version) == (Role.D.stages, 9)
        assert moves.switched_for == "an operator asked for it"
        assert here.metric("switch_unserved_seconds") == 0
        ((_, told),) = [pool.members for pool in (await manager.status()).pools]
        assert (told.wanted, told.open, told.is_as_wanted) == (Role.D, Role.D.stages, True)
        with pytest.raises(FailedPrecondition, match="a is the last prefill instance"):
            await manager.switch_instance("a", Role.D, force=False)
        await manager.switch_instance("a", Role.D, force=True)
        await asyncio.sleep(1)
        assert set(stays.load().stages) == Role.D.stages


@virtually
async def test_the_first_that_an_opened_stage_serves_is_seen_in_metrics_and_the_status() -> None:
    async with site() as here:
        manager, process = here.connect("m1:1"), here.start("a")
        switchable(process)
        await asyncio.sleep(1)
        await manager.switch_instance("a", Role.EPD, force=False)
        await asyncio.sleep(1)
        process.reports({stage: StageLoad(5, 1, served=0) for stage in Stage})
        await asyncio.sleep(3)
        assert here.metric("switch_unserved_seconds") == pytest.approx(3, abs=0.1)
        process.reports({stage: StageLoad(0, 0, served=1) for stage in Stage})
        await asyncio.sleep(1)
        assert here.metric("switch_unserved_seconds") == 0
        took_s = here.metrics.registry.get_sample_value("triptych_pool_switch_first_request_seconds_sum")
        assert took_s == pytest.approx(4, abs=0.1)
        ((told,),) = [pool.members for pool in (await manager.status()).pools]
        assert told.served_s == pytest.approx(4, abs=0.1)


@virtually
async def test_an_order_that_is_not_obeyed_is_pending_until_its_member_is_lost() -> None:
    async with site() as here:
        for process in (here.start("a"), here.start("b")):
            switchable(process)
        await asyncio.sleep(1)
        await here.processes[1].kill()
        await here.connect("m1:1").switch_instance("b", Role.D, force=False)
        await asyncio.sleep(5)
        assert here.metric("switch_pending_seconds") == pytest.approx(5, abs=0.1)
        await asyncio.sleep(10)
        assert here.metric("switch_pending_seconds") == 0
        assert here.metric("switches_total", from_role="PD", to_role="D", outcome="lost") == 1
        assert here.metrics.registry.get_sample_value("triptych_pool_switch_seconds_count") == 0


@virtually
async def test_who_cannot_switch_is_refused_by_name() -> None:
    async with site() as here:
        manager = here.connect("m1:1")
        here.start("a")
        narrow = here.start("b")
        narrow.told = replace(narrow.told, role=Role.PD, switchable=Role.PD)
        await asyncio.sleep(1)
        with pytest.raises(NotFound):
            await manager.switch_instance("c", Role.D, force=False)
        with pytest.raises(InvalidRequest, match="a cannot switch: it runs without --switchable"):
            await manager.switch_instance("a", Role.D, force=False)
        with pytest.raises(InvalidRequest, match="role is E, b can switch within PD"):
            await manager.switch_instance("b", Role.E, force=False)
        await manager.drain_instance("b", force=True)
        await asyncio.sleep(0.2)
        with pytest.raises(FailedPrecondition, match="b is leaving"):
            await manager.switch_instance("b", Role.D, force=True)
        narrow.drain_ends.set()


@virtually
async def test_limits_by_hand_reach_the_instance_and_come_back_in_the_status() -> None:
    async with site() as here:
        manager, fixed, changes = here.connect("m1:1"), here.start("a"), here.start("b")
        changes.limits = LimitsReport(InstanceLimits(max_sequences=32, token_budget=512))
        await asyncio.sleep(1)
        await manager.set_limits("b", InstanceLimits(max_sequences=64))
        await asyncio.sleep(1)
        assert changes.limits == LimitsReport(InstanceLimits(None, 64, 512), 1, by_hand=True)
        (told,) = [
            member.load.limits
            for pool in (await manager.status()).pools
            for member in pool.members
            if member.registration.instance_id == "b"
        ]
        assert told == changes.limits
        await manager.set_limits("b", InstanceLimits())
        await asyncio.sleep(1)
        assert (changes.limits.version, changes.limits.by_hand) == (2, False)
        assert fixed.limits is None


@virtually
async def test_limits_that_an_instance_does_not_have_are_refused_by_name() -> None:
    async with site() as here:
        manager = here.connect("m1:1")
        here.start("a")
        here.start("b").limits = LimitsReport(InstanceLimits(max_sequences=32, token_budget=512))
        await asyncio.sleep(1)
        with pytest.raises(NotFound):
            await manager.set_limits("c", InstanceLimits(max_sequences=1))
        with pytest.raises(InvalidRequest, match="a reports no limits that can change while it runs"):
            await manager.set_limits("a", InstanceLimits(max_sequences=1))
        with pytest.raises(InvalidRequest, match="b has no max_batch_items; it has max_sequences, token_budget"):
            await manager.set_limits("b", InstanceLimits(max_batch_items=1))


@virtually
async def test_limits_by_hand_are_ordered_again_from_a_process_that_takes_the_place_of_another() -> None:
    async with site() as here:
        manager, first = here.connect("m1:1"), here.start("a")
        first.limits = LimitsReport(InstanceLimits(max_batch_items=8))
        await asyncio.sleep(1)
        await manager.set_limits("a", InstanceLimits(max_batch_items=3))
        await asyncio.sleep(1)
        for lost_s in (0.0, 15.0):
            await here.processes[-1].kill()
            await asyncio.sleep(lost_s)
            again = here.start("a", epoch=len(here.processes) + 1)
            again.limits = LimitsReport(InstanceLimits(max_batch_items=8))
            await asyncio.sleep(1)
            assert again.limits == LimitsReport(InstanceLimits(max_batch_items=3), 1, by_hand=True)


@virtually
async def test_metrics_are_found_of_members_and_gateways_that_are_there() -> None:
    async with site() as here:
        a = here.start("a")
        a.told = replace(a.told, metrics="10.0.0.1:9100")
        here.start("b")  # without an admin port
        here.watch(kinds=(MemberKind.ROUTER,), metrics="10.0.0.2:9100")
        await asyncio.sleep(1)
        service = here.services["m1:1"]
        encoder = {"job": "encoder", "model": "model", "role": "E", "pool": "model/E"}
        assert service.metrics_targets() == [
            {"targets": ["10.0.0.1:9100"], "labels": encoder},
            {"targets": ["10.0.0.2:9100"], "labels": {"job": "gateway"}},
        ]
        await here.watchers.close()
        a.drain_ends.set()
        await a.registrar.leave()
        await asyncio.sleep(1)
        assert service.metrics_targets() == []
