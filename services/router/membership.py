"""Sources of members (``ports.Membership``): the settings, or a file that is watched."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterable
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from triptych.domain.membership import MAX_MEMBERS, Member, MembershipSnapshot, MemberState
from triptych.domain.stage import Role
from triptych.files import BadFile, read_toml
from triptych.policy.addresses import canonical, why_not_called
from triptych.ports import Offload

logger = logging.getLogger(__name__)

_MAX_FILE_NBYTES = 1 << 20
_SETTLED_S = 0.25


def checked_address(address: str) -> str:
    """An address in canonical form. Raises ValueError unless it is HOST:PORT."""
    if (reason := why_not_called(address, beyond_loopback=True)) is not None:
        raise ValueError(f"{address!r}: {reason}")
    return canonical(address)


class FixedMembership:
    """The instances named in the settings."""

    fault = ""

    def __init__(self, addresses: Iterable[str]) -> None:
        self._snapshot = MembershipSnapshot(1, tuple(map(Member, addresses)))

    async def snapshots(self) -> AsyncGenerator[MembershipSnapshot]:
        yield self._snapshot


class FileMembership:
    """The instances named in a file that is polled. If the file becomes invalid, the last snapshot stays in use.

    It is read once it has not changed for ``_SETTLED_S``, and again if it changed meanwhile: one that is rewritten in place could
    be read half, as a valid list of fewer instances.
    """

    def __init__(self, path: Path, *, poll_s: float, offload: Offload) -> None:
        """``offload`` reads the file, as a disk may block."""
        self.fault = ""
        self._path = path
        self._poll_s = poll_s
        self._offload = offload

    async def snapshots(self) -> AsyncGenerator[MembershipSnapshot]:
        snapshot, known = MembershipSnapshot(), None
        while True:
            try:
                seen = await self._offload.run(_signature, self._path)
                if seen != known:
                    await asyncio.sleep(_SETTLED_S)
                    members = await self._offload.run(read_members, self._path)
                    if await self._offload.run(_signature, self._path) != seen:
                        continue
                    known = seen
                    if self.fault:
                        logger.info("%s is valid again", self._path)
                    self.fault = ""
                    if snapshot.version == 0 or members != snapshot.members:
                        snapshot = MembershipSnapshot(snapshot.version + 1, members)
                        yield snapshot
            except ValueError as error:
                if str(error) != self.fault:
                    logger.error("%s; membership %d stays", error, snapshot.version)  # noqa: TRY400 - no defect
                self.fault, known = str(error), None
            await asyncio.sleep(self._poll_s)


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    address: Annotated[str, AfterValidator(checked_address)]
    state: MemberState = MemberState.ACTIVE
    role: Role | None = None
    model: str | None = Field(default=None, min_length=1, max_length=512)
    epoch: int | None = Field(default=None, ge=0, lt=1 << 64)


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    instances: list[_Entry] = Field(max_length=MAX_MEMBERS)


def read_members(path: Path) -> tuple[Member, ...]:
    """Raises ValueError with a one-line message if the file cannot be read or is invalid."""
    try:
        entries = _File.model_validate(read_toml(path, _MAX_FILE_NBYTES)).instances
    except BadFile as error:
        raise ValueError(f"{path} {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    members = tuple(Member(entry.address, entry.state, entry.role, entry.model, entry.epoch) for entry in entries)
    if len({member.address for member in members}) != len(members):
        raise ValueError(f"{path} names an address twice")
    return members


def _signature(path: Path) -> tuple[int, ...]:
    """Changes whenever the file changes. Raises ValueError."""
    try:
        found = path.stat()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
