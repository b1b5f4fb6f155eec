import asyncio
from collections.abc import Sequence

import pytest

from tests.contract.transport_kit import Kit
from triptych.domain.embedding import Ticket
from triptych.domain.instance import TransportOffer
from triptych.errors import LeaseLost, TransferFailed
from triptych.transport.probe import PeerBook, TransportSet, available_backends


def test_memory_and_tcp_are_always_available() -> None:
    assert {"memory", "tcp"} <= set(available_backends())


async def test_a_backend_that_fails_its_probe_gives_way_to_the_next() -> None:
    memory, elsewhere, tcp = Kit("memory"), Kit("memory"), Kit("tcp")
    async with (
        memory.site("reader") as reader,
        tcp.site("reader") as reader_tcp,
        elsewhere.site("holder") as holder,
        tcp.site("holder") as holder_tcp,
    ):
        transports = TransportSet([reader.transport, reader_tcp.transport], connect_timeout_s=5.0)
        offers = [holder.transport.offer(), holder_tcp.transport.offer()]
        peer = await transports.connect(offers)
        assert peer.backend == "tcp"
        await peer.close()
        with pytest.raises(TransferFailed, match="memory: the holder is not in this process"):
            await transports.connect(offers[:1])
        with pytest.raises(TransferFailed, match="no transport in common"):
            await transports.connect([])


class Link:
    backend = "fake"

    def __init__(self) -> None:
        self.closed = False

    async def pull(self, ticket: Ticket, destination_offset: int) -> None: ...

    async def close(self) -> None:
        self.closed = True


class Connector:
    def __init__(self, error: TransferFailed | None = None) -> None:
        self.links: list[Link] = []
        self.attempts = 0
        self.go = asyncio.Event()
        self.error = error

    async def __call__(self, offers: Sequence[TransportOffer]) -> Link:
        self.attempts += 1
        await self.go.wait()
        if self.error is not None:
            raise self.error
        self.links.append(Link())
        return self.links[-1]


async def test_all_who_ask_at_once_share_one_attempt_and_its_failure() -> None:
    for error in (None, TransferFailed("down")):
        connector = Connector(error)
        book = PeerBook(connector, limit=4)
        asking = asyncio.gather(*(book.meet("e", 1, []) for _ in range(5)), return_exceptions=True)
        await asyncio.sleep(0)
        connector.go.set()
        got = await asking
        assert connector.attempts == 1
        assert len({id(one) for one in got}) == 1
        assert len(book) == (1 if error is None else 0)


async def test_when_the_one_who_connects_leaves_another_takes_over() -> None:
    connector = Connector()
    book = PeerBook(connector, limit=4)
    async with asyncio.TaskGroup() as group:
        first = group.create_task(book.meet("e", 1, []))
        second = group.create_task(book.meet("e", 1, []))
        await asyncio.sleep(0)
        first.cancel()
        connector.go.set()
        assert await second is connector.links[0]
    assert connector.attempts == 2


async def test_a_new_incarnation_and_the_limit_close_old_links() -> None:
    connector = Connector()
    connector.go.set()
    book = PeerBook(connector, limit=2)
    await book.meet("a", 1, [])
    await book.meet("a", 2, [])
    await book.meet("b", 1, [])
    await book.meet("c", 1, [])
    assert [link.closed for link in connector.links] == [True, True, False, False]
    await book.close()
    assert all(link.closed for link in connector.links)


async def _read_until_it_fails(book: PeerBook, failure: BaseException) -> None:
    async with book.use("e", 1, []):
        raise failure


@pytest.mark.parametrize("failure", [TransferFailed("broken"), asyncio.CancelledError()])
async def test_a_link_that_failed_is_replaced_at_once_and_closed_when_its_last_user_leaves(
    failure: BaseException,
) -> None:
    connector = Connector()
    connector.go.set()
    book = PeerBook(connector, limit=2)
    async with book.use("e", 1, []) as held:
        with pytest.raises(type(failure)):
            await _read_until_it_fails(book, failure)
        assert await book.meet("e", 1, []) is not held
        assert [link.closed for link in connector.links] == [False, False]
    assert [link.closed for link in connector.links] == [True, False]
    await book.close()


async def test_what_a_holder_says_no_to_does_not_cost_the_link() -> None:
    connector = Connector()
    connector.go.set()
    book = PeerBook(connector, limit=2)
    with pytest.raises(LeaseLost):
        await _read_until_it_fails(book, LeaseLost("gone"))
    assert await book.meet("e", 1, []) is connector.links[0]
    await book.close()


async def test_a_holder_that_offers_something_else_is_met_anew_and_readers_of_the_former_link_go_on() -> None:
    connector = Connector()
    connector.go.set()
    book = PeerBook(connector, limit=2)
    first, second = [TransportOffer("nixl", "h", b"first")], [TransportOffer("nixl", "h", b"second")]
    async with book.use("e", 1, first) as held:
        assert await book.meet("e", 1, first) is held
        renewed = await book.meet("e", 1, second)
        assert renewed is not held
        assert [link.closed for link in connector.links] == [False, False]
        assert await book.meet("e", 1, second) is renewed
    assert [link.closed for link in connector.links] == [True, False]
    assert len(book) == 1
    await book.meet("e", 1, first)
    assert [link.closed for link in connector.links] == [True, True, False]
    await book.close()
