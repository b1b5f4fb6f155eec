"""Membership: the instances that a source of members names, in versioned snapshots."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum, StrEnum

from triptych.domain.instance import InstanceInfo
from triptych.domain.stage import Role

MAX_MEMBERS = 4096


class MemberState(StrEnum):
    """State of a member, as its source tells those that use it."""

    ACTIVE = "active"
    LEAVING = "leaving"
    """The member gets no new work and finishes what it has."""
    LEFT = "left"
    """The member has ended: its work is redone elsewhere at once."""


class MemberKind(Enum):
    """Kind of a member."""

    INSTANCE = "instance"
    ROUTER = "router"
    """A router. Its model is the one that it serves; it has no role."""


@dataclass(frozen=True, slots=True)
class Member:
    """An instance (or router) as named by the source. Its ``InstanceInfo`` says what it serves.

    Role, model and epoch, if given, must match it: another process may have taken over the address.
    """

    address: str
    """``HOST:PORT`` at which routers and other instances reach it."""
    state: MemberState = MemberState.ACTIVE
    role: Role | None = None
    model: str | None = None
    """The served model's name."""
    epoch: int | None = None
    kind: MemberKind = MemberKind.INSTANCE
    suspected: bool = False
    """The source has lost contact with it. Whoever uses it may still reach it, and decides by itself."""

    def agrees_with(self, info: InstanceInfo) -> bool:
        """Whether the instance at the address is the one that the source means."""
        return (
            self.role in (None, info.role)
            and self.model in (None, info.model.model_id)
            and self.epoch in (None, info.epoch)
        )


@dataclass(frozen=True, slots=True)
class MembershipSnapshot:
    """Snapshot of all members, with unique addresses. A newer snapshot has a higher ``version``."""

    version: int = 0
    members: tuple[Member, ...] = ()

    def since(self, previous: "MembershipSnapshot") -> Iterator[Member]:
        """Members that are new or changed; missing ones are yielded as leaving."""
        before = {member.address: member for member in previous.members}
        for member in self.members:
            if before.pop(member.address, None) != member:
                yield member
        for member in before.values():
            if member.state is MemberState.ACTIVE:
                yield replace(member, state=MemberState.LEAVING)
