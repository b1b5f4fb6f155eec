"""Advice on the size of pools: from routers' reports, over the real registrar and manager, under virtual time."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from prometheus_client.parser import text_string_to_metric_families

from services.pool_manager import gauges
from services.pool_manager.service import PoolManagerService
from services.pool_manager.settings import PoolManagerSettings
from triptych.domain.decision import DecisionOutcome, Override, PoolState, ScalingStatus, Why
from triptych.domain.instance import InstanceLoad
from triptych.domain.membership import MemberKind
from triptych.domain.pool import ManualSize, Registration
from triptych.domain.stage import Role
from triptych.domain.windows import ClassWindow, Judged, NamedClass, WindowReport
from triptych.errors import InvalidRequest, NotFound
from triptych.ports import PoolManager
from triptych.runtime.manager_access import ManagerAccess
from triptych.runtime.metrics import Metrics
from triptych.runtime.registrar import Registrar
from triptych.runtime.tasks import TaskScope
from triptych.testing import virtual_time
from triptych.testing.links import Link, LinkedPoolManager


class Member:
    """A process with a registrar; as a router it has a window for each second."""

    def __init__(self, link: Link[PoolManager], told: Registration, scope: TaskScope) -> None:
        self.told = told
        self.missed = 0
        self._made: list[WindowReport] = []
        self._begun_s = asyncio.get_running_loop().time()
        windows = self if told.kind is MemberKind.ROUTER else None
        access = ManagerAccess(("m:1",))
        registrar = Registrar(
            self, self.introduce, self.drain, lambda _: LinkedPoolManager(link), access, scope, windows
        )
        registrar.start()

    async def introduce(self) -> Registration:
        return self.told

    async def drain(self) -> None: ...

    def load(self) -> InstanceLoad:
        return InstanceLoad({})

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
        return [one for one in self._made if one.sequence > after]


@asynccontextmanager
async def cluster() -> AsyncIterator[tuple[PoolManagerService, Member, Metrics]]:
    """Two encoders, a text instance and a router of one model; an encoder of another."""
    async with TaskScope("manager") as scope, TaskScope("members") as members:
        clock = asyncio.get_running_loop().time
        service = PoolManagerService(PoolManagerSettings(max_instances=3), incarnation=1, clock=clock, scope=scope)
        service.start()
        link: Link[PoolManager] = Link("m:1", service)
        told = [("e1", Role.E, "m"), ("e2", Role.E, "m"), ("t1", Role.PD, "m"), ("x1", Role.E, "other")]
        for number, (name, role, model) in enumerate(told):
            Member(
                link, Registration(MemberKind.INSTANCE, name, 1, f"127.0.0.1:{number + 1}", model, role=role), members
            )
        router = Member(link, Registration(MemberKind.ROUTER, "r1", 1, "127.0.0.1:99", "m"), members)
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
            assert values(metrics, "triptych_pool_advised_instances")["m", "E"] == 3
            assert values(metrics, "triptych_pool_advised_instances")["m", "PD"] == 1
            assert values(metrics, "triptych_pool_state")["m", "E", "breach"] == 1
            assert values(metrics, "triptych_pool_state")["m", "PD", "breach"] == 0
            record = service.advice.records("m", Role.E)[-1]
            assert (record.outcome, record.decision.why) == (DecisionOutcome.ADVISED, Why.BREACH)
            assert record.decision.missing == ("profile of the encoder",)

    with caplog.at_level(logging.INFO, logger="services.pool_manager.advice"):
        virtual_time.run(test())
    assert any("pool m/E: 2 instances, advised 3: breach" in one.getMessage() for one in caplog.records)


def test_a_model_without_a_router_has_no_report_and_says_so() -> None:
    async def test() -> None:
        async with cluster() as (service, _, _):
            await asyncio.sleep(20)
            assert service.advice.records("other", Role.E)[-1].decision.why is Why.NO_REPORT
            assert service.advice.records("m", Role.E)[-1].decision.why is Why.STEADY
            assert service.advice.records("nobody", Role.E) == ()

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
            assert (image.name, image.state, image.advisory, image.ready) == ("m/E", PoolState.BREACH, True, 2)
            assert image.attainment.missed > 0
            last = image.decisions[-1]
            assert (last.target, last.outcome, last.reasons[0].why) == (3, DecisionOutcome.ADVISED, Why.BREACH)

    virtual_time.run(test())


def test_a_size_by_hand_ends_after_its_time_or_by_hand_and_is_checked() -> None:
    async def test() -> None:
        async with cluster() as (service, _, _):

            async def image() -> ScalingStatus:
                (found,) = [one.scaling for one in (await service.status()).pools if (one.model, one.role) == encoders]
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
        async with TaskScope("manager") as scope, TaskScope("members") as members:
            clock = asyncio.get_running_loop().time
            service = PoolManagerService(PoolManagerSettings(), incarnation=1, clock=clock, scope=scope)
            service.start()
            link: Link[PoolManager] = Link("m:1", service)
            told = Registration(MemberKind.ROUTER, "r1", 1, "127.0.0.1:99", "m")
            liar = Member(link, told, members)
            liar.told = Registration(MemberKind.INSTANCE, "e1", 1, "127.0.0.1:1", "m", role=Role.E)
            await asyncio.sleep(30)
            assert service.advice.records("m", Role.E)[-1].decision.why is Why.NO_REPORT

    virtual_time.run(test())
