"""Pools on the command line, against a pool manager with a scripted state."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import trustme
from rich.console import Console

from tests.command_line import invoke
from triptych.cli import pools, status
from triptych.cli.managers import Managers
from triptych.cli.outcome import CliError
from triptych.domain.decision import (
    Acting,
    Bounds,
    DecisionOutcome,
    DecisionSummary,
    Override,
    PoolState,
    Reason,
    ScalingStatus,
    Why,
)
from triptych.domain.instance import InstanceLimits, InstanceLoad, LimitsReport, StageLoad
from triptych.domain.membership import MemberKind
from triptych.domain.pool import (
    ManagerStatus,
    ManualSize,
    MemberCondition,
    MemberReport,
    MembershipDelta,
    MemberStatus,
    Order,
    PoolStatus,
    Registration,
    Watch,
)
from triptych.domain.replanning import Drift, PlanDecision, PlanOutcome, PlanStatus, RoleCount
from triptych.domain.scaling import PoolName
from triptych.domain.stage import Role, Stage
from triptych.domain.tier import Tier
from triptych.domain.windows import Judged
from triptych.errors import FailedPrecondition, InvalidRequest, NotFound, Unavailable
from triptych.policy.consequences import loss
from triptych.rpc.server import RpcServer
from triptych.runtime.tls import TlsIdentity
from triptych.services.pool_manager.servicer import SERVICE_NAME, PoolManagerServicer

NOWHERE = "127.0.0.1:1"
GATEWAY = f"http://{NOWHERE}"


def member(name: str, role: Role | None, *, suspected: bool = False) -> MemberStatus:
    kind = MemberKind.ROUTER if role is None else MemberKind.INSTANCE
    load = InstanceLoad({Stage.ENCODE: StageLoad(12_345, 3)} if role else {})
    slo = () if role else ("ttft=5x", "tbt=5x")
    told = Registration(kind, name, 1, "127.0.0.1:40001", "m", role=role, slo=slo)
    return MemberStatus(told, MemberCondition.ACTIVE, suspected, load, 63.0, 0.2)


def decision(number: int, age_s: float, wanted: int, target: int, why: Why) -> DecisionSummary:
    reasons = (Reason(why, f"reason {number}: " + "so that it is longer than one line of a terminal " * 2),)
    what = DecisionOutcome.DONE
    judged = Judged(9, 1)
    return DecisionSummary(
        number, age_s, wanted, target, reasons, "", "", ("a fact",), 2, 0, 0, None, None, 3, judged, 1.0, what, ""
    )


ENCODERS = ScalingStatus(
    "m/E",
    PoolState.GROWING,
    acting=Acting.NONE,
    wanted=3,
    ready=2,
    starting=1,
    draining=0,
    bounds=Bounds(1, 64),
    attainment=Judged(90, 10),
    override=Override(3, 1700.0),
    fault="the scaler failed: forbidden",
    decisions=(decision(1, 700.0, 2, 2, Why.STEADY), decision(2, 12.0, 2, 3, Why.LOAD)),
    attainment_window_s=120.0,
)
STATUS = ManagerStatus(
    1,
    2,
    7300.0,
    3,
    (
        PoolStatus("m", Role.E, (member("encoder-1", Role.E), member("encoder-2", Role.E, suspected=True)), ENCODERS),
        PoolStatus("m", Role.PD, (member("text-1", Role.PD),), replace(ENCODERS, name="m/PD", decisions=())),
        PoolStatus("m", None, (member("router", None),)),
    ),
)


class Scripted:
    """``ports.PoolManager`` with a given status."""

    def __init__(self, told: ManagerStatus) -> None:
        self.told = told
        self.orders: list[ManualSize | str] = []
        self.away = False

    def attend(self, reports: AsyncGenerator[MemberReport]) -> AsyncGenerator[Order]:
        raise AssertionError(reports)

    def watch(self, watch: Watch) -> AsyncGenerator[MembershipDelta]:
        raise AssertionError(watch)

    async def status(self) -> ManagerStatus:
        if self.away:
            raise Unavailable("the pool manager is shutting down")
        return self.told

    async def drain_instance(self, instance_id: str, *, force: bool) -> None:
        names = {member.registration.instance_id for pool in self.told.pools for member in pool.members}
        if instance_id not in names:
            raise NotFound("no member has this instance id", param="instance_id")
        if not force and (lost := loss(instance_id, self.told.pools)):
            raise FailedPrecondition(lost)
        self.orders.append(instance_id)

    async def switch_instance(self, instance_id: str, role: Role, *, force: bool) -> None:
        if instance_id not in {member.registration.instance_id for pool in self.told.pools for member in pool.members}:
            raise NotFound("no member has this instance id", param="instance_id")
        if not force and (lost := loss(instance_id, self.told.pools, keeps=role.stages)):
            raise FailedPrecondition(lost)
        self.orders.append(f"{instance_id} {role.value}")

    async def set_limits(self, instance_id: str, wanted: InstanceLimits) -> None:
        """Have them at once; more than 100 are refused by the instance."""
        self.orders.append(f"{instance_id} {wanted}")

        def answered(before: MemberStatus) -> MemberStatus:
            if before.registration.instance_id != instance_id:
                return before
            report = before.load.limits or LimitsReport(InstanceLimits(max_sequences=32))
            fault = "too many" if (wanted.max_sequences or 0) > 100 else ""
            used = report.limits if fault else wanted.over(report.limits)
            limits = LimitsReport(used, report.version + 1, by_hand=bool(wanted.given), fault=fault)
            return replace(before, load=replace(before.load, limits=limits))

        pools_now = tuple(replace(pool, members=tuple(map(answered, pool.members))) for pool in self.told.pools)
        self.told = replace(self.told, pools=pools_now)

    async def roll(self, pool: PoolName, degree: int) -> None:
        if degree == 1:
            raise InvalidRequest("all have degree 1")
        self.orders.append(f"{pool} {degree}")

    async def set_size(self, order: ManualSize) -> None:
        if not self.told.leads:
            raise Unavailable("another manager leads")
        if order.size is not None and order.size > ENCODERS.bounds.most:
            raise InvalidRequest(f"size is {order.size}, must be from 1 to 64", param="size")
        self.orders.append(order)


@asynccontextmanager
async def serving(told: ManagerStatus, tls: TlsIdentity | None = None) -> AsyncIterator[tuple[Scripted, str]]:
    manager = Scripted(told)
    register = PoolManagerServicer(manager).register
    async with RpcServer(host="127.0.0.1", port=0, service_names=[SERVICE_NAME], register=register, tls=tls) as server:
        yield manager, f"127.0.0.1:{server.port}"


def console(width: int = 80) -> tuple[Console, StringIO]:
    out = StringIO()
    return Console(file=out, width=width, markup=False, highlight=False), out


async def test_status_shows_sizes_attainment_and_decisions_within_80_columns() -> None:
    async with serving(STATUS) as (_, address):
        shown, out = console()
        assert not await status.status(Managers(GATEWAY, address), None, (), shown, as_json=False)
    lines = out.getvalue().splitlines()
    assert max(map(len, lines[3:])) <= 80
    text = " ".join(out.getvalue().split())
    for said in (
        f"nothing answers at {GATEWAY}",
        f"manager {address} up 2 h, leads, 3 watch",
        "pool m/E",
        "growing: 3 wanted (1 to 64), 2 ready, 1 starting, advice only",
        "TTFT within SLO, over 2 min: 90.0% of 100",
        "set by hand to 3 for another 28 min",
        "the scaler failed: forbidden",
        "encoder-1 127.0.0.1:40001 active, 63 s encode 3",
        "suspected",
        "12 min stays 2 steady: reason 1",
        "12 s 2 to 3 done load: reason 2",
        "not known: a fact",
        "routers of m SLO ttft=5x,tbt=5x",
    ):
        assert said in text, said


@pytest.mark.parametrize(
    ("role", "said"),
    [(Role.E, "TTFT"), (Role.P, "TTFT"), (Role.EPD, "TTFT"), (Role.D, "TBT"), (Role.ED, "TTFT and TBT")],
)
def test_a_pool_is_shown_with_the_objectives_it_is_judged_by(role: Role, said: str) -> None:
    shown, out = console()
    told = replace(STATUS, pools=(PoolStatus("m", role, (member("x", role),), ENCODERS),))
    pools.print_manager("h:1", told, shown)
    assert f"  {said} within SLO, over 2 min: 90.0% of 100" in out.getvalue().splitlines()


async def test_status_as_json_has_everything() -> None:
    told = replace(STATUS, leads=False, leader="m2", store_fault="Redis does not answer")
    async with serving(told) as (_, address):
        shown, out = console()
        await status.status(Managers(GATEWAY, address), None, (), shown, as_json=True)
    document = json.loads(out.getvalue())
    assert document["manager"] == {
        "address": address,
        "up_s": 7300.0,
        "watchers": 3,
        "leads": False,
        "leader": "m2",
        "store_fault": "Redis does not answer",
        "plan": None,
    }
    encoders = document["pools"][0]
    assert (encoders["model"], encoders["role"], document["pools"][2]["role"]) == ("m", "E", None)
    assert encoders["members"][0]["pending_tokens"] == {"encode": 12_345}
    scaling = encoders["scaling"]
    assert (scaling["state"], scaling["wanted"], scaling["override"]) == ("growing", 3, {"size": 3, "left_s": 1700.0})
    assert scaling["attainment"] == {"met": 90, "missed": 10, "share": 0.9}
    last = scaling["decisions"][-1]
    assert (last["wanted"], last["target"], last["outcome"]) == (2, 3, "done")
    assert last["reasons"][0]["why"] == "load"


PLAN = PlanStatus(
    "m",
    True,
    (RoleCount(Role.E, 2), RoleCount(Role.PD, 1)),
    (Drift("items per request", 1.25, 0.2), Drift("tokens per answer", 0.01, 0.2)),
    "moving for 12 s",
    (
        PlanDecision(
            1, 700.0, (RoleCount(Role.EPD, 2),), (RoleCount(Role.EPD, 2),), 0.0, "no memory", PlanOutcome.FAILED
        ),
        PlanDecision(
            2,
            12.0,
            (RoleCount(Role.EPD, 2),),
            (RoleCount(Role.E, 3), RoleCount(Role.PD, 1)),
            0.4,
            "95% within",
            PlanOutcome.MOVING,
        ),
    ),
)


async def test_status_shows_the_plan_that_is_followed() -> None:
    async with serving(replace(STATUS, plan=PLAN)) as (_, address):
        shown, out = console(width=100)
        await status.status(Managers(GATEWAY, address), None, (), shown, as_json=False)
        as_json, document = console()
        await status.status(Managers(GATEWAY, address), None, (), as_json, as_json=True)
    text = " ".join(out.getvalue().split())
    for said in (
        "plan m: E:2,PD:1, moving for 12 s; moves to better ones",
        "mix stability indices: items per request 1.25 (drifted), tokens per answer 0.01",
        "12 min stays EPD:2 failed no memory",
        "12 s EPD:2 to E:3,PD:1 moving 95% within",
    ):
        assert said in text, said
    plan = json.loads(document.getvalue())["manager"]["plan"]
    assert (plan["present"], plan["state"], plan["replans"]) == ("E:2,PD:1", "moving for 12 s", True)
    assert plan["drifts"][0] == {"figure": "items per request", "index": 1.25, "bound": 0.2, "is_one": True}
    assert plan["decisions"][1]["wanted"] == "E:3,PD:1"
    assert plan["decisions"][1]["outcome"] == "moving"


async def test_status_without_gateway_and_manager_is_an_error() -> None:
    shown, _ = console()
    for named in (None, NOWHERE):
        with pytest.raises(CliError, match="nothing answers"):
            await status.status(Managers(GATEWAY, named), None, (), shown, as_json=False)


async def test_the_status_is_that_of_the_manager_that_leads() -> None:
    async with serving(replace(STATUS, leads=False)) as (_, follower), serving(STATUS) as (_, leader):
        found = await Managers(GATEWAY, f"{NOWHERE},{follower}, {leader}").status({})
        assert found is not None
        assert found[0] == leader


@pytest.mark.parametrize("name", ["m/E", "E", "e", "encoder", "m/encoder"])
async def test_a_size_is_set_for_a_time_and_ended(name: str) -> None:
    async with serving(replace(STATUS, leads=False)) as (_, follower), serving(STATUS) as (manager, leader):
        managers = Managers(GATEWAY, f"{NOWHERE},{follower},{leader}")
        shown, out = console(200)
        await pools.scale(name, 3, 1800.0, managers, shown)
        await pools.scale(name, None, 1800.0, managers, shown)
        assert manager.orders == [ManualSize("m", Role.E, 3, 1800.0), ManualSize("m", Role.E, None, 0.0)]
    assert "pool m/E is to have 3 instances for 30 min; the pool manager has no scaler" in out.getvalue()
    assert "the size of pool m/E is no longer set by hand" in out.getvalue()


async def test_mistakes_name_what_exists() -> None:
    async with serving(STATUS) as (manager, address):
        managers = Managers(GATEWAY, address)
        shown, _ = console()
        with pytest.raises(CliError, match=r"no pool 'm/EPD'; there are: m/E, m/PD$") as caught:
            await pools.scale("m/EPD", 1, 1.0, managers, shown)
        assert caught.value.caller
        with pytest.raises(CliError, match="pool m/E: size is 65, must be from 1 to 64"):
            await pools.scale("E", 65, 1.0, managers, shown)
        with pytest.raises(CliError, match=r"no member 'encoder-9'; there are: encoder-1, encoder-2, router, text-1$"):
            await pools.drain("encoder-9", managers, shown)
        await pools.drain("encoder-2", managers, shown)
        assert manager.orders == ["encoder-2"]
    with pytest.raises(CliError, match=f"no pool manager can be reached at {NOWHERE}$"):
        await pools.drain("encoder-2", Managers(GATEWAY, NOWHERE), shown)
    with pytest.raises(CliError, match="no triptych up of this user runs at"):
        await pools.drain("encoder-2", Managers(GATEWAY), shown)
    with pytest.raises(CliError, match="--pool-manager 'here'"):
        await pools.drain("encoder-2", Managers(GATEWAY, "here"), shown)


@pytest.mark.parametrize(
    ("instance", "said"),
    [
        ("router", "router is the last router of m: requests for it fail until there is another"),
        ("text-1", "text-1 is the last text instance of m: all requests for m wait or fail until there is another"),
        ("encoder-1", "encoder-1 is the last encoder of m: requests for m with images, video or audio wait or fail"),
    ],
)
async def test_the_last_of_its_kind_is_drained_by_force_only(instance: str, said: str) -> None:
    async with serving(STATUS) as (manager, address):
        managers = Managers(GATEWAY, address)
        shown, _ = console()
        with pytest.raises(CliError, match=f"{said}.*; --force drains it nevertheless$") as caught:
            await pools.drain(instance, managers, shown)
        assert caught.value.caller
        assert manager.orders == []
        await pools.drain(instance, managers, shown, force=True)
        assert manager.orders == [instance]


async def test_the_last_with_a_stage_is_switched_by_force_only() -> None:
    async with serving(STATUS) as (manager, address):
        managers = Managers(GATEWAY, address)
        shown, out = console(200)
        with pytest.raises(
            CliError, match=r"text-1 is the last prefill instance of m.*; --force switches it nevertheless$"
        ):
            await pools.switch("text-1", Role.D, managers, shown)
        with pytest.raises(CliError, match=r"knows no member .*; there are: "):
            await pools.switch("text-9", Role.D, managers, shown)
        assert manager.orders == []
        await pools.switch("text-1", Role.D, managers, shown, force=True)
        await pools.switch("text-1", Role.PD, managers, shown, wait_s=5.0)
        assert manager.orders == ["text-1 D", "text-1 PD"]
        with pytest.raises(CliError, match="text-1 has not switched within"):
            await pools.switch("text-1", Role.D, managers, shown, force=True, wait_s=0.05)
    assert out.getvalue().splitlines() == [
        "text-1 is to serve role D, until another order or its end",
        "text-1 is to serve role PD, until another order or its end",
        "text-1 serves role PD",
        "text-1 is to serve role D, until another order or its end",
    ]


def test_what_is_not_served_as_at_the_start_or_as_ordered_is_shown() -> None:
    before = member("text-1", Role.PD)
    told = replace(
        before,
        registration=replace(before.registration, switchable=Role.EPD),
        load=InstanceLoad({Stage.DECODE: StageLoad(0, 0)}),
        wanted=Role.P,
        wanted_s=2.0,
        open_s=65.0,
    )
    shown, out = console(200)
    pools.print_manager("h:1", replace(STATUS, pools=(PoolStatus("m", Role.PD, (told,)),)), shown)
    text = out.getvalue()
    assert "serves D for 65" in text
    assert "ordered to serve P 2 s ago" in text


async def test_another_role_that_serves_the_stages_lets_the_last_of_a_pool_drain() -> None:
    hybrid = PoolStatus("m", Role.EPD, (member("hybrid-1", Role.EPD),))
    leaving = replace(STATUS, pools=(replace(STATUS.pools[0], model="other"), *STATUS.pools[1:]))
    async with serving(replace(leaving, pools=(*leaving.pools, hybrid))) as (manager, address):
        await pools.drain("text-1", Managers(GATEWAY, address), console()[0])
        with pytest.raises(CliError, match="hybrid-1 is the last encoder of m"):
            await pools.drain("hybrid-1", Managers(GATEWAY, address), console()[0])
    assert manager.orders == ["text-1"]


@pytest.mark.parametrize(
    ("acting", "by_hand", "said"),
    [
        (Acting.ALL, False, "the pool manager stops it, and starts another if the size of the pool wants it"),
        (Acting.MANUAL, True, "the pool manager stops it, and starts another if the size of the pool wants it"),
        (Acting.MANUAL, False, "end its process; one that is started in its place gets work again"),
        (Acting.NONE, True, "end its process; one that is started in its place gets work again"),
    ],
)
async def test_draining_says_how_the_instance_is_replaced(acting: Acting, said: str, *, by_hand: bool) -> None:
    scaling = replace(ENCODERS, acting=acting, override=Override(2, 60.0) if by_hand else None)
    pool = replace(STATUS.pools[0], members=(member("e1", Role.E), member("e2", Role.E)), scaling=scaling)
    async with serving(replace(STATUS, pools=(pool,))) as (_, address):
        shown, out = console(200)
        await pools.drain("e2", Managers(GATEWAY, address), shown)
    assert "e2 gets no new work and finishes what it has; that cannot be taken back" in out.getvalue()
    assert said in out.getvalue()


async def test_a_manager_without_members_and_one_that_is_away_are_said() -> None:
    shown, out = console(200)
    pools.print_manager("", None, shown)
    assert "the pool manager does not answer; triptych up starts it again" in out.getvalue()
    pools.print_manager(NOWHERE, replace(STATUS, pools=()), shown)
    assert "none yet: no instance has registered" in out.getvalue()


async def test_a_drain_can_be_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "_POLL_S", 0.01)

    def told(condition: MemberCondition | None) -> ManagerStatus:
        """``encoder-1`` in this condition; None once it has left."""
        first, second = STATUS.pools[0].members
        second = replace(second, suspected=False)
        members = (second,) if condition is None else (replace(first, condition=condition), second)
        return replace(STATUS, pools=(replace(STATUS.pools[0], members=members), *STATUS.pools[1:]))

    async with serving(told(MemberCondition.LEAVING)) as (manager, address):
        managers = Managers(GATEWAY, address)
        shown, out = console(200)
        with pytest.raises(CliError, match="encoder-1 has not finished within") as caught:
            await pools.drain("encoder-1", managers, shown, wait_s=0.2)
        assert not caught.value.caller
        assert "has finished" not in out.getvalue()
        for end in (MemberCondition.DRAINED, None):
            manager.told = told(MemberCondition.LEAVING)
            async with asyncio.TaskGroup() as group:
                waiting = group.create_task(pools.drain("encoder-1", managers, shown, wait_s=30.0))
                await asyncio.sleep(0.1)
                assert not waiting.done()
                manager.told = told(end)
        assert out.getvalue().count("encoder-1 has finished") == 2


async def test_a_manager_that_restarts_does_not_end_the_wait_for_a_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    """The manager knows no member at first, and before that it is away."""
    monkeypatch.setattr(pools, "_POLL_S", 0.01)
    (first, second), shown = STATUS.pools[0].members, console(200)
    leaving = (replace(first, condition=MemberCondition.LEAVING), replace(second, suspected=False))
    told = replace(STATUS, pools=(replace(STATUS.pools[0], members=leaving), *STATUS.pools[1:]))
    async with serving(told) as (manager, address), asyncio.TaskGroup() as group:
        waiting = group.create_task(pools.drain("encoder-1", Managers(GATEWAY, address), shown[0], wait_s=30.0))
        await asyncio.sleep(0.1)
        manager.away = True
        await asyncio.sleep(0.1)
        manager.told, manager.away = replace(told, pools=(), up_s=0.5), False
        await asyncio.sleep(0.1)
        assert not waiting.done()
        manager.told = replace(told, pools=(), up_s=10.5)
    assert "encoder-1 has finished" in shown[1].getvalue()


def test_a_role_of_several_pools_is_ambiguous_without_the_model() -> None:
    there = [PoolName("a", Role.E), PoolName("owner/b", Role.E), PoolName("a", Role.PD)]
    assert pools.named("owner/b/E", there) == there[1]
    assert pools.named("text", there) == there[2]
    with pytest.raises(CliError, match="several pools have the role 'encoder'; name one of: a/E, owner/b/E"):
        pools.named("encoder", there)
    for unknown in ("", "x", "hybrid", "c/E"):
        with pytest.raises(CliError, match="there are: a/E, a/PD, owner/b/E"):
            pools.named(unknown, there)


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("30m", 1800), ("1.5h", 5400), ("30d", 30 * 86_400)])
def test_a_time_has_a_unit(text: str, seconds: float) -> None:
    assert pools.duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "30", "0s", "31d", "-1m", "m", "1w", "1e3s"])
def test_a_time_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(CliError, match="not a time such as"):
        pools.duration_s(text)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("scale", "E"), "how many instances is E to have?"),
        (("scale", "E", "2", "--auto"), "leave out the size"),
        (("scale", "E", "2", "--for", "soon"), "not a time"),
        (("scale", "E", "2", "--tls-cert", "a.pem"), "go together"),
        (("drain", "x", "--tls-cert", "a", "--tls-key", "b", "--tls-ca", "c"), "the TLS file a does not exist"),
        (("status", "--tls-ca", "a.pem"), "go together"),
    ],
)
def test_usage_errors_are_one_line_with_status_2(arguments: tuple[str, ...], said: str) -> None:
    result = invoke([*arguments, "--url", GATEWAY, "--pool-manager", NOWHERE])
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert said in result.stderr


def test_a_negative_size_is_no_option() -> None:
    result = invoke(["scale", "E", "-1", "--pool-manager", NOWHERE])
    assert result.exit_code == 2
    assert "-1 is less than no instance" in result.stderr
    assert "No such option" in invoke(["scale", "E", "1", "--nope"]).stderr


async def test_a_manager_under_mutual_tls_answers_a_trusted_certificate_only(tmp_path: Path) -> None:
    authority = trustme.CA()
    own = authority.issue_cert("127.0.0.1")
    files = [tmp_path / name for name in ("own.pem", "own.key", "ca.pem")]
    files[0].write_bytes(b"".join(blob.bytes() for blob in own.cert_chain_pems))
    own.private_key_pem.write_to_path(files[1])
    authority.cert_pem.write_to_path(files[2])
    identity = await asyncio.to_thread(TlsIdentity.load, *files)
    shown, _ = console()
    async with serving(STATUS, identity) as (manager, address):
        await pools.drain("encoder-2", Managers(GATEWAY, address, identity), shown)
        assert manager.orders == ["encoder-2"]
        with pytest.raises(CliError, match="can be reached"):
            await pools.drain("encoder-2", Managers(GATEWAY, address), shown)


async def test_limits_are_set_on_an_instance_or_on_all_of_a_pool_and_waited_for() -> None:
    async with serving(STATUS) as (manager, address):
        managers = Managers(GATEWAY, address)
        shown, out = console(200)
        await pools.limit("text-1", InstanceLimits(max_sequences=64), managers, shown, wait_s=5.0)
        await pools.limit("encoder", InstanceLimits(max_batch_items=4), managers, shown, wait_s=5.0)
        await pools.limit("text-1", InstanceLimits(), managers, shown, wait_s=5.0)
        with pytest.raises(CliError, match="text-1 refuses: too many"):
            await pools.limit("text-1", InstanceLimits(max_sequences=101), managers, shown, wait_s=5.0)
        with pytest.raises(CliError, match="there is no pool 'text-9'; there are: m/E, m/PD"):
            await pools.limit("text-9", InstanceLimits(max_sequences=1), managers, shown, wait_s=5.0)
    assert out.getvalue().splitlines() == [
        "text-1: max_sequences 64, until their end, or --auto",
        "encoder-1, encoder-2: max_batch_items 4, until their end, or --auto",
        "text-1: as at the start, and what profiles say from now on",
    ]
    assert manager.orders[:3] == [
        "text-1 max_sequences 64",
        "encoder-1 max_batch_items 4",
        "encoder-2 max_batch_items 4",
    ]


def test_limits_that_were_ordered_are_shown_with_why_others_were_refused() -> None:
    before = member("text-1", Role.PD)
    limits = LimitsReport(InstanceLimits(max_sequences=64), 2, by_hand=True, fault="too many")
    told = replace(before, load=replace(before.load, limits=limits))
    shown, out = console(200)
    pool = PoolStatus("m", Role.PD, (told,), None)
    pools.print_manager("a:1", replace(STATUS, pools=(pool,)), shown)
    for part in ("max_sequences 64", "by hand", "refuses"):
        assert part in out.getvalue()


def test_a_pool_is_named_with_its_tier_where_there_are_several() -> None:
    tiers = [PoolName("m", Role.PD, "l4"), PoolName("m", Role.PD, "h100")]
    assert pools.named("PD@l4", tiers) == tiers[0]
    assert pools.named("m/text@h100", tiers) == tiers[1]
    with pytest.raises(CliError, match="several pools have the role 'PD'; name one of: m/PD@h100, m/PD@l4"):
        pools.named("PD", tiers)
    with pytest.raises(CliError, match="there is no pool 'PD@t4'"):
        pools.named("PD@t4", tiers)


def test_the_device_the_price_and_the_speed_of_a_tier_are_shown() -> None:
    before = member("text-l4-1", Role.PD)
    told = replace(before, registration=replace(before.registration, tier=Tier("l4", "NVIDIA L4", 0.8, 0.5)))
    shown, out = console(200)
    pool = PoolStatus("m", Role.PD, (told,), None, "l4")
    pools.print_manager("a:1", replace(STATUS, pools=(pool,)), shown)
    assert "pool m/PD@l4  (NVIDIA L4, 0.8 USD per hour each, speed 0.5)" in out.getvalue()


async def test_a_pool_is_rolled_by_its_name_and_refusals_are_shown() -> None:
    async with serving(STATUS) as (manager, address):
        managers = Managers(GATEWAY, address)
        shown, out = console(200)
        await pools.roll("encoder", 2, managers, shown)
        with pytest.raises(CliError, match="all have degree 1"):
            await pools.roll("m/PD", 1, managers, shown)
    assert manager.orders == ["m/E 2"]
    assert out.getvalue().splitlines() == [
        "pool m/E rolls to tensor-parallel degree 2: one instance more starts, then one after the other is replaced"
    ]
