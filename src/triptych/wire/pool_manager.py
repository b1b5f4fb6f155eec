"""Conversion of members' reports, orders, membership deltas and the pool manager's status."""

from triptych.domain.decision import Bounds, DecisionSummary, Override, PoolLoad, Reason, ScalingStatus
from triptych.domain.instance import InstanceLimits
from triptych.domain.membership import MAX_MEMBERS, Member
from triptych.domain.mix import Form
from triptych.domain.pool import (
    Farewell,
    Heartbeat,
    ManagerStatus,
    ManualSize,
    MemberReport,
    MembershipDelta,
    MemberStatus,
    Order,
    PoolStatus,
    Registration,
    Removal,
    Watch,
)
from triptych.domain.replanning import Drift, PlanDecision, PlanStatus, RoleCount
from triptych.domain.scaling import PoolName
from triptych.domain.stage import Role
from triptych.domain.tier import Tier
from triptych.domain.windows import ClassWindow, Judged, NamedClass, NamedInstance, Refusals, Sketch, WindowReport
from triptych.errors import InvalidRequest
from triptych.policy.addresses import why_not_called
from triptych.v1 import instance_pb2, pool_manager_pb2
from triptych.wire.flat import EnumPair, Pair, Variants
from triptych.wire.instance import LIMITS, LOAD, SERVED_PART

_ROLE = EnumPair.of(Role.__members__, instance_pb2.Role.DESCRIPTOR)
_TIER = Pair(Tier, pool_manager_pb2.Tier)
_REGISTRATION = Pair(Registration, pool_manager_pb2.Registration, nested=(SERVED_PART, _TIER))
_JUDGED = Pair(Judged, pool_manager_pb2.Judged)
_CLASS = Pair(ClassWindow, pool_manager_pb2.ClassWindow, nested=(_JUDGED, Pair(Sketch, pool_manager_pb2.Sketch)))
_WINDOW = Pair(
    WindowReport,
    pool_manager_pb2.WindowReport,
    nested=(
        Pair(NamedClass, pool_manager_pb2.NamedClass, nested=(_CLASS,)),
        Pair(NamedInstance, pool_manager_pb2.NamedInstance, nested=(_JUDGED,)),
        Pair(Refusals, pool_manager_pb2.Refusals),
        Pair(Form, pool_manager_pb2.Form),
    ),
)
_REPORT = Variants(
    pool_manager_pb2.MemberReport,
    "report",
    {
        "registration": _REGISTRATION,
        "heartbeat": Pair(Heartbeat, pool_manager_pb2.Heartbeat, nested=(LOAD,)),
        "farewell": Pair(Farewell, pool_manager_pb2.Farewell),
        "window": _WINDOW,
    },
)
ORDER = Pair(Order, pool_manager_pb2.Order, nested=(LIMITS,))
WATCH = Pair(Watch, pool_manager_pb2.WatchRequest)
DELTA = Pair(
    MembershipDelta,
    pool_manager_pb2.MembershipDelta,
    nested=(Pair(Member, pool_manager_pb2.Member), Pair(Removal, pool_manager_pb2.Removal)),
)
_MEMBER_STATUS = Pair(MemberStatus, pool_manager_pb2.MemberStatus, nested=(_REGISTRATION, LOAD))
_DECISION = Pair(
    DecisionSummary,
    pool_manager_pb2.Decision,
    nested=(Pair(Reason, pool_manager_pb2.Reason), Pair(PoolLoad, pool_manager_pb2.PoolLoad), _JUDGED),
)
_SCALING = Pair(
    ScalingStatus,
    pool_manager_pb2.ScalingStatus,
    nested=(
        Pair(Bounds, pool_manager_pb2.SizeBounds),
        Pair(Override, pool_manager_pb2.Override),
        _JUDGED,
        _DECISION,
    ),
)
_ROLE_COUNT = Pair(RoleCount, pool_manager_pb2.RoleCount)
_PLAN = Pair(
    PlanStatus,
    pool_manager_pb2.PlanStatus,
    nested=(
        _ROLE_COUNT,
        Pair(Drift, pool_manager_pb2.Drift),
        Pair(PlanDecision, pool_manager_pb2.PlanDecision, nested=(_ROLE_COUNT,)),
    ),
)
STATUS = Pair(
    ManagerStatus,
    pool_manager_pb2.ManagerStatus,
    nested=(Pair(PoolStatus, pool_manager_pb2.PoolStatus, nested=(_MEMBER_STATUS, _SCALING)), _PLAN),
)
MANUAL_SIZE = Pair(ManualSize, pool_manager_pb2.SetSizeRequest)


def switch_to_wire(instance_id: str, role: Role, *, force: bool) -> pool_manager_pb2.SwitchRequest:
    return pool_manager_pb2.SwitchRequest(instance_id=instance_id, role=_ROLE.to_wire[role], force=force)


def switch_from_wire(message: pool_manager_pb2.SwitchRequest) -> tuple[str, Role, bool]:
    """Raises InvalidRequest for an unknown role."""
    return message.instance_id, _ROLE.from_wire[message.role], message.force


def roll_to_wire(pool: PoolName, degree: int) -> pool_manager_pb2.RollRequest:
    return pool_manager_pb2.RollRequest(model=pool.model, role=_ROLE.to_wire[pool.role], tier=pool.tier, degree=degree)


def roll_from_wire(message: pool_manager_pb2.RollRequest) -> tuple[PoolName, int]:
    """Raises InvalidRequest for an unknown role."""
    return PoolName(message.model, _ROLE.from_wire[message.role], message.tier), message.degree


def limits_to_wire(instance_id: str, limits: InstanceLimits) -> pool_manager_pb2.SetLimitsRequest:
    return pool_manager_pb2.SetLimitsRequest(instance_id=instance_id, limits=LIMITS.to_wire(limits))


def limits_from_wire(message: pool_manager_pb2.SetLimitsRequest) -> tuple[str, InstanceLimits]:
    return message.instance_id, LIMITS.from_wire(message.limits)


def report_to_wire(report: MemberReport) -> pool_manager_pb2.MemberReport:
    message: pool_manager_pb2.MemberReport = _REPORT.to_wire(report)
    return message


def report_from_wire(message: pool_manager_pb2.MemberReport) -> MemberReport:
    """Raises InvalidRequest for an empty report, an unknown enum value, or a load that names a stage twice."""
    if message.WhichOneof("report") is None:
        raise InvalidRequest("the report is empty", param="report")
    report: MemberReport = _REPORT.from_wire(message)
    return report


def delta_from_wire(message: pool_manager_pb2.MembershipDelta) -> MembershipDelta:
    """Raises InvalidRequest for more members than a manager may have, or one whose address is none."""
    if max(len(message.members), len(message.removed)) > MAX_MEMBERS:
        raise InvalidRequest(f"a delta has more than {MAX_MEMBERS} members", param="members")
    for member in message.members:
        if (reason := why_not_called(member.address, beyond_loopback=True)) is not None:
            raise InvalidRequest(f"a member's address is invalid: {reason}", param="members")
    return DELTA.from_wire(message)
