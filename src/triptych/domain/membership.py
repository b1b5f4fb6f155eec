"""Membership: which instances there are, as a source of members says it, in versioned snapshots."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from triptych.domain.instance import InstanceInfo
from triptych.domain.stage import Role

MAX_MEMBERS = 4096


class MemberState(StrEnum):
    ACTIVE = "active"
    LEAVING = "leaving"
    """It gets nothing new, and ends what it has."""
    LEFT = "left"
    """It is gone: what it had is redone elsewhere at once."""


@dataclass(frozen=True, slots=True)
class Member:
    """An instance as its source knows it. What an instance serves, it says itself (``InstanceInfo``).

    What the source states of role, model or epoch has to agree with that: an address may have passed to another process.
    """

    address: str
    """``HOST:PORT``, by which routers and other instances reach it."""
    state: MemberState = MemberState.ACTIVE
    role: Role | None = None
    model: str | None = None
    """Name under which the model is served."""
    epoch: int | None = None

    def agrees_with(self, info: InstanceInfo) -> bool:
        """Whether the instance that answers at the address is the one that is meant."""
        return (
            self.role in (None, info.role)
            and self.model in (None, info.model.model_id)
            and self.epoch in (None, info.epoch)
        )


@dataclass(frozen=True, slots=True)
class MembershipSnapshot:
    """All members, each address once. A newer snapshot has a higher ``version``."""

    version: int = 0
    members: tuple[Member, ...] = ()

    def since(self, previous: "MembershipSnapshot") -> Iterator[Member]:
        """Members that are new or have changed; those that are not there any more are leaving."""
        before = {member.address: member for member in previous.members}
        for member in self.members:
            if before.pop(member.address, None) != member:
                yield member
        for member in before.values():
            if member.state is MemberState.ACTIVE:
                yield replace(member, state=MemberState.LEAVING)
