import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest

from triptych.domain.embedding import LeaseId, Ticket
from triptych.domain.encoding import EncodeRequest, EncodeResult, LeaseRequest
from triptych.domain.instance import InstanceInfo, InstanceLoad, StageLoad, TransportOffer
from triptych.domain.media import MediaInfo, Modality
from triptych.domain.stage import Stage
from triptych.errors import DeadlineExceeded, InstanceLost, Unavailable
from triptych.ports import Peer
from triptych.testing.damage import DamagingTransport
from triptych.transport.arena import HostArena
from triptych.virtual import virtual_time
from triptych.virtual.links import Fault, Link, LinkedInstance

T = TypeVar("T")
TICKET = Ticket(b"", "e", 1, 0, 48, 1, 0, (), 4, bytes(16), 10)
REQUEST = EncodeRequest(
    "r", 0, "m", b"", MediaInfo(Modality.IMAGE, "png", 1, 1, 0, b""), 4, b"", 5, 10, b"r" * 16, b"h" * 16
)


@dataclass
class SlowEncoder:
    """Every call takes 1 s."""

    log: list[str] = field(default_factory=list)

    async def describe(self) -> InstanceInfo:
        raise NotImplementedError

    async def encode(self, request: EncodeRequest) -> EncodeResult:
        self.log.append("began")
        try:
            await asyncio.sleep(1)
            self.log.append("done")
        finally:
            self.log.append("left")
        return EncodeResult(TICKET, bytes(16), cached=False, queue_s=0, encode_s=1)

    async def lease(self, request: LeaseRequest) -> Ticket:
        return TICKET

    async def release(self, lease_ids: Sequence[LeaseId]) -> None:
        self.log.append(f"released {len(lease_ids)}")

    async def watch_load(self) -> AsyncGenerator[InstanceLoad]:
        try:
            for number in range(3):
                await asyncio.sleep(1)
                yield InstanceLoad({Stage.ENCODE: StageLoad(number, 0)})
        finally:
            self.log.append("closed")


def make(fault: Callable[[str], Fault] = lambda _: Fault.NONE) -> tuple[SlowEncoder, Link[Any], LinkedInstance]:
    target = SlowEncoder()
    link: Link[Any] = Link("e0", target, latency_s=lambda: 0.1, fault=fault)
    return target, link, LinkedInstance(link)


def run(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    return virtual_time.run(main(), limit_s=100)


def test_an_error_of_the_target_is_sent_by_it_and_one_of_the_link_is_not() -> None:
    class Draining(SlowEncoder):
        async def encode(self, request: EncodeRequest) -> EncodeResult:
            raise Unavailable("draining")

        async def watch_load(self) -> AsyncGenerator[InstanceLoad]:
            for load in list[InstanceLoad]():
                yield load
            raise Unavailable("draining")

    async def main() -> list[bool]:
        link: Link[Any] = Link("e0", Draining())
        linked, sent = LinkedInstance(link), list[bool]()
        for is_there in (True, False):
            if not is_there:
                link.kill()
            with pytest.raises(Unavailable) as called:
                await linked.encode(REQUEST)
            with pytest.raises(Unavailable) as read:
                await anext(linked.watch_load())
            sent += [called.value.sent_by_peer, read.value.sent_by_peer]
        return sent

    assert run(main) == [True, True, False, False]


def now_s() -> float:
    return asyncio.get_running_loop().time()


def test_calls_have_latency_in_both_directions() -> None:
    async def main() -> float:
        _, _, encoder = make()
        assert (await encoder.encode(REQUEST)).ticket == TICKET
        return now_s()

    assert run(main) == pytest.approx(1.2)


def test_streams_forward_everything_and_are_closed() -> None:
    async def main() -> None:
        target, link, encoder = make()
        assert [load.at(Stage.ENCODE).pending_tokens async for load in encoder.watch_load()] == [0, 1, 2]
        assert link.in_flight == 0
        assert target.log == ["closed"]

    run(main)


def test_closing_a_stream_early_reaches_the_instance() -> None:
    async def main() -> None:
        target, _, encoder = make()
        loads = encoder.watch_load()
        await anext(loads)
        await loads.aclose()
        assert target.log == ["closed"]

    run(main)


def test_a_kill_loses_calls_in_flight_and_refuses_later_ones() -> None:
    async def main() -> None:
        target, link, encoder = make()
        asyncio.get_running_loop().call_later(0.5, link.kill)
        with pytest.raises(InstanceLost):
            await encoder.encode(REQUEST)
        assert now_s() == pytest.approx(0.5)
        assert target.log == ["began", "left"]
        with pytest.raises(Unavailable):
            await encoder.encode(REQUEST)
        link.restart(SlowEncoder())
        await encoder.encode(REQUEST)

    run(main)


@pytest.mark.parametrize("restarted", [False, True])
def test_a_stream_to_a_killed_instance_is_lost_after_its_replacement(restarted: bool) -> None:
    async def main() -> None:
        _, link, encoder = make()
        loads = encoder.watch_load()
        await anext(loads)
        link.kill()
        if restarted:
            link.restart(SlowEncoder())
        with pytest.raises(InstanceLost):
            await anext(loads)

    run(main)


def test_a_cancelled_caller_gets_no_instance_lost() -> None:
    async def main() -> None:
        target, link, encoder = make()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(encoder.encode(REQUEST), 0.5)
        assert target.log == ["began", "left"]
        assert link.in_flight == 0

    run(main)


def test_a_stalled_instance_answers_nothing_until_the_deadline() -> None:
    async def main() -> float:
        _, link, encoder = make()
        link.stall()
        with pytest.raises(DeadlineExceeded):
            await encoder.encode(REQUEST)
        expired_s = now_s()
        link.resume()
        await encoder.encode(REQUEST)
        return expired_s

    assert run(main) == pytest.approx(5)


@pytest.mark.parametrize(("fault", "done"), [(Fault.REQUEST_LOST, False), (Fault.REPLY_LOST, True)])
def test_lost_requests_and_replies_are_unavailable(fault: Fault, done: bool) -> None:
    async def main() -> None:
        target, _, encoder = make(lambda _: fault)
        with pytest.raises(Unavailable):
            await encoder.encode(REQUEST)
        assert ("done" in target.log) == done

    run(main)


@dataclass
class ZeroTransport:
    """A transport and peer that writes zeros."""

    arena: HostArena
    backend: str = "own"

    def offer(self) -> TransportOffer:
        return TransportOffer("own", "here", b"")

    async def connect(self, offer: TransportOffer) -> Peer:
        return self

    async def pull(self, ticket: Ticket, destination_offset: int) -> None:
        self.arena.write(destination_offset, bytes(ticket.slot_nbytes))

    def quarantined(self) -> tuple[tuple[int, int], ...]:
        return ()

    async def close(self) -> None: ...


def test_pulls_are_damaged_on_request() -> None:
    async def main() -> None:
        arena = HostArena(8192, instance_id="own", epoch=1)
        own, at = ZeroTransport(arena), arena.base
        arena.write(at, b"x" * 128)
        damaged = iter([False, True])
        transport = DamagingTransport(own, lambda _: next(damaged))
        peer = await transport.connect(transport.offer())
        await peer.pull(TICKET, at)
        assert not any(arena.read(at, 64))
        await peer.pull(TICKET, at)
        assert sum(arena.read(at, 64)) == 1

    run(main)
