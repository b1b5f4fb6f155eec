"""Two hosts and a cable with every kind of fault: right bytes, or one clear error within the deadline; then recovery."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass

import pytest
from _pytest.mark.structures import ParameterSet

from tests.contract.transport_kit import NIXL_IS_HERE
from tests.integration.transport.hosts import Cable, hosts, why_not
from tests.integration.transport.remote import (
    LATE_S,
    UCX_OVER_TCP,
    Pulled,
    Remote,
    connect_in_time,
    pull,
    quarantine_over,
    site,
)

pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"pulls between hosts were NOT tested: {why_not()}")


@dataclass(frozen=True)
class Way:
    """The backends that both hosts allow, by preference, and those they end up using."""

    backends: tuple[str, ...]
    environment: dict[str, str]
    used: str


WAYS = {
    "tcp": Way(("tcp",), {}, "tcp"),
    "nixl": Way(("nixl",), UCX_OVER_TCP, "nixl"),
    "nixl-preferred": Way(("nixl", "tcp"), {"UCX_TLS": "tcp"}, "tcp"),
}
MAX_PULL_S = 1.5
HEALED_S = 60.0
"""Time in which pulls must work again, including the deadline of a connection attempt begun during the fault."""
LARGE, SMALL = 12 << 20, 4 << 10
PLACES = (4096, 16 << 20, 32 << 20)
CANARY = 0xA5
MBIT_PER_S = 250
"""Of the cable: two large embeddings take most of a second, so that a fault finds one on its way on a busy machine too."""

FAULTS: dict[str, Callable[[Cable], None]] = {
    "partition": lambda cable: cable.cut(),
    "holder-hears-nothing": lambda cable: cable.deaf(cable.a),
    "reader-hears-nothing": lambda cable: cable.deaf(cable.b),
    "holder-resets": lambda cable: cable.reset(cable.a),
    "reader-resets": lambda cable: cable.reset(cable.b),
    "slow": lambda cable: cable.slow(cable.a, mbit_per_s=20),
}
USUAL = {"tcp": "holder-resets", "nixl": "partition", "nixl-preferred": "reader-hears-nothing"}
"""The fault of each way that is not ``extended``."""


def _with(name: str, *values: object) -> ParameterSet:
    missing = not NIXL_IS_HERE and name != "tcp"
    marks = [pytest.mark.skipif(missing, reason="NIXL is not installed: its backend was NOT tested")]
    if values and values[0] != USUAL[name]:
        marks.append(pytest.mark.extended)
    return pytest.param(WAYS[name], *values, marks=marks, id="-".join((name, *map(str, values))))


def in_every_way(names: Iterable[str] = WAYS) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("pair", [_with(name) for name in names], indirect=True)


@pytest.fixture
def cable() -> Iterator[Cable]:
    with hosts() as made:
        try:
            made.slow(made.a, mbit_per_s=MBIT_PER_S)
        except OSError as error:
            pytest.skip(f"pulls between hosts were NOT tested: the kernel cannot slow a link down ({error})")
        yield made


@dataclass
class Pair:
    holder: Remote
    reader: Remote
    peer: int


@pytest.fixture
async def pair(request: pytest.FixtureRequest, cable: Cable) -> AsyncIterator[Pair]:
    way: Way = request.param
    async with (
        site(
            way.backends,
            "holder",
            host=cable.a.address,
            machine="a",
            prefix=cable.a.prefix,
            environment=way.environment,
        ) as holder,
        site(
            way.backends,
            "reader",
            host=cable.b.address,
            machine="b",
            prefix=cable.b.prefix,
            environment=way.environment,
            max_pull_s=MAX_PULL_S,
            connect_timeout_s=2.0,
        ) as reader,
    ):
        peer = await connect_in_time(reader, holder, within_s=HEALED_S)
        assert await reader.call("backend", peer=peer) == way.used
        yield Pair(holder, reader, peer)


@pytest.mark.extended
@in_every_way()
async def test_one_host_reads_the_other(pair: Pair) -> None:
    for number, nbytes in enumerate((SMALL, LARGE)):
        put = await pair.holder.call("put", key=f"0{number}", seed=number, nbytes=nbytes)
        (await pull(pair.reader, pair.peer, put["ticket"], 4096)).must_be_right(put["digest"])


@pytest.mark.parametrize(
    ("pair", "fault"),
    [
        _with(name, fault)
        for name in WAYS
        for fault in FAULTS
        if not (name == "nixl" and fault.endswith("resets"))  # according to UCX_OVER_TCP
    ],
    indirect=["pair"],
)
async def test_a_fault_during_pulls_ends_them_in_time_and_is_recovered_from(
    pair: Pair, cable: Cable, fault: str
) -> None:
    puts = [
        await pair.holder.call("put", key=f"0{number}", seed=number, nbytes=nbytes)
        for number, nbytes in enumerate((LARGE, LARGE, SMALL))
    ]
    ended: list[Pulled] = []
    while all(pulled.error is None for pulled in ended):  # on a busy machine a fault may come after the pulls
        cable.heal()
        cable.slow(cable.a, mbit_per_s=MBIT_PER_S)
        ended = await _pulls_hit_by(pair, puts, lambda: FAULTS[fault](cable))
        for put, pulled in zip(puts, ended, strict=True):
            pulled.must_be_right_or_clear(put["digest"], within_s=MAX_PULL_S + LATE_S)

    in_the_dark = await pull(pair.reader, pair.peer, puts[2]["ticket"], PLACES[2])
    in_the_dark.must_be_right_or_clear(puts[2]["digest"], within_s=MAX_PULL_S + LATE_S)

    free = [
        at
        for at, pulled in zip(PLACES, ended, strict=True)
        if pulled.error is not None and not await _claimed(pair, at)
    ]
    for at in free:
        await pair.reader.call("fill", at=at, nbytes=LARGE, value=CANARY)
    cable.heal()
    cable.slow(cable.a, mbit_per_s=MBIT_PER_S)
    await pair.reader.call("disconnect", peer=pair.peer)
    peer = await connect_in_time(pair.reader, pair.holder, within_s=HEALED_S)
    for put in puts:
        (await pull(pair.reader, peer, put["ticket"], 48 << 20)).must_be_right(put["digest"])
    await quarantine_over(pair.reader)
    for at in free:
        assert await pair.reader.call("is_filled", at=at, nbytes=LARGE, value=CANARY), "a late write"


@in_every_way(("tcp", "nixl"))
async def test_connecting_to_an_unreachable_host_fails_in_time(pair: Pair, cable: Cable) -> None:
    offers = await pair.holder.call("offers")
    await pair.reader.call("disconnect", peer=pair.peer)
    cable.deaf(cable.a)
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    with pytest.raises(Exception, match="TransferFailed"):
        await pair.reader.call("connect", offers=offers)
    assert loop.time() - began_s < 2.0 + LATE_S
    cable.heal()
    peer = await connect_in_time(pair.reader, pair.holder, within_s=HEALED_S)
    put = await pair.holder.call("put", key="aa", seed=1, nbytes=SMALL)
    (await pull(pair.reader, peer, put["ticket"], 4096)).must_be_right(put["digest"])


async def _pulls_hit_by(pair: Pair, puts: list[dict[str, object]], strike: Callable[[], None]) -> list[Pulled]:
    async with asyncio.TaskGroup() as group:
        pulls = [
            group.create_task(pull(pair.reader, pair.peer, put["ticket"], at))  # type: ignore[arg-type] # it is JSON
            for put, at in zip(puts, PLACES, strict=True)
        ]
        await asyncio.sleep(0.08)
        await asyncio.to_thread(strike)
    return [task.result() for task in pulls]


async def _claimed(pair: Pair, at: int) -> bool:
    return any(start < at + LARGE and at < start + nbytes for start, nbytes in await pair.reader.call("quarantined"))
