import pytest

from triptych.domain.embedding import DType
from triptych.domain.instance import InstanceInfo, ModelInfo
from triptych.domain.membership import Member, MembershipSnapshot, MemberState
from triptych.domain.stage import Role, Stage

LEAVING, LEFT = MemberState.LEAVING, MemberState.LEFT
INFO = InstanceInfo("i", 7, Role.EPD, ModelInfo("m", "r", DType.F32, 8, 100), 0, ())


def changes(before: list[Member], after: list[Member]) -> list[Member]:
    return list(MembershipSnapshot(2, tuple(after)).since(MembershipSnapshot(1, tuple(before))))


def test_only_new_and_modified_members_are_changes() -> None:
    a, b = Member("a"), Member("b")
    assert changes([], [a, b]) == [a, b]
    assert changes([a], [b, a]) == [b]
    assert changes([a], [Member("a", epoch=2)]) == [Member("a", epoch=2)]
    assert changes([a], [Member("a", LEAVING)]) == [Member("a", LEAVING)]
    assert changes([Member("a", LEAVING)], [Member("a", LEFT)]) == [Member("a", LEFT)]
    assert changes([Member("a", LEFT)], [a]) == [a]


def test_a_member_missing_from_the_snapshot_leaves() -> None:
    assert changes([Member("a", role=Role.E)], []) == [Member("a", LEAVING, Role.E)]
    assert changes([Member("a", LEAVING), Member("b", LEFT)], []) == []


@pytest.mark.parametrize(
    ("member", "agrees"),
    [
        (Member("a"), True),
        (Member("a", role=Role.EPD, model="m", epoch=7), True),
        (Member("a", role=Role.PD), False),
        (Member("a", model="n"), False),
        (Member("a", epoch=8), False),
    ],
)
def test_a_members_entry_must_match_its_instance_info(member: Member, agrees: bool) -> None:
    assert member.agrees_with(INFO) is agrees


def test_a_role_is_a_set_of_stages() -> None:
    assert Role.of({Stage.DECODE, Stage.PREFILL}) is Role.PD
    assert Role.of(Role.E.stages | Role.PD.stages) is Role.EPD
    assert [role for role in Role if role.serves(Stage.ENCODE, Stage.DECODE)] == [Role.ED, Role.EPD]
    assert all(Role.of(role.stages) is role for role in Role)
    with pytest.raises(ValueError, match="not a valid Role"):
        Role.of(set())
