"""Managers share profiles through the store."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from tests.unit.policy.profiles import DECODER, DECODER_IDENTITY, ENCODER, ENCODER_IDENTITY
from triptych.domain.profile import Profile
from triptych.runtime.profiles import KnownProfiles
from triptych.runtime.tasks import TaskScope
from triptych.services.pool_manager.sharing import SharedProfiles
from triptych.store.limits import StoreLimits
from triptych.store.memory import MemoryStore
from triptych.testing.store import StoreLink
from triptych.virtual import virtual_time


def now_s() -> float:
    return asyncio.get_running_loop().time()


class Site:
    """Managers with one store."""

    def __init__(self, stack: AsyncExitStack, limits: StoreLimits) -> None:
        self._stack = stack
        self.store = MemoryStore(clock=now_s, limits=limits)

    async def boot(self, *profiles: Profile) -> tuple[KnownProfiles, StoreLink]:
        known, link = KnownProfiles(profiles), StoreLink(self.store)
        scope = await self._stack.enter_async_context(TaskScope("test"))
        scope.spawn(SharedProfiles(known, link).run(), name="profiles", vital=True)
        await asyncio.sleep(1)
        return known, link


def play(scenario: Callable[[Site], Awaitable[None]], limits: StoreLimits | None = None) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            await scenario(Site(stack, limits or StoreLimits()))

    virtual_time.run(main(), seed=1, limit_s=600)


def measured(profile: Profile, at: str) -> Profile:
    return replace(profile, measured=replace(profile.measured, at=at))


def test_a_manager_knows_the_profiles_of_the_others_and_they_know_its_own() -> None:
    async def scenario(site: Site) -> None:
        first, _ = await site.boot(ENCODER)
        second, _ = await site.boot(DECODER)
        for known in (first, second):
            for identity in (ENCODER_IDENTITY, DECODER_IDENTITY):
                assert known.costs(identity) is not None
        third, _ = await site.boot()
        assert third
        assert third.costs(ENCODER_IDENTITY) is not None

    play(scenario)


def test_of_two_profiles_with_one_identity_the_newer_is_kept() -> None:
    async def scenario(site: Site) -> None:
        old, new = measured(ENCODER, "2026-01-01T00:00:00Z"), measured(ENCODER, "2026-02-01T00:00:00Z")
        await site.boot(new)
        known, _ = await site.boot(old)
        found = known.costs(ENCODER_IDENTITY)
        assert found is not None
        assert found.profile == new
        (entry,) = await site.store.entries("profiles")
        assert b"2026-02-01" in entry.value

    play(scenario)


def test_what_is_known_stays_while_the_store_is_away_and_an_emptied_store_is_filled_again() -> None:
    async def scenario(site: Site) -> None:
        await site.boot(ENCODER)
        known, link = await site.boot()
        link.cut = True
        (entry,) = await site.store.entries("profiles")
        await site.store.delete("profiles", entry.key)
        await asyncio.sleep(10)
        assert known.costs(ENCODER_IDENTITY) is not None
        link.cut = False
        await asyncio.sleep(10)
        assert known.costs(ENCODER_IDENTITY) is not None
        assert len(await site.store.entries("profiles")) == 1

    play(scenario)


def test_data_that_is_no_profile_and_profiles_that_are_too_large_are_left_out_and_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(site: Site) -> None:
        await site.store.put("profiles", "foreign", b"\xff{")
        known, _ = await site.boot(ENCODER)
        await site.boot()
        assert known.costs(ENCODER_IDENTITY) is not None
        assert [entry.key for entry in await site.store.entries("profiles")] == ["foreign"]

    play(scenario, StoreLimits(max_value_bytes=100))
    assert "a profile in the store cannot be used: it is not JSON" in caplog.text
    assert caplog.text.count("the profile of the encoder is not shared: the value has") == 1
