"""Members that cannot drain without a loss."""

from dataclasses import replace

import pytest

from triptych.domain.instance import InstanceLoad, StageLoad
from triptych.domain.membership import MemberKind
from triptych.domain.pool import MemberCondition, MemberStatus, PoolStatus, Registration
from triptych.domain.stage import Role, Stage
from triptych.policy.consequences import loss, without


def pool(
    role: Role | None,
    *names: str,
    model: str = "m",
    condition: MemberCondition = MemberCondition.ACTIVE,
    suspected: bool = False,
) -> PoolStatus:
    kind = MemberKind.ROUTER if role is None else MemberKind.INSTANCE
    members = [
        MemberStatus(Registration(kind, name, 1, "h:1", model, role=role), condition, suspected, InstanceLoad({}), 0, 0)
        for name in names
    ]
    return PoolStatus(model, role, tuple(members))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("e1", "e1 is the last encoder of m: requests for m with images, video or audio wait or fail"),
        ("t1", "t1 is the last text instance of m: all requests for m wait or fail"),
        ("r1", "r1 is the last router of m: requests for it fail"),
    ],
)
@pytest.mark.parametrize(
    "others",
    [
        (),
        (pool(Role.EPD, "h2", model="other"), pool(None, "r2", model="other")),
        (pool(Role.EPD, "h2", condition=MemberCondition.LEAVING), pool(None, "r2", condition=MemberCondition.DRAINED)),
        (pool(Role.EPD, "h2", suspected=True), pool(None, "r2", suspected=True)),
    ],
)
def test_the_last_that_works_of_its_model_is_named(name: str, said: str, others: tuple[PoolStatus, ...]) -> None:
    pools = (pool(Role.E, "e1"), pool(Role.PD, "t1"), pool(None, "r1"), *others)
    assert loss(name, pools) == f"{said} until there is another"


def test_one_whose_stages_another_serves_is_no_loss() -> None:
    pools = (pool(Role.E, "e1"), pool(Role.PD, "t1"), pool(None, "r1", "r2"), pool(Role.EPD, "h1"))
    assert [loss(name, pools) for name in ("e1", "t1", "r1", "h1")] == ["", "", "", ""]


def test_one_that_drains_already_or_is_not_known_is_no_loss() -> None:
    pools = (pool(Role.E, "e1", condition=MemberCondition.LEAVING),)
    assert [loss(name, pools) for name in ("e1", "e2")] == ["", ""]


def test_decoding_is_named_before_encoding() -> None:
    assert without({Stage.ENCODE, Stage.DECODE}) == ("decode instance", "all requests wait or fail")
    assert without(frozenset()) is None


def test_one_of_a_stage_of_its_own_is_missed_by_its_stage() -> None:
    pools = (pool(Role.EP, "x1"), pool(Role.P, "p1"), pool(Role.D, "d1"), pool(Role.E, "e1"))
    assert [loss(name, pools) for name in ("x1", "p1", "e1")] == ["", "", ""]
    assert (
        loss("d1", pools)
        == "d1 is the last decode instance of m: all requests for m wait or fail until there is another"
    )
    assert loss("d1", (*pools, pool(Role.PD, "t1"))) == ""
    alone = (pool(Role.ED, "x1"), pool(Role.P, "p1"))
    assert loss("p1", alone).startswith("p1 is the last prefill instance of m: all requests")
    assert loss("x1", alone).startswith("x1 is the last decode instance of m: all requests")


def switching(name: str, role: Role, *stages: Stage, wanted: Role | None = None) -> PoolStatus:
    """An instance that registered with ``role``, and serves these stages."""
    (member,) = pool(role, name).members
    load = InstanceLoad({stage: StageLoad(0, 0) for stage in stages})
    told = replace(member.registration, switchable=Role.EPD)
    return PoolStatus("m", role, (replace(member, registration=told, load=load, wanted=wanted),))


def test_a_switch_loses_what_nothing_else_serves() -> None:
    pools = (pool(Role.E, "e1"), pool(Role.PD, "t1"), switching("s1", Role.PD, Stage.DECODE))
    assert [loss("s1", pools, keeps=role.stages) for role in (Role.E, Role.P)] == ["", ""]
    alone = (pool(Role.E, "e1"), pool(Role.P, "t1"), switching("s1", Role.PD, Stage.DECODE))
    assert loss("s1", alone, keeps=Role.PD.stages) == ""
    assert loss("s1", alone, keeps=Role.P.stages).startswith("s1 is the last decode instance of m: all requests for m")
    assert loss("t1", alone).startswith("t1 is the last prefill instance of m"), "s1 does not prefill now"


def test_one_that_is_ordered_to_leave_a_stage_stands_in_for_nobody() -> None:
    pools = (pool(Role.E, "e1"), pool(Role.P, "t1"), switching("s1", Role.PD, *Role.PD.stages, wanted=Role.D))
    assert loss("t1", pools).startswith("t1 is the last prefill instance of m")
