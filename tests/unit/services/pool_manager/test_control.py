"""The size of pools: routers' reports, decisions and orders, over real registrars and managers, under virtual time."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from triptych.domain.decision import (
    Acting,
    Bounds,
    DecisionOutcome,
    DecisionRecord,
    Override,
    PoolFacts,
    PoolLoad,
    PoolState,
    PoolView,
    ScalingStatus,
    Why,
)
from triptych.domain.history import HOURS_OF_WEEK
from triptych.domain.instance import InstanceLoad
from triptych.domain.membership import MemberKind
from triptych.domain.pool import ManualSize, Registration
from triptych.domain.scaling import PoolName, ProcessPhase, ScaledInstance, ScaledPool
from triptych.domain.stage import Role
from triptych.domain.store import Entry
from triptych.domain.tier import Tier
from triptych.domain.windows import ClassWindow, Judged, NamedClass, WindowReport
from triptych.errors import (
    Deposed,
    InvalidRequest,
    NotFound,
    Overloaded,
    StoreCorrupt,
    StoreUnavailable,
    TriptychError,
    Unavailable,
)
from triptych.policy.scaling import ScalingLimits
from triptych.ports import PoolManager
from triptych.runtime.manager_access import ManagerAccess
from triptych.runtime.metrics import Metrics
from triptych.runtime.registrar import Registrar
from triptych.runtime.tasks import TaskScope
from triptych.services.pool_manager import gauges
from triptych.services.pool_manager.build import build
from triptych.services.pool_manager.histories import Histories
from triptych.services.pool_manager.limits import ControlLimits
from triptych.services.pool_manager.service import PoolManagerService
from triptych.services.pool_manager.settings import PoolManagerSettings
from triptych.store.memory import MemoryStore
from triptych.testing.store import StoreLink
from triptych.virtual import virtual_time
from triptych.virtual.links import Link, LinkedPoolManager
from triptych.virtual.world import virtual_world

SETTINGS = PoolManagerSettings(scaler="127.0.0.1:1", autoscale=True)


class Member:
    """A process with a registrar; as a router it has a window for each second."""

    def __init__(self, links: Mapping[str, Link[PoolManager]], told: Registration, scope: TaskScope) -> None:
        self.told = told
        self.missed = 0
        self.drained = False
        self._made: list[WindowReport] = []
        self._begun_s = asyncio.get_running_loop().time()
        windows = self if told.kind is MemberKind.ROUTER else None
        access = ManagerAccess(tuple(links))
        self.registrar = Registrar(
            self, self.introduce, self.drain, lambda name: LinkedPoolManager(links[name]), access, scope, windows
        )
        self.registrar.start()

    async def introduce(self) -> Registration:
        return self.told

    async def drain(self) -> None:
        self.drained = True

    def load(self) -> InstanceLoad:
        return InstanceLoad({}, self.drained)

    def on_change(self, listener: object) -> None: ...

    def reports(self, after: int) -> Sequence[WindowReport]:
        now_s = asyncio.get_running_loop().time() - self._begun_s
        for sequence in range(len(self._made) + 1, int(now_s) + 1):
            counts = ClassWindow(
                arrivals=10,
                items=10,
                media_tokens=100,
                prompt_tokens=100,
                ttft=Judged(10 - self.missed, self.missed),
                missed_encode=self.missed,
            )
            self._made.append(WindowReport(1, sequence, 1.0, 0.0, "m", (NamedClass("image-256", counts),)))
        return [report for report in self._made if report.sequence > after]


E, PD = PoolName("m", Role.E), PoolName("m", Role.PD)
START_S = 5.0
PRICES = {"cheap": 1.0, "dear": 4.0}
"""Of an instance, by tier."""
HOUR = 100 * HOURS_OF_WEEK
"""When a test begins."""


class ScriptedScaler:
    """``ports.Scaler`` whose instances register after ``START_S``. It shows what it was ordered, and under which token."""

    def __init__(self, links: Mapping[str, Link[PoolManager]]) -> None:
        self.links = links
        self.sizes: dict[PoolName, int] = {E: 0, PD: 0, PoolName("m", Role.EPD): 0}
        self.running: dict[str, tuple[PoolName, Member, TaskScope]] = {}
        self.starting: dict[str, tuple[PoolName, float]] = {}
        self.failed: dict[str, PoolName] = {}
        self.orders: list[tuple[float, str, PoolName, int | str, int]] = []
        self.token = 0
        self.hangs: set[PoolName] = set()
        self.error: TriptychError | None = None
        self.broken = False
        self.degrees: dict[PoolName, int] = {}
        self.undivided: set[PoolName] = set()
        """Pools whose engine runs on one device."""
        self.away: TriptychError | None = None
        self.started = 0
        self.asked = 0

    def boot(self, pool: PoolName, number: int) -> None:
        """Instances that run already."""
        self.sizes[pool] = number
        for _ in range(number):
            self.started += 1
            self._run(f"{pool.role.value.lower()}{self.started}", pool)

    def _run(self, name: str, pool: PoolName) -> None:
        scope = TaskScope(name)
        address = f"127.0.0.1:{1000 + int(name.lstrip('epd'))}"
        tier = Tier(pool.tier, usd_per_hour=PRICES[pool.tier]) if pool.tier else None
        told = Registration(MemberKind.INSTANCE, name, 1, address, pool.model, role=pool.role, tier=tier)
        self.running[name] = (pool, Member(self.links, told, scope), scope)

    async def scale(self, pool: PoolName, size: int, token: int) -> None:
        if pool in self.hangs:
            await asyncio.sleep(3600)
        if self.error is not None:
            raise self.error
        if pool not in self.sizes:
            raise NotFound("there is no such pool")
        if token < self.token:
            raise Deposed(f"the order's token is {token}, a later leader has {self.token}")
        self.token = token
        self.orders.append((now_s(), "scale", pool, size, token))
        self.sizes[pool] = size

    async def remove(self, pool: PoolName, instance: str, token: int) -> None:
        if token < self.token:
            raise Deposed("an old token")
        self.token = token
        self.orders.append((now_s(), "remove", pool, instance, token))
        if instance not in self.running:
            raise NotFound("no such instance")
        assert self.running[instance][1].drained, "it still works"
        await self.end(instance)

    async def set_degree(self, pool: PoolName, degree: int, token: int) -> None:
        if pool in self.undivided:
            raise InvalidRequest("engine triptych runs on one device")
        self.orders.append((now_s(), "degree", pool, degree, token))
        self.degrees[pool] = degree

    async def end(self, name: str, *, farewell: bool = True) -> None:
        _, member, scope = self.running.pop(name)
        if farewell:
            await member.registrar.leave()
        await scope.close()

    async def pools(self) -> tuple[ScaledPool, ...]:
        self.asked += 1
        if self.away is not None:
            raise self.away
        return tuple(ScaledPool(pool, size, tuple(self._instances(pool))) for pool, size in self.sizes.items())

    def _instances(self, pool: PoolName) -> Iterator[ScaledInstance]:
        yield from (
            ScaledInstance(name, ProcessPhase.RUNNING) for name, entry in self.running.items() if entry[0] == pool
        )
        yield from (
            ScaledInstance(name, ProcessPhase.STARTING) for name, entry in self.starting.items() if entry[0] == pool
        )
        yield from (
            ScaledInstance(name, ProcessPhase.FAILED, "no model") for name, of in self.failed.items() if of == pool
        )

    async def run(self) -> None:
        while True:
            for pool, size in self.sizes.items():
                there = len(list(self._instances(pool)))
                for _ in range(size - there):
                    self.started += 1
                    self.starting[f"{pool.role.value.lower()}{self.started}"] = (pool, now_s() + START_S)
                for name in [name for name, entry in self.starting.items() if entry[0] == pool][: max(0, there - size)]:
                    del self.starting[name]
            for name, (pool, at_s) in list(self.starting.items()):
                if now_s() >= at_s:
                    del self.starting[name]
                    if self.broken:
                        self.failed[name] = pool
                    else:
                        self._run(name, pool)
            await asyncio.sleep(0.2)

    async def close(self) -> None: ...

    def sent(self, kind: str, pool: PoolName = E) -> list[int | str]:
        return [what for _, order, of, what, _ in self.orders if (order, of) == (kind, pool)]


def now_s() -> float:
    return asyncio.get_running_loop().time()


class Site:
    """Managers, a scaler with two encoders and a text instance, and a router."""

    def __init__(self, store: MemoryStore | None = None) -> None:
        self.links: dict[str, Link[PoolManager]] = {}
        self.managers: dict[str, tuple[PoolManagerService, TaskScope]] = {}
        self.stores: dict[str, StoreLink] = {}
        self.store = store
        self.scaler = ScriptedScaler(self.links)
        self.scope = TaskScope("site")
        self.incarnation = 0

    def boot(self, name: str = "m:1", settings: PoolManagerSettings = SETTINGS) -> PoolManagerService:
        """Start a manager."""
        self.incarnation += 1
        link = None
        if self.store is not None:
            link = self.stores[name] = StoreLink(self.store)
        world = virtual_world(f"{name} {self.incarnation}", self.incarnation * 10**9)
        service = build(
            settings,
            world,
            hour=lambda: HOUR + now_s() / 3600,
            store=link,
            scaler=None if settings.scaler == "none" else self.scaler,
        )
        self.managers[name] = (service, world.scope)
        if name in self.links:
            self.links[name].restart(service)
        else:
            self.links[name] = Link(name, service)
        return service

    async def boot_two(self) -> tuple[PoolManagerService, PoolManagerService]:
        """Two managers; the first one leads."""
        first = self.boot("m:1")
        await asyncio.sleep(0.1)
        return first, self.boot("m:2")

    async def kill(self, name: str = "m:1") -> None:
        self.links[name].kill()
        await self.managers.pop(name)[1].close()

    def begin(self) -> None:
        """Instances and a router register with the managers that exist."""
        self.scaler.boot(E, 2)
        self.scaler.boot(PD, 1)
        self.scope.spawn(self.scaler.run(), name="scaler")
        self.router = Member(self.links, Registration(MemberKind.ROUTER, "r1", 1, "127.0.0.1:99", "m"), self.scope)

    @property
    def encoders(self) -> int:
        return sum(pool == E for pool, _, _ in self.scaler.running.values())


def play(scenario: Callable[[Site], Coroutine[Any, Any, None]], *, shared: bool = False) -> None:
    """``shared`` managers have a store in common; others have their own."""

    async def test() -> None:
        site = Site(MemoryStore(clock=now_s) if shared else None)
        try:
            await scenario(site)
            for service, _ in site.managers.values():
                service.validate()
        finally:
            for _, scope in site.managers.values():
                await scope.close()
            for _, _, scope in list(site.scaler.running.values()):
                await scope.close()
            await site.scope.close()

    virtual_time.run(test(), limit_s=20_000)


def manual(pool: PoolName, size: int | None, for_s: float = 0.0) -> ManualSize:
    return ManualSize(pool.model, pool.role, size, for_s)


def fact(record: DecisionRecord) -> tuple[Why, DecisionOutcome]:
    return record.decision.why, record.outcome


@asynccontextmanager
async def cluster() -> AsyncIterator[tuple[PoolManagerService, Member, Metrics]]:
    """Two encoders, a text instance and a router of one model; an encoder of another; no scaler."""
    world = virtual_world("manager")
    async with world.scope, TaskScope("members") as members:
        settings = PoolManagerSettings(control=ControlLimits(max_instances=3))
        service = build(settings, world, hour=lambda: HOUR)
        links: dict[str, Link[PoolManager]] = {"m:1": Link("m:1", service)}
        told = [("e1", Role.E, "m"), ("e2", Role.E, "m"), ("t1", Role.PD, "m"), ("x1", Role.E, "other")]
        for number, (name, role, model) in enumerate(told):
            Member(
                links, Registration(MemberKind.INSTANCE, name, 1, f"127.0.0.1:{number + 1}", model, role=role), members
            )
        router = Member(links, Registration(MemberKind.ROUTER, "r1", 1, "127.0.0.1:99", "m"), members)
        metrics = Metrics()
        gauges.watch(metrics, service)
        yield service, router, metrics


def values(metrics: Metrics, name: str) -> dict[tuple[str, ...], float]:
    families = text_string_to_metric_families(metrics.render().decode())
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    return {tuple(sample.labels.values()): sample.value for sample in samples}


def test_a_breach_of_the_image_pool_is_seen_logged_and_advised_on_and_nothing_is_ordered(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test() -> None:
        async with cluster() as (service, router, metrics):
            await asyncio.sleep(60)
            assert values(metrics, "triptych_pool_attainment") == {("m", "E"): 1.0, ("m", "PD"): 1.0}
            router.missed = 5
            await asyncio.sleep(60)
            assert values(metrics, "triptych_pool_wanted_instances")["m", "E"] == 3
            assert values(metrics, "triptych_pool_wanted_instances")["m", "PD"] == 1
            assert values(metrics, "triptych_pool_state")["m", "E", "breach"] == 1
            assert values(metrics, "triptych_pool_state")["m", "PD", "breach"] == 0
            record = service.control.records("m", Role.E)[-1]
            assert (record.outcome, record.decision.why) == (DecisionOutcome.ADVISED, Why.BREACH)
            assert record.decision.missing == ("profile of the encoder",)

    with caplog.at_level(logging.INFO, logger="triptych.services.pool_manager.control"):
        virtual_time.run(test())
    assert any("pool m/E: 2 instances, 3 wanted: breach" in record.getMessage() for record in caplog.records)


def test_a_model_without_a_router_has_no_report_and_says_so() -> None:
    async def test() -> None:
        async with cluster() as (service, _, _):
            await asyncio.sleep(20)
            assert service.control.records("other", Role.E)[-1].decision.why is Why.NO_REPORT
            assert service.control.records("m", Role.E)[-1].decision.why is Why.STEADY
            assert service.control.records("nobody", Role.E) == ()

    virtual_time.run(test())


def test_the_status_of_each_pool_has_its_size_and_decisions() -> None:
    async def test() -> None:
        async with cluster() as (service, router, _):
            router.missed = 5
            await asyncio.sleep(60)
            pools = {(pool.model, pool.role): pool.scaling for pool in (await service.status()).pools}
            assert pools.keys() == {("m", None), ("m", Role.E), ("m", Role.PD), ("other", Role.E)}
            assert pools["m", None] is None
            image = pools["m", Role.E]
            assert image is not None
            assert (image.name, image.state, image.acting, image.ready) == ("m/E", PoolState.BREACH, Acting.NONE, 2)
            assert image.attainment.missed > 0
            last = image.decisions[-1]
            assert (last.target, last.outcome, last.reasons[0].why) == (3, DecisionOutcome.ADVISED, Why.BREACH)

    virtual_time.run(test())


def test_a_size_by_hand_ends_after_its_time_or_by_hand_and_is_checked() -> None:
    async def test() -> None:
        async with cluster() as (service, _, _):

            async def image() -> ScalingStatus:
                (found,) = [
                    pool.scaling for pool in (await service.status()).pools if (pool.model, pool.role) == encoders
                ]
                assert found is not None
                return found

            encoders = ("m", Role.E)
            await asyncio.sleep(2)
            await service.set_size(ManualSize("m", Role.E, 3, 60.0))
            await asyncio.sleep(2)
            assert (await image()).override == Override(3, 58.0)
            assert (await image()).decisions[-1].reasons[0].why is Why.OVERRIDE
            await service.set_size(ManualSize("m", Role.E, None))
            assert (await image()).override is None
            await service.set_size(ManualSize("m", Role.E, 1, 60.0))
            await asyncio.sleep(61)
            assert (await image()).override is None
            with pytest.raises(NotFound):
                await service.set_size(ManualSize("m", Role.EPD, 1, 60.0))
            with pytest.raises(InvalidRequest, match="size is 4, must be from 1 to 3"):
                await service.set_size(ManualSize("m", Role.E, 4, 60.0))
            with pytest.raises(InvalidRequest, match="time after which it ends"):
                await service.set_size(ManualSize("m", Role.E, 2, 0.0))

    virtual_time.run(test())


def test_reports_of_an_instance_are_ignored() -> None:
    async def test() -> None:
        world = virtual_world("manager")
        async with world.scope, TaskScope("members") as members:
            service = build(PoolManagerSettings(), world, hour=lambda: HOUR)
            links: dict[str, Link[PoolManager]] = {"m:1": Link("m:1", service)}
            told = Registration(MemberKind.ROUTER, "r1", 1, "127.0.0.1:99", "m")
            liar = Member(links, told, members)
            liar.told = Registration(MemberKind.INSTANCE, "e1", 1, "127.0.0.1:1", "m", role=Role.E)
            await asyncio.sleep(30)
            assert service.control.records("m", Role.E)[-1].decision.why is Why.NO_REPORT

    virtual_time.run(test())


# --- carried out ----------------------------------------------------------------------------------------------------------


def test_a_pool_grows_when_attainment_falls_and_the_other_stays() -> None:
    async def scenario(site: Site) -> None:
        service = site.boot()
        site.begin()
        await asyncio.sleep(60)
        assert site.scaler.sent("scale") == [2]
        assert set(site.scaler.sent("scale", PD)) == {1}
        site.router.missed = 5
        await asyncio.sleep(30)
        assert site.encoders == 3
        assert fact(service.control.records("m", Role.E)[-2]) == (Why.BREACH, DecisionOutcome.DONE)
        assert set(site.scaler.sent("scale", PD)) == {1}

    play(scenario)


def test_nothing_is_ordered_before_members_could_register() -> None:
    async def scenario(site: Site) -> None:
        service = site.boot()
        site.begin()
        await asyncio.sleep(8)
        assert site.scaler.orders == []
        assert "may still register" in service.control.status()[E].fault
        await asyncio.sleep(10)
        assert service.control.status()[E].fault == ""

    play(scenario)


def test_a_pool_that_lost_all_its_members_gets_its_size_again() -> None:
    async def scenario(site: Site) -> None:
        site.boot()
        site.begin()
        await asyncio.sleep(30)
        site.scaler.sizes[E] = 0  # as if it had forgotten
        for name in ("e1", "e2"):
            await site.scaler.end(name, farewell=False)
        await asyncio.sleep(40)
        assert site.encoders == 2

    play(scenario)


def test_an_instance_that_hangs_is_replaced_even_if_it_is_the_only_one_of_its_pool() -> None:
    async def scenario(site: Site) -> None:
        service = site.boot()
        site.begin()
        await asyncio.sleep(30)
        _, hung, scope = site.scaler.running["pd3"]
        await scope.close()
        hung.drained = True  # so that the scaler may stop it
        await asyncio.sleep(60)
        status = service.control.status()[PD]
        assert (status.ready, status.starting) == (0, 0)
        await asyncio.sleep(90)
        assert site.scaler.sent("remove", PD) == ["pd3"]
        assert service.control.status()[PD].ready == 1

    play(scenario)


def test_a_manager_that_is_cut_off_stops_nothing() -> None:
    async def scenario(site: Site) -> None:
        service = site.boot()
        site.begin()
        await asyncio.sleep(30)
        site.links["m:1"].stall()
        await asyncio.sleep(600)
        assert service.members_by_state() == {}
        assert site.scaler.sent("remove") == site.scaler.sent("remove", PD) == []
        site.links["m:1"].resume()
        await asyncio.sleep(60)
        assert {name: status.ready for name, status in service.control.status().items()} == {E: 2, PD: 1}
        assert site.scaler.sent("remove") == site.scaler.sent("remove", PD) == []

    play(scenario)


def test_a_size_by_hand_is_carried_out_by_draining_and_ends() -> None:
    async def scenario(site: Site) -> None:
        service = site.boot()
        site.begin()
        await asyncio.sleep(20)
        await service.set_size(manual(E, 1, 60.0))
        await asyncio.sleep(20)
        assert site.encoders == 1
        assert site.scaler.sent("remove") == ["e1"]
        await service.set_size(manual(E, 3, 600.0))
        await asyncio.sleep(20)
        assert site.encoders == 3
        assert service.control.status()[E].override is not None
        await service.set_size(manual(E, None))
        assert service.control.status()[E].override is None

    play(scenario)


@pytest.mark.parametrize(
    ("pool", "size", "for_s", "error"),
    [
        (E, 0, 60.0, InvalidRequest),
        (E, 65, 60.0, InvalidRequest),
        (E, 2, 0.0, InvalidRequest),
        (PoolName("nobody", Role.E), 2, 60.0, NotFound),
    ],
)
def test_a_size_by_hand_that_cannot_be_is_refused(
    pool: PoolName, size: int, for_s: float, error: type[TriptychError]
) -> None:
    async def scenario(site: Site) -> None:
        service = site.boot()
        site.begin()
        await asyncio.sleep(20)
        with pytest.raises(error):
            await service.set_size(manual(pool, size, for_s))

    play(scenario)


def test_a_pool_that_nobody_has_wanted_begins_with_a_size_by_hand() -> None:
    async def scenario(site: Site) -> None:
        service = site.boot()
        site.begin()
        await asyncio.sleep(30)
        hybrid = PoolName("m", Role.EPD)
        assert hybrid not in service.control.status()
        await service.set_size(manual(hybrid, 1, 600.0))
        await asyncio.sleep(30)
        assert service.control.status()[hybrid].ready == 1

    play(scenario)


def test_without_autoscale_only_sizes_by_hand_are_ordered_and_they_stay_after_their_end() -> None:
    async def scenario(site: Site) -> None:
        service = site.boot(settings=PoolManagerSettings(scaler="127.0.0.1:1"))
        site.begin()
        await asyncio.sleep(30)
        site.router.missed = 5
        await asyncio.sleep(30)
        assert site.scaler.orders == []
        assert fact(service.control.records("m", Role.E)[-1]) == (Why.BREACH, DecisionOutcome.ADVISED)
        await service.set_size(manual(E, 4, 60.0))
        await asyncio.sleep(30)
        assert site.encoders == 4
        orders = list(site.scaler.orders)
        await asyncio.sleep(200)
        assert site.encoders == 4
        assert site.scaler.orders == orders
        status = service.control.status()[E]
        assert (status.wanted, status.override) == (4, None)

    play(scenario)


# --- scalers that fail ----------------------------------------------------------------------------------------------------


def test_a_scaler_that_hangs_on_one_pool_delays_neither_the_other_nor_the_members() -> None:
    async def scenario(site: Site) -> None:
        service = site.boot()
        site.begin()
        site.scaler.hangs.add(E)
        await asyncio.sleep(20)
        await service.set_size(manual(PD, 2, 600.0))
        await asyncio.sleep(20)
        status = service.control.status()
        assert (status[PD].ready, status[PD].fault) == (2, "")
        assert "did not answer within 10 s" in status[E].fault
        assert len((await service.status()).pools) == 3
        site.scaler.hangs.clear()
        await asyncio.sleep(60)
        assert service.control.status()[E].fault == ""

    play(scenario)


def test_a_scaler_that_refuses_is_asked_again_for_the_newest_size_alone() -> None:
    async def scenario(site: Site) -> None:
        service = site.boot()
        site.begin()
        await asyncio.sleep(20)
        site.scaler.error = Unavailable("no quota")
        await service.set_size(manual(E, 3, 600.0))
        await asyncio.sleep(10)
        await service.set_size(manual(E, 4, 600.0))
        await asyncio.sleep(10)
        assert "no quota" in service.control.status()[E].fault
        site.scaler.error = None
        await asyncio.sleep(60)
        assert site.scaler.sent("scale") == [2, 4]
        assert (site.encoders, service.control.status()[E].fault) == (4, "")

    play(scenario)


def test_a_scaler_that_is_not_there_yet_is_waited_for_and_the_log_names_its_address(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(site: Site) -> None:
        site.scaler.away = Unavailable("the scaler cannot be reached")
        service = site.boot()
        site.begin()
        await asyncio.sleep(5)
        waiting = "waiting for the first answer of the scaler (the scaler cannot be reached)"
        assert service.control.status()[E].fault == waiting
        site.scaler.away = None
        await asyncio.sleep(20)
        assert service.control.status()[E].fault == ""

    with caplog.at_level(logging.INFO, logger="triptych.services.pool_manager"):
        play(scenario)
    said = [record.getMessage() for record in caplog.records if "scaler" in record.getMessage()]
    assert "the scaler at 127.0.0.1:1 fails: the scaler cannot be reached" in said
    assert "the scaler at 127.0.0.1:1 answers again" in said


def test_the_status_says_over_which_time_attainment_is_taken() -> None:
    async def scenario(site: Site) -> None:
        service = site.boot(settings=SETTINGS.model_copy(update={"scaling": ScalingLimits(attainment_window_s=120.0)}))
        site.begin()
        await asyncio.sleep(5)
        assert service.control.status()[E].attainment_window_s == 120.0

    play(scenario)


def test_three_failed_starts_are_given_up_visibly_until_one_succeeds() -> None:
    async def scenario(site: Site) -> None:
        service = site.boot()
        site.begin()
        metrics = Metrics()
        gauges.watch(metrics, service)
        await asyncio.sleep(20)
        site.scaler.broken = True
        await service.set_size(manual(E, 5, 6000.0))
        await asyncio.sleep(30)
        status = service.control.status()[E]
        assert status.state is PoolState.FROZEN
        assert "no model" in status.fault
        assert values(metrics, "triptych_pool_start_failures_total")["m", "E"] >= 3
        assert site.encoders == 2
        site.scaler.broken = False
        site.scaler.failed.clear()
        await service.set_size(manual(E, 3, 6000.0))
        await asyncio.sleep(30)
        status = service.control.status()[E]
        assert (status.ready, status.fault) == (3, "")

    play(scenario)


@pytest.mark.parametrize("scaler", ["none", "127.0.0.1:1"])
def test_a_pool_whose_last_member_has_left_is_forgotten_and_the_manager_goes_on(scaler: str) -> None:
    async def scenario(site: Site) -> None:
        service = site.boot(settings=SETTINGS.model_copy(update={"scaler": scaler}))
        site.begin()
        scope = TaskScope("other")
        told = Registration(MemberKind.INSTANCE, "x1", 1, "127.0.0.1:5000", "other", role=Role.E)
        member = Member(site.links, told, scope)
        await asyncio.sleep(30)
        assert PoolName("other", Role.E) in service.control.status()
        await member.registrar.leave()
        await scope.close()
        await asyncio.sleep(120)
        assert PoolName("other", Role.E) not in service.control.status()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await site.managers["m:1"][1].failed()
        assert service.control.status()[E].ready == 2

    play(scenario)


# --- several managers, a restart, and the store -----------------------------------------------------------------------------


def test_after_a_restart_with_an_empty_store_the_size_is_what_is_there() -> None:
    async def scenario(site: Site) -> None:
        service = site.boot()
        site.begin()
        await asyncio.sleep(20)
        await service.set_size(manual(E, 4, 60.0))
        await asyncio.sleep(20)
        await site.kill()
        await asyncio.sleep(5)
        service = site.boot()
        await asyncio.sleep(30)
        assert site.encoders == 4
        assert service.control.status()[E].wanted == 4
        assert site.scaler.sent("scale")[-1] == 4

    play(scenario)


def test_a_flood_of_sizes_while_the_store_is_slow_is_refused_and_holds_up_nobody() -> None:
    async def scenario(site: Site) -> None:
        service = site.boot()
        site.begin()
        await asyncio.sleep(30)
        site.stores["m:1"].latency_s = 1.0
        begun_s = now_s()
        outcomes: list[tuple[float, type[Exception] | None]] = []

        async def set_size() -> None:
            error = None
            try:
                await service.set_size(manual(E, 3, 600.0))
            except Overloaded as refused:
                error = type(refused)
            outcomes.append((now_s() - begun_s, error))

        async with asyncio.TaskGroup() as flood:
            for _ in range(50):
                flood.create_task(set_size())
        assert [error for after_s, error in outcomes if after_s < 0.1] == [Overloaded] * 42
        assert [error for after_s, error in outcomes if after_s >= 0.1] == [None] * 8
        await service.set_size(manual(E, 4, 600.0))
        assert now_s() - begun_s < 12
        site.stores["m:1"].latency_s = 0.001
        await asyncio.sleep(30)
        assert site.encoders == 4

    play(scenario, shared=True)


def test_a_manager_that_restarts_alone_goes_on_with_the_decisions_in_the_store() -> None:
    async def scenario(site: Site) -> None:
        service = site.boot()
        site.begin()
        await asyncio.sleep(30)
        await service.set_size(manual(E, 4, 600.0))
        await asyncio.sleep(30)
        before = service.control.records("m", Role.E)
        await site.kill()
        service = site.boot()
        await asyncio.sleep(30)
        after = service.control.records("m", Role.E)
        assert (Why.OVERRIDE, DecisionOutcome.DONE) in map(fact, after)
        assert [record.number for record in after[: len(before)]] == [record.number for record in before]
        assert all(later.age_s >= earlier.age_s + 20 for earlier, later in zip(before, after, strict=False))

    play(scenario, shared=True)


def test_one_of_two_managers_orders_and_when_it_dies_the_other_goes_on_with_sizes_and_reasons() -> None:
    async def scenario(site: Site) -> None:
        first, second = await site.boot_two()
        site.begin()
        await asyncio.sleep(30)
        assert [first.control.leading.leads, second.control.leading.leads] == [True, False]
        assert second.control.status()[E].fault == "another manager leads"
        with pytest.raises(Unavailable, match="another manager leads"):
            await second.set_size(manual(E, 3, 60.0))
        await first.set_size(manual(E, 4, 300.0))
        await asyncio.sleep(30)
        assert second.control.status()[E].wanted == 4
        token = site.scaler.token
        await site.kill("m:1")
        await asyncio.sleep(30)
        assert second.control.leading.leads
        assert site.scaler.token > token
        status = second.control.status()[E]
        assert (status.wanted, status.ready, status.fault) == (4, 4, "")
        assert status.override is not None
        assert 200 <= status.override.left_s <= 300 - 30
        reasons = [fact(record) for record in second.control.records("m", Role.E)]
        assert (Why.OVERRIDE, DecisionOutcome.DONE) in reasons
        numbers = [record.number for record in second.control.records("m", Role.E)]
        assert numbers == sorted(set(numbers))
        await second.set_size(manual(E, 2, 300.0))
        await asyncio.sleep(60)
        assert site.encoders == 2

    play(scenario, shared=True)


def test_what_a_former_leader_left_pending_ends_when_a_later_one_takes_over() -> None:
    async def scenario(site: Site) -> None:
        first, second = await site.boot_two()
        site.begin()
        await asyncio.sleep(30)
        site.scaler.hangs.add(E)
        await first.set_size(manual(E, 4, 3600.0))
        await asyncio.sleep(10)

        def outcomes(service: PoolManagerService) -> dict[int, tuple[DecisionOutcome, str]]:
            return {record.number: (record.outcome, record.detail) for record in service.control.records("m", Role.E)}

        number, (outcome, _) = outcomes(first).popitem()
        assert outcome is DecisionOutcome.PENDING
        site.stores["m:1"].cut = True
        await asyncio.sleep(60)
        assert second.control.leading.leads
        ended = (DecisionOutcome.REPLACED, "by a later leader")
        assert outcomes(second)[number] == ended
        site.stores["m:1"].cut = False
        await asyncio.sleep(30)
        assert outcomes(first)[number] == ended, "the former leader lives, and follows"
        assert site.store is not None
        kept = [entry.value for entry in await site.store.tail("decisions", 100)]
        assert sum(b"by a later leader" in value for value in kept) == 1

    play(scenario, shared=True)


def test_managers_that_do_not_lead_ask_the_scaler_seldom_and_at_once_when_they_begin_to_lead() -> None:
    async def scenario(site: Site) -> None:
        first, second = await site.boot_two()
        site.begin()
        await asyncio.sleep(30)
        asked = site.scaler.asked
        await asyncio.sleep(60)
        assert [first.control.leading.leads, second.control.leading.leads] == [True, False]
        assert site.scaler.asked - asked == pytest.approx(60 + 12, abs=4)
        await site.kill("m:1")
        asked = site.scaler.asked
        while not second.control.leading.leads:
            site.scaler.asked = asked
            await asyncio.sleep(0.01)
        assert site.scaler.asked > asked, "it knows what there is before it orders anything"

    play(scenario, shared=True)


def test_a_size_by_hand_that_was_accepted_outlives_the_leader_that_accepted_it() -> None:
    async def scenario(site: Site) -> None:
        first, second = await site.boot_two()
        site.begin()
        await asyncio.sleep(30)
        await first.set_size(manual(E, 4, 300.0))
        await site.kill("m:1")  # before it has ordered anything
        await asyncio.sleep(60)
        status = second.control.status()[E]
        assert (status.wanted, status.ready) == (4, 4)
        assert status.override is not None

    play(scenario, shared=True)


def test_a_leader_that_lost_the_store_stops_ordering_before_the_other_begins_and_serving_goes_on() -> None:
    async def scenario(site: Site) -> None:
        first, second = await site.boot_two()
        site.begin()
        await asyncio.sleep(30)
        site.stores["m:1"].cut = True
        both = 0
        for _ in range(300):
            both += first.control.leading.leads and second.control.leading.leads
            await asyncio.sleep(0.1)
        assert both == 0
        assert (first.control.leading.leads, second.control.leading.leads) == (False, True)
        assert "the store was cut off" in first.control.status()[E].fault
        assert len((await first.status()).pools) == 3
        site.stores["m:1"].cut = False
        await asyncio.sleep(20)
        assert first.control.status()[E].fault == "another manager leads"

    play(scenario, shared=True)


def test_without_the_store_scaling_stops_and_says_so_and_goes_on_by_itself() -> None:
    async def scenario(site: Site) -> None:
        service = site.boot()
        site.begin()
        metrics = Metrics()
        gauges.watch(metrics, service)
        await asyncio.sleep(30)
        site.stores["m:1"].cut = True
        site.router.missed = 5
        await asyncio.sleep(60)
        growths = [size for at_s, _, pool, size, _ in site.scaler.orders if pool == E and at_s > 30 + 10]
        assert growths == []
        assert service.control.status()[E].state is PoolState.FROZEN
        assert values(metrics, "triptych_pool_store_up") == {(): 0.0}
        assert values(metrics, "triptych_pool_manager_leads") == {(): 0.0}
        site.stores["m:1"].cut = False
        await asyncio.sleep(60)
        assert site.encoders >= 3
        assert values(metrics, "triptych_pool_manager_leads") == {(): 1.0}

    play(scenario, shared=True)


@pytest.mark.parametrize("away_s", [60, 61, 62, 63, 64])
def test_a_size_that_was_set_before_the_store_went_away_is_not_forgotten_when_it_is_back(away_s: int) -> None:
    async def scenario(site: Site) -> None:
        service = site.boot()
        site.begin()
        await asyncio.sleep(30)
        await service.set_size(manual(E, 4, 600.0))
        site.stores["m:1"].cut = True
        with pytest.raises(StoreUnavailable):  # its lease has not ended yet
            await service.set_size(manual(E, 3, 600.0))
        await asyncio.sleep(away_s)
        assert not service.control.leading.leads
        site.stores["m:1"].cut = False
        await asyncio.sleep(30)
        status = service.control.status()[E]
        assert (status.wanted, status.ready, status.fault) == (4, 4, "")
        assert status.override is not None

    play(scenario, shared=True)


class ForeignStore(MemoryStore):
    """Another program has written to its table of pools."""

    async def entries(self, table: str) -> tuple[Entry, ...]:
        if table == "pools":
            raise StoreCorrupt("a key has another type")
        return await super().entries(table)


def test_a_store_that_cannot_be_read_keeps_pools_frozen_and_is_named() -> None:
    async def scenario(site: Site) -> None:
        site.store = ForeignStore(clock=now_s)
        service = site.boot()
        site.begin()
        await asyncio.sleep(30)
        assert site.scaler.orders == []
        fault = service.control.status()[E].fault
        assert fault.startswith("this manager begins to lead")
        assert fault.endswith("another type")
        assert (await service.status()).store_fault == "a key has another type"

    play(scenario, shared=True)


def test_orders_of_a_leader_that_slept_past_its_lease_are_not_sent() -> None:
    """The leader's order hangs at the scaler while the lease ends: after that nothing is sent under the old token."""

    async def scenario(site: Site) -> None:
        first, second = await site.boot_two()
        site.begin()
        await asyncio.sleep(30)
        site.scaler.hangs.add(E)
        await first.set_size(manual(E, 5, 600.0))
        await asyncio.sleep(1)
        site.stores["m:1"].cut = True
        await asyncio.sleep(20)
        site.scaler.hangs.clear()
        await asyncio.sleep(60)
        assert second.control.leading.leads
        tokens = [token for _, _, _, _, token in site.scaler.orders]
        assert tokens == sorted(tokens)
        last = second.control.status()[E]
        assert site.encoders == last.wanted == 5

    play(scenario, shared=True)


FROM_HISTORY = PoolManagerSettings(
    scaler="127.0.0.1:1", autoscale=True, control=ControlLimits(max_instances=7, initial_from_history=True)
)


def seen(per_s: float, capacity_per_s: float | None) -> PoolView:
    load = PoolLoad(per_s, per_s, per_s, per_s, 0.0, 1.0)
    return PoolView("m/E", 1, Bounds(1, 7), load=load, facts=PoolFacts(capacity_per_s))


async def earlier_weeks(store: MemoryStore, peaks: Mapping[int, float]) -> None:
    """A manager that has led in earlier weeks, with peaks by the hour."""
    fence = await store.acquire("earlier", "manager", 3600)
    assert fence is not None
    hour = [0]
    histories = Histories(store, lambda: 1000.0 + now_s(), lambda: hour[0])
    for peak, per_s in peaks.items():
        hour[0] = peak
        histories.observe(seen(0.5 * per_s, 100.0))
        histories.observe(seen(per_s, None))
    await asyncio.sleep(61)
    await histories.write(fence)


def test_a_new_pool_starts_with_the_size_that_this_hour_needed_in_earlier_weeks() -> None:
    async def test(site: Site) -> None:
        assert site.store is not None
        weeks = {HOUR - week * HOURS_OF_WEEK: 100.0 * load for week, load in ((1, 4), (2, 5), (3, 7), (4, 1), (5, 1))}
        await earlier_weeks(site.store, weeks | {HOUR - 1: 9000.0})
        site.boot(settings=FROM_HISTORY)
        site.begin()
        await asyncio.sleep(30)
        assert site.scaler.sent("scale", E)[-1] == 5
        assert site.encoders == 5

    play(test, shared=True)


def test_a_new_pool_without_history_starts_with_its_largest_size() -> None:
    async def test(site: Site) -> None:
        site.boot(settings=FROM_HISTORY)
        site.begin()
        await asyncio.sleep(30)
        assert site.encoders == 7

    play(test)


def test_a_kept_size_comes_before_the_history() -> None:
    async def test(site: Site) -> None:
        site.boot(settings=PoolManagerSettings(scaler="127.0.0.1:1", autoscale=True))
        site.begin()
        await asyncio.sleep(60)
        await site.kill()
        site.boot(settings=FROM_HISTORY)
        await asyncio.sleep(60)
        assert site.encoders == 2

    play(test, shared=True)


def test_the_load_of_pools_is_kept_in_the_store_for_the_next_leader() -> None:
    async def test(site: Site) -> None:
        assert site.store is not None
        site.boot()
        site.begin()
        await asyncio.sleep(150)
        await site.kill()
        histories = Histories(site.store, now_s, lambda: HOUR + HOURS_OF_WEEK)
        await histories.read()
        histories.observe(PoolView("m/E", 1, Bounds(1, 7), facts=PoolFacts(1.0)))
        assert 100 <= histories.initial_size("m/E", Bounds(1, 1000)) < 130  # tokens per second

    play(test, shared=True)


def test_what_others_wrote_into_the_history_is_skipped() -> None:
    async def test(site: Site) -> None:
        assert site.store is not None
        await site.store.put("loads", "m/E", b"{}garbage")
        site.boot(settings=FROM_HISTORY)
        site.begin()
        await asyncio.sleep(30)
        assert site.encoders == 7

    play(test, shared=True)


def test_pools_of_tiers_are_found_shown_and_scaled_apart() -> None:
    cheap, dear = PoolName("m", Role.PD, "cheap"), PoolName("m", Role.PD, "dear")

    async def scenario(site: Site) -> None:
        settings = PoolManagerSettings(
            scaler="127.0.0.1:1", autoscale=True, control=ControlLimits(pool_sizes=("PD@dear=0-2", "PD@cheap=1-4"))
        )
        service = site.boot(settings=settings)
        site.scaler.sizes = {E: 0, cheap: 0, dear: 0}
        site.scaler.boot(E, 1)
        site.scaler.boot(cheap, 2)
        site.scaler.boot(dear, 1)
        site.scope.spawn(site.scaler.run(), name="scaler")
        site.router = Member(site.links, Registration(MemberKind.ROUTER, "r1", 1, "127.0.0.1:99", "m"), site.scope)
        await asyncio.sleep(20)
        pools = {pool.name: pool for pool in (await service.status()).pools}
        assert {name for name in pools if name is not None} == {E, cheap, dear}
        told = pools[dear].members[0].registration.tier
        assert told == Tier("dear", usd_per_hour=4.0)
        scaling = pools[dear].scaling
        assert scaling is not None
        assert (scaling.name, scaling.bounds, scaling.ready) == ("m/PD@dear", Bounds(0, 2), 1)
        await service.set_size(ManualSize("m", Role.PD, 0, 600.0, tier="dear"))
        await asyncio.sleep(60)
        assert site.scaler.sizes[dear] == 0
        assert site.scaler.sizes[cheap] == 2
        with pytest.raises(NotFound):
            await service.set_size(ManualSize("m", Role.PD, 1, 60.0))
        await asyncio.sleep(120)
        pools = {pool.name: pool for pool in (await service.status()).pools}
        assert pools[dear].members == (), "an empty tier is not forgotten"
        await service.set_size(ManualSize("m", Role.PD, 1, 600.0, tier="dear"))
        await asyncio.sleep(30)
        assert sum(pool == dear for pool, _, _ in site.scaler.running.values()) == 1

    play(scenario)
