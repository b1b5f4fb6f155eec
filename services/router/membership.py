"""Sources of members (``ports.Membership``)."""

from collections.abc import AsyncGenerator, Iterable

from triptych.domain.membership import Member, MembershipSnapshot


class FixedMembership:
    """Those that the settings name, for ever."""

    fault = ""

    def __init__(self, addresses: Iterable[str]) -> None:
        self._snapshot = MembershipSnapshot(1, tuple(map(Member, addresses)))

    async def snapshots(self) -> AsyncGenerator[MembershipSnapshot]:
        yield self._snapshot
