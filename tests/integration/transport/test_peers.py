"""Holder processes die, stop and restart: right bytes, or one clear error in time."""

import asyncio
import contextlib
import signal
from dataclasses import replace
from typing import Any

import pytest

from tests.integration.transport.remote import (
    LATE_S,
    UCX_OVER_TCP,
    Gone,
    Remote,
    SiteError,
    connect_in_time,
    nixl,
    pull,
    quarantine_over,
    site,
)
from triptych.domain.instance import TransportOffer
from triptych.transport.nixl_offer import NixlOffer
from triptych.transport.tcp_wire import TcpOffer

SMALL, LARGE = 64 << 10, 40 << 20
BACKENDS = ["tcp", "shm", nixl]
ENVIRONMENT: dict[str, dict[str, str]] = {"tcp": {}, "shm": {}, "nixl": UCX_OVER_TCP}
"""NIXL as between hosts; through shared memory it can read a stopped holder."""
MAX_PULL_S = 1.0
CANARY = 0xA5


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_holder_killed_before_a_pull_fails_it_and_earlier_pulls_stay_valid(backend: str) -> None:
    environment = ENVIRONMENT[backend]
    async with (
        site([backend], "reader", max_pull_s=MAX_PULL_S, environment=environment) as reader,
        site([backend], "holder", environment=environment) as holder,
    ):
        offers = await holder.call("offers")
        peer = await reader.call("connect", offers=offers)
        first, second = [await holder.call("put", key=key, seed=n, nbytes=SMALL) for n, key in enumerate(("0a", "0b"))]
        (await pull(reader, peer, first["ticket"], 4096)).must_be_right(first["digest"])
        await reader.call("fill", at=1 << 20, nbytes=SMALL, value=CANARY)
        await holder.kill()
        late = await pull(reader, peer, second["ticket"], 4096 + (1 << 19))
        late.must_be_right_or_clear(second["digest"], within_s=MAX_PULL_S + LATE_S)
        again = await pull(reader, peer, first["ticket"], 2 << 20)
        again.must_be_right_or_clear(first["digest"], within_s=MAX_PULL_S + LATE_S)
        if backend != "shm":  # memory shared by two processes outlives one of them
            assert (late.error, again.error) == ("TransferFailed", "TransferFailed")
        with pytest.raises(SiteError, match="TransferFailed"):
            await reader.call("connect", offers=offers)
        await quarantine_over(reader)
        assert await reader.call("is_filled", at=1 << 20, nbytes=SMALL, value=CANARY)
        await reader.call("disconnect", peer=peer)


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_holder_killed_during_a_pull_fails_it_in_time_without_leaks(backend: str) -> None:
    environment = ENVIRONMENT[backend]
    async with site([backend], "reader", nbytes=96 << 20, max_pull_s=MAX_PULL_S, environment=environment) as reader:
        for delay_s in (0.0, 0.01, 0.03):
            async with site([backend], "holder", environment=environment) as holder:
                peer = await connect_in_time(reader, holder, within_s=60)
                put = await holder.call("put", key="aa", seed=1, nbytes=LARGE)
                async with asyncio.TaskGroup() as group:
                    pulls = [group.create_task(pull(reader, peer, put["ticket"], at)) for at in (4096, 48 << 20)]
                    await asyncio.sleep(delay_s)
                    await holder.kill()
                for ended in pulls:
                    ended.result().must_be_right_or_clear(put["digest"], within_s=MAX_PULL_S + LATE_S)
                await reader.call("disconnect", peer=peer)
                await quarantine_over(reader)
                await reader.call("fill", at=4096, nbytes=LARGE, value=CANARY)
        await asyncio.sleep(0.3)
        assert await reader.call("is_filled", at=4096, nbytes=LARGE, value=CANARY)


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_late_write_of_a_stopped_holder_never_reaches_a_reused_slot(backend: str) -> None:
    environment = ENVIRONMENT[backend]
    async with (
        site([backend], "reader", max_pull_s=MAX_PULL_S, environment=environment) as reader,
        site([backend], "holder", environment=environment) as holder,
    ):
        peer = await connect_in_time(reader, holder, within_s=60)
        put = await holder.call("put", key="aa", seed=1, nbytes=LARGE)
        small = await holder.call("put", key="bb", seed=2, nbytes=SMALL)
        holder.signal(signal.SIGSTOP)
        stopped = await pull(reader, peer, put["ticket"], 4096)
        stopped.must_be_right_or_clear(put["digest"], within_s=MAX_PULL_S + LATE_S)
        if stopped.error is not None:
            # The reader may reuse every byte that its transport does not claim; this test does.
            claimed = await reader.call("quarantined")
            assert all(at >= 4096 and at + nbytes <= 4096 + LARGE + 16 for at, nbytes in claimed)
            if not claimed:
                await reader.call("fill", at=4096, nbytes=LARGE + 16, value=CANARY)
            holder.signal(signal.SIGCONT)
            await quarantine_over(reader)
            if claimed:
                await reader.call("fill", at=4096, nbytes=LARGE + 16, value=CANARY)
            await asyncio.sleep(0.5)
            assert await reader.call("is_filled", at=4096, nbytes=LARGE + 16, value=CANARY)
        holder.signal(signal.SIGCONT)
        peer = await connect_in_time(reader, holder, within_s=60)
        (await pull(reader, peer, small["ticket"], 4096)).must_be_right(small["digest"])


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_holder_restarted_at_anothers_address_is_not_mistaken_for_it(backend: str) -> None:
    environment = ENVIRONMENT[backend]
    async with site([backend], "reader", max_pull_s=MAX_PULL_S, environment=environment) as reader:
        async with site([backend], "holder", epoch=1, environment=environment) as old:
            before = await old.call("offers")
            peer = await reader.call("connect", offers=before)
            ticket = (await old.call("put", key="aa", seed=1, nbytes=SMALL))["ticket"]
        async with site([backend], "holder", epoch=2, environment=environment) as new:
            after = await new.call("offers")
            put = await new.call("put", key="aa", seed=2, nbytes=SMALL)
            assert put["ticket"]["offset"] == ticket["offset"], "the same offset in the arena of another incarnation"
            stale = await pull(reader, peer, ticket, 4096)
            assert stale.error is not None or stale.digest != put["digest"]
            assert stale.duration_s < MAX_PULL_S + LATE_S
            for offers in (before, _aimed_at(after, probe_of=before)):
                with pytest.raises(SiteError, match="TransferFailed"):
                    await reader.call("connect", offers=offers)
            fresh = await connect_in_time(reader, new, within_s=60)
            (await pull(reader, fresh, put["ticket"], 4096)).must_be_right(put["digest"])
            old_lease = await pull(reader, fresh, {**put["ticket"], "lease_id": ticket["lease_id"]}, 1 << 20)
            if backend == "nixl":  # the holder does not see a one-sided read
                old_lease.must_be_right(put["digest"])
            elif backend == "tcp":
                assert old_lease.error == "LeaseLost"


@pytest.mark.parametrize(
    ("backends", "environment", "used"),
    [
        pytest.param(["tcp"], {}, "tcp", id="tcp"),
        pytest.param(["shm"], {}, "shm", id="shm", marks=pytest.mark.extended),
        pytest.param(["nixl"], {}, "nixl", id="nixl", marks=nixl.marks),
        pytest.param(
            ["nixl", "tcp"],
            {"UCX_TLS": "tcp"},
            "tcp",
            id="nixl-without-shared-memory",
            marks=[*nixl.marks, pytest.mark.extended],
        ),
    ],
)
async def test_killed_readers_do_not_affect_their_holder(
    backends: list[str], environment: dict[str, str], used: str
) -> None:
    """Each takes a connection with it on which the holder may be sending."""
    async with site(backends, "holder", environment=environment) as holder:
        put = await holder.call("put", key="aa", seed=1, nbytes=LARGE)
        for number in range(4):
            async with site(backends, f"reader-{number}", environment=environment) as reader:
                peer = await connect_in_time(reader, holder, within_s=60)
                assert await reader.call("backend", peer=peer) == used
                (await pull(reader, peer, put["ticket"], 4096)).must_be_right(put["digest"])
                async with asyncio.TaskGroup() as group:
                    for _ in range(3):
                        group.create_task(_pull_until_gone(reader, peer, put["ticket"]))
                    await asyncio.sleep(0.01 + 0.02 * number)
                    await reader.kill()
        async with site(backends, "last-reader", environment=environment) as reader:
            peer = await connect_in_time(reader, holder, within_s=60)
            (await pull(reader, peer, put["ticket"], 4096)).must_be_right(put["digest"])


async def _pull_until_gone(reader: Remote, peer: int, ticket: dict[str, Any]) -> None:
    with contextlib.suppress(Gone):
        while True:
            await pull(reader, peer, ticket, 4096)


def _aimed_at(offers: list[list[str]], *, probe_of: list[list[str]]) -> list[list[str]]:
    """An offer of an earlier incarnation whose address leads to this one, as after reuse of a port."""
    [[backend, host, metadata]], [[_, _, earlier]] = offers, probe_of
    now = TransportOffer(backend, host, bytes.fromhex(metadata))
    then = TransportOffer(backend, host, bytes.fromhex(earlier))
    if backend == "tcp":
        packed = replace(TcpOffer.parse(now), probe=TcpOffer.parse(then).probe).pack()
    elif backend == "nixl":
        packed = replace(NixlOffer.parse(now), probe=NixlOffer.parse(then).probe).pack()
    else:
        packed = then.metadata
    return [[backend, host, packed.hex()]]
