"""Connections to the holders named by tickets: shared, bounded, replaced, and safe against forged tickets."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

import pytest

from triptych.domain.embedding import HolderRef, LeaseId, Ticket
from triptych.domain.instance import InstanceInfo, TransportOffer
from triptych.domain.stage import Role
from triptych.errors import DeadlineExceeded, InternalError, LeaseLost, Overloaded, TransferFailed, Unavailable
from triptych.testing.fakes import FAKE_MODEL
from triptych.transport.peer_pool import PeerPool
from triptych.virtual.virtual_time import run


class Link:
    backend = "fake"

    def __init__(self) -> None:
        self.closed = False

    async def pull(self, ticket: Ticket, destination_offset: int) -> None: ...

    async def close(self) -> None:
        self.closed = True


class Stub:
    """A holder at an address. It responds after ``takes_s``, or raises ``error``."""

    def __init__(self, instance_id: str, epoch: int = 1) -> None:
        self.info = InstanceInfo(instance_id, epoch, Role.E, FAKE_MODEL, 0, ())
        self.takes_s = 0.01
        self.error: Exception | None = None
        self.asked = 0
        self.released: list[LeaseId] = []
        self.closed = False

    async def describe(self) -> InstanceInfo:
        self.asked += 1
        await asyncio.sleep(self.takes_s)
        if self.error is not None:
            raise self.error
        return self.info

    async def release(self, lease_ids: Sequence[LeaseId]) -> None:
        if self.error is not None:
            raise self.error
        self.released += lease_ids

    async def close(self) -> None:
        self.closed = True


class World:
    """Holders ``a``, ``b``, ... at addresses of the same name, and a pool that connects to them."""

    def __init__(self, *names: str, limit: int = 8, own: Stub | None = None) -> None:
        self.stubs = {name: Stub(name) for name in names}
        self.opened: list[str] = []
        self.links: list[Link] = []
        self.link_error: TransferFailed | None = None
        self.pool = PeerPool(
            self._open,
            self._connect,
            limit=limit,
            clock=asyncio.get_running_loop().time,
            own=None if own is None else (own.info.instance_id, own.info.epoch, own),
        )

    def _open(self, address: str) -> Stub:
        if address not in self.stubs:
            raise TransferFailed("the holder's address in the ticket is not called")
        self.opened.append(address)
        return self.stubs[address]

    async def _connect(self, offers: Sequence[TransportOffer]) -> Link:
        await asyncio.sleep(0.01)
        if self.link_error is not None:
            raise self.link_error
        self.links.append(Link())
        return self.links[-1]

    async def read(self, name: str, epoch: int = 1, *, at: str = "", lasts_s: float = 0.0) -> Link:
        async with self.pool.use(HolderRef(at or name, name, epoch)) as link:
            await asyncio.sleep(lasts_s)
            assert isinstance(link, Link)
            return link


def in_virtual_time(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    run(scenario())


def test_concurrent_users_of_a_holder_share_one_connection_attempt() -> None:
    async def scenario() -> None:
        world = World("a")
        got = await asyncio.gather(*(world.read("a") for _ in range(20)))
        assert {id(link) for link in got} == {id(world.links[0])}
        await world.read("a")
        assert (world.stubs["a"].asked, len(world.links), world.opened) == (1, 1, ["a"])
        assert world.pool.by_backend() == {("fake",): 1}
        await world.pool.close()
        assert world.links[0].closed
        assert world.stubs["a"].closed

    in_virtual_time(scenario)


def test_a_failed_attempt_is_shared_and_the_next_user_retries() -> None:
    async def scenario() -> None:
        world = World("a")
        world.link_error = TransferFailed("no way")
        got = await asyncio.gather(*(world.read("a") for _ in range(5)), return_exceptions=True)
        assert [str(error) for error in got] == ["no way"] * 5
        assert world.stubs["a"].asked == 1
        world.link_error = None
        await world.read("a")

    in_virtual_time(scenario)


def test_when_the_connecting_caller_cancels_another_takes_over() -> None:
    async def scenario() -> None:
        world = World("a")
        async with asyncio.TaskGroup() as group:
            first = group.create_task(world.read("a"))
            second = group.create_task(world.read("a"))
            await asyncio.sleep(0.005)
            first.cancel()
            assert await second is world.links[0]
        assert world.stubs["a"].asked == 2

    in_virtual_time(scenario)


@pytest.mark.parametrize("error", [Unavailable("refused"), InternalError("no such method"), None])
def test_any_wrong_address_gives_the_same_error_and_keeps_nothing(
    error: Exception | None,
) -> None:
    async def scenario() -> None:
        world = World("a")
        world.stubs["a"].error = error
        world.stubs["a"].takes_s = 0.01 if error else 1000.0
        with pytest.raises(TransferFailed, match=r"^encoder 'a' is not reachable from here$"):
            await world.read("a")
        assert len(world.pool) == 0
        assert world.stubs["a"].closed

    in_virtual_time(scenario)


def test_a_ticket_with_another_holders_address_reads_nothing_and_affects_no_reader() -> None:
    async def scenario() -> None:
        world = World("a", "b")
        link = await world.read("a")
        for name, epoch in (("b", 1), ("a", 7)):
            with pytest.raises(
                TransferFailed, match=rf"encoder '{name}' \(epoch {epoch}\) is not where its ticket says"
            ):
                await world.read(name, epoch, at="a")
        assert await world.read("a") is link
        assert len(world.links) == 1
        assert not link.closed

    in_virtual_time(scenario)


def test_an_impersonating_holder_is_used_only_for_tickets_with_its_own_address() -> None:
    async def scenario() -> None:
        world = World("a", "evil")
        world.stubs["evil"].info = world.stubs["a"].info
        false = await world.read("a", at="evil")
        assert await world.read("a") is not false

    in_virtual_time(scenario)


def test_a_restarted_holder_gets_a_new_link_and_readers_of_the_old_one_continue() -> None:
    async def scenario() -> None:
        world = World("a")
        async with world.pool.use(HolderRef("a", "a", 1)):
            world.stubs["a"].info = replace(world.stubs["a"].info, epoch=2)
            await world.read("a", 2)
            assert [link.closed for link in world.links] == [False, False]
        assert [link.closed for link in world.links] == [True, False]
        with pytest.raises(TransferFailed, match="is not where its ticket says"):
            await world.read("a", 1)
        assert len(world.pool) == 1

    in_virtual_time(scenario)


@pytest.mark.parametrize("failure", [TransferFailed("broken"), asyncio.CancelledError()])
def test_a_failed_link_is_replaced_at_once_and_closed_after_its_last_user(failure: BaseException) -> None:
    async def scenario() -> None:
        world = World("a")

        async def read_until_it_fails() -> None:
            async with world.pool.use(HolderRef("a", "a", 1)):
                raise failure

        async with world.pool.use(HolderRef("a", "a", 1)) as held:
            with pytest.raises(type(failure)):
                await read_until_it_fails()
            assert await world.read("a") is not held
            assert [link.closed for link in world.links] == [False, False]
        assert [link.closed for link in world.links] == [True, False]
        assert world.stubs["a"].asked == 2, "its offers are requested again: it may have a new agent"

    in_virtual_time(scenario)


def test_a_refusal_by_the_holder_keeps_the_link() -> None:
    async def scenario() -> None:
        world = World("a")
        with pytest.raises(LeaseLost):
            async with world.pool.use(HolderRef("a", "a", 1)):
                raise LeaseLost("gone")
        assert await world.read("a") is world.links[0]

    in_virtual_time(scenario)


def test_above_the_limit_the_least_recently_used_idle_link_is_closed() -> None:
    async def scenario() -> None:
        world = World("a", "b", "c", "d", limit=2)
        await world.read("a")
        await world.read("b")
        await world.read("a")
        await world.read("c")
        assert [link.closed for link in world.links] == [False, True, False]
        assert world.stubs["b"].closed
        async with asyncio.TaskGroup() as group:
            for name in ("a", "c"):
                group.create_task(world.read(name, lasts_s=1.0))
            await asyncio.sleep(0.5)
            with pytest.raises(Overloaded, match="2 holders are being read from, which is the limit"):
                await world.read("d")
        await world.read("d")
        assert len(world.pool) == 2

    in_virtual_time(scenario)


def test_unreachable_addresses_take_a_place_only_during_their_attempt() -> None:
    async def scenario() -> None:
        world = World("a", *(f"x{n}" for n in range(50)), limit=4)
        link = await world.read("a")
        for number in range(50):
            world.stubs[f"x{number}"].error = Unavailable("refused")
            with pytest.raises(TransferFailed):
                await world.read(f"x{number}")
        assert await world.read("a") is link
        with pytest.raises(TransferFailed, match="is not called"):
            await world.read("a", at="unix:/run/x")
        assert len(world.pool) == 1

    in_virtual_time(scenario)


def test_an_unresponsive_holder_does_not_delay_others() -> None:
    async def scenario() -> None:
        world = World("a", "hung")
        world.stubs["hung"].takes_s = 1000.0
        async with asyncio.TaskGroup() as group:
            hung = group.create_task(_failed(world.read("hung")))
            began_s = asyncio.get_running_loop().time()
            await world.read("a")
            assert asyncio.get_running_loop().time() - began_s < 0.1
        assert "not reachable" in hung.result()

    in_virtual_time(scenario)


def test_idle_links_are_closed_in_the_end() -> None:
    async def scenario() -> None:
        world = World("a", "b")
        await world.read("a")
        await asyncio.sleep(500.0)
        await world.pool.close_idle()
        await world.read("b")
        await asyncio.sleep(500.0)
        await world.pool.close_idle()
        assert [link.closed for link in world.links] == [True, False]
        assert world.stubs["a"].closed
        async with world.pool.use(HolderRef("b", "b", 1)):
            await asyncio.sleep(1000.0)
            await world.pool.close_idle()
            assert not world.links[1].closed

    in_virtual_time(scenario)


def test_leases_are_released_without_a_link() -> None:
    async def scenario() -> None:
        world = World("a", "gone")
        await world.pool.release(HolderRef("a", "a", 1), [b"1"])
        assert world.stubs["a"].released == [b"1"]
        assert world.links == []
        world.stubs["gone"].error = Unavailable("refused")
        with pytest.raises(Unavailable):
            await world.pool.release(HolderRef("gone", "gone", 1), [b"2"])
        assert len(world.pool) == 1

    in_virtual_time(scenario)


def test_the_holder_in_this_process_is_found_by_name_for_any_address() -> None:
    async def scenario() -> None:
        own = Stub("me")
        world = World("a", own=own)
        await world.read("me", at="a")
        assert (own.asked, world.opened) == (1, [])
        with pytest.raises(TransferFailed):
            await world.read("me", 2, at="elsewhere")

    in_virtual_time(scenario)


@pytest.mark.parametrize("error", [None, DeadlineExceeded("too late")])
def test_an_address_that_did_not_answer_fails_at_once_until_its_backoff_is_over(error: Exception | None) -> None:
    async def scenario() -> None:
        world = World("a", "b")
        world.stubs["a"].takes_s, world.stubs["a"].error = 1000.0 if error is None else 2.0, error
        time_s = asyncio.get_running_loop().time
        for failures, backoff_s in enumerate((1.0, 2.0, 4.0, 8.0, 8.0), 1):
            await _failed(world.read("a"))
            assert world.stubs["a"].asked == failures
            began_s = time_s()
            assert "not reachable" in await _failed(world.read("another", at="a"))
            await asyncio.sleep(backoff_s - 0.01)
            await _failed(world.read("a"))
            assert time_s() - began_s < backoff_s
            await world.read("b")
            await asyncio.sleep(0.02)
        world.stubs["a"].takes_s, world.stubs["a"].error = 0.01, None
        await world.read("a")
        assert len(world.pool) == 2

    in_virtual_time(scenario)


def test_an_address_that_refuses_is_asked_again_at_once() -> None:
    async def scenario() -> None:
        world = World("a")
        world.stubs["a"].error = Unavailable("refused")
        await _failed(world.read("a"))
        world.stubs["a"].error = None
        await world.read("a")

    in_virtual_time(scenario)


async def _failed(work: Coroutine[Any, Any, object]) -> str:
    with pytest.raises(TransferFailed) as caught:
        await work
    return caught.value.message
