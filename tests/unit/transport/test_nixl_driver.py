"""The driver over fake bindings; NIXL itself is tested in the contract suite."""

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from triptych.transport.nixl_driver import NixlDriver, Read, group_reads


class Bindings:
    """NIXL's module and agent in one. Transfers finish when ``go_on`` is set."""

    DRAM_SEG, NIXL_READ, NIXL_IN_PROG, NIXL_SUCCESS = "dram", "read", 1, 0

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.posted: list[tuple[str, list[int], bool]] = []
        """Each transfer's peer, the sizes of its reads, and whether the event loop posted it."""
        self.released = 0
        self.fails = False
        self.hangs = False

    def nixlXferDList(self, _: str, parts: list[tuple[int, int, int]]) -> list[int]:  # noqa: N802 - as NIXL says
        return [nbytes for _, nbytes, _ in parts]

    def createXferReq(self, _: str, local: list[int], remote: list[int], peer: str, *__: object) -> int:  # noqa: N802
        assert local == remote
        self.posted.append((peer, local, threading.current_thread() is threading.main_thread()))
        return len(self.posted)

    def postXferReq(self, _: int) -> int:  # noqa: N802
        if self.hangs:
            threading.Event().wait()
        if self.fails:
            raise ValueError
        return self.getXferStatus(_)

    def getXferStatus(self, _: int) -> int:  # noqa: N802
        return self.NIXL_SUCCESS if self.go_on.is_set() else self.NIXL_IN_PROG

    def releaseXferReq(self, _: int) -> None:  # noqa: N802
        self.released += 1


@pytest.fixture
def nixl() -> Bindings:
    return Bindings()


@pytest.fixture
async def driver(nixl: Bindings) -> AsyncIterator[NixlDriver]:
    made = NixlDriver(nixl, nixl, 0)
    yield made
    nixl.go_on.set()
    await asyncio.to_thread(made.stop, 1.0)


def read(peer: str = "a", nbytes: int = 100) -> Read:
    return Read(peer, None, 0, 0, nbytes, asyncio.get_running_loop().create_future())


async def ended(*reads: Read) -> list[str | None]:
    async with asyncio.timeout(60):
        return list(await asyncio.gather(*(read.outcome for read in reads)))


async def test_small_reads_of_one_peer_are_merged_and_posted_first() -> None:
    large, a, b, c = read(nbytes=1 << 20), read("a"), read("b"), read("a")
    assert group_reads([large, a, b, c]) == [(a, c), (b,), (large,)]
    assert [len(group) for group in group_reads(read() for _ in range(40))] == [16, 16, 8]


async def test_a_small_read_from_a_connected_peer_is_posted_at_once_when_idle(
    driver: NixlDriver, nixl: Bindings
) -> None:
    nixl.go_on.set()
    first = read()
    driver.submit([first], warm={"a"})
    assert first.outcome.done()
    cold, large = read(), read(nbytes=1 << 20)
    driver.submit([cold], warm=set())
    driver.submit([large], warm={"a"})
    assert await ended(cold, large) == [None, None]
    assert [inline for _, _, inline in nixl.posted] == [True, False, False]


async def test_an_unfinished_read_posted_at_once_is_polled_by_the_thread(driver: NixlDriver, nixl: Bindings) -> None:
    first, second = read(), read()
    driver.submit([first], warm={"a"})
    driver.submit([second], warm={"a"})
    assert not first.outcome.done()
    nixl.go_on.set()
    assert await ended(first, second) == [None, None]
    assert [inline for _, _, inline in nixl.posted] == [True, False]
    assert nixl.released == 2


@pytest.mark.parametrize("warm", [True, False])
async def test_a_failure_is_reported_by_name(driver: NixlDriver, nixl: Bindings, warm: bool) -> None:
    nixl.fails = True
    failing = read()
    driver.submit([failing], warm={"a"} if warm else set())
    assert await ended(failing) == ["ValueError"]
    assert nixl.released == 1


async def test_a_cancelled_read_is_not_started(driver: NixlDriver, nixl: Bindings) -> None:
    abandoned = read()
    abandoned.wanted = False
    driver.submit([abandoned], warm=set())
    await ended(abandoned)
    assert nixl.posted == []


async def test_stop_reports_unfinished_transfers_and_hanging_calls(nixl: Bindings) -> None:
    left = NixlDriver(nixl, nixl, 0)
    left.submit([read()], warm=set())
    assert not await asyncio.to_thread(left.stop, 0.05)
    nixl.hangs = True
    stuck = NixlDriver(nixl, nixl, 0)
    stuck.submit([read()], warm=set())
    assert not await asyncio.to_thread(stuck.stop, 0.05)
