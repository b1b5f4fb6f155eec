"""Profiles in the store: what one manager was given with ``--profiles``, all managers of the store know."""

import asyncio
import hashlib
import logging
from contextlib import aclosing

from triptych.domain.profile import BadProfile, Profile, dump_profile, parse_profile
from triptych.domain.store import Changes
from triptych.errors import InvalidRequest, Overloaded, StoreCorrupt, StoreUnavailable
from triptych.ports import Store
from triptych.runtime.profiles import MAX_PROFILES, KnownProfiles

logger = logging.getLogger(__name__)

_TABLE = "profiles"
_RETRY_S = 5.0


class SharedProfiles:
    """Adds the profiles of other managers to those that this one knows. Of two with one identity the newer one is kept."""

    def __init__(self, known: KnownProfiles, store: Store) -> None:
        self._known = known
        self._store = store
        self._own = {_key(profile): profile for profile in known.own}
        self._there: dict[str, Profile] = {}
        """Profiles that the store has."""
        self._refused: set[str] = set()
        """Own profiles that the store does not take."""

    async def run(self) -> None:
        """Write and read until cancelled. While the store is away, what is known stays."""
        while True:
            self._there.clear()
            try:
                async with aclosing(self._store.watch(_TABLE)) as entries:
                    async for changes in entries:
                        self._learn(changes)
                        await self._share()
            except (StoreUnavailable, StoreCorrupt) as error:
                logger.debug("profiles are not shared now: %s", error)  # ``Store.fault`` says it to people
            await asyncio.sleep(_RETRY_S)

    def _learn(self, changes: Changes) -> None:
        for key in changes.deleted:
            self._there.pop(key, None)
        for entry in changes.written:
            try:
                profile = parse_profile(entry.value)
            except BadProfile as error:
                logger.warning("a profile in the store cannot be used: %s", error)
            else:
                if entry.key in self._there or len(self._there) < MAX_PROFILES:
                    self._there[entry.key] = profile
        self._known.learn(self._there.values())

    async def _share(self) -> None:
        for key, profile in self._own.items():
            shared = self._there.get(key)
            if key in self._refused or (shared is not None and shared.measured.at >= profile.measured.at):
                continue
            try:
                await self._store.put(_TABLE, key, dump_profile(profile).encode())
            except (InvalidRequest, Overloaded) as error:
                logger.warning("the profile of the %s is not shared: %s", profile.identity.part.value, error)
                self._refused.add(key)


def _key(profile: Profile) -> str:
    identity = profile.identity
    parts = (
        identity.part.value,
        identity.digest,
        *sorted(stage.value for stage in identity.stages),
        identity.hardware,
        identity.dtype.value,
        str(identity.tensor_parallel),
        identity.software,
        *(f"{name}={value}" for name, value in sorted(identity.options.items())),
    )
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
