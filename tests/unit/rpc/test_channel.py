"""A stub whose certificate is replaced: new calls on a new connection, running ones go on."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest

from tests import identities
from tests.unit.rpc.test_multiplex import Script, request
from triptych.cli.authority import Authority
from triptych.errors import Cancelled, Unavailable
from triptych.rpc import channel
from triptych.rpc.server import RpcServer
from triptych.rpc.stubs import InstanceStub
from triptych.runtime.tls import TlsIdentity
from triptych.services.text.servicer import TextServicer

HOST = "127.0.0.1"


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def load(folder: Path, clock: Clock) -> TlsIdentity:
    return TlsIdentity.load(*identities.files(folder), name=identities.DOMAIN, clock=clock)


@pytest.fixture
def made(tmp_path: Path) -> Authority:
    return identities.cluster(tmp_path / "ca")


@asynccontextmanager
async def serving(script: Script, tls: TlsIdentity) -> AsyncIterator[str]:
    async with RpcServer(
        host=HOST, port=0, service_names=(), register=TextServicer(script).register, tls=tls
    ) as server:
        yield f"{HOST}:{server.port}"


async def events(stub: InstanceStub) -> int:
    async with aclosing(stub.generate(request())) as stream:
        return sum([len(several) async for several in stream])


def replace_authority(made: Authority) -> None:
    """At once, and without a time in which both are trusted."""
    identities.cluster(made.folder)


async def test_calls_after_new_certificates_use_them_and_running_ones_go_on(
    made: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "_POLL_S", 0.05)
    clock, script = Clock(), Script(waits=True)
    async with serving(script, load(made.folder / "encoder", clock)) as address:
        stub = InstanceStub(address, load(made.folder / "router", clock))
        running = stub.generate(request("running"))
        assert await anext(running)
        replace_authority(made)
        early = InstanceStub(address, load(made.folder / "router", clock))
        with pytest.raises(Unavailable, match="handshake failed"):  # the server has not looked yet
            await events(early)
        await early.close()
        clock.now_s += 1.1
        script.waits = False
        assert await events(stub) == 2
        await asyncio.sleep(0.2)
        assert script.running == {"running"}
        await running.aclose()
        async with asyncio.timeout(60):
            while script.running:  # noqa: ASYNC110 - what a script notes
                await asyncio.sleep(0.01)
        await stub.close()


async def test_closing_ends_calls_on_all_connections(made: Authority) -> None:
    clock, script = Clock(), Script(waits=True)
    async with serving(script, load(made.folder / "encoder", clock)) as address:
        stub = InstanceStub(address, load(made.folder / "router", clock))
        streams = []
        for name in ("first", "second"):
            streams.append(stub.generate(request(name)))
            assert await anext(streams[-1])
            identities.issue(made, "router", f"router.{identities.DOMAIN}")
            clock.now_s += 1.1
        assert script.running == {"first", "second"}
        await stub.close()
        for stream in streams:
            with pytest.raises(Exception, match="closed"):
                await anext(stream)
        identities.issue(made, "router", f"router.{identities.DOMAIN}")
        clock.now_s += 1.1
        with pytest.raises(Cancelled, match="closed"):
            await events(stub)


async def test_a_large_call_goes_on_after_new_certificates(made: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large call has a stream of its own, apart from the calls that share one."""
    monkeypatch.setattr(channel, "_POLL_S", 0.05)
    clock, script = Clock(), Script(waits=True)
    async with serving(script, load(made.folder / "encoder", clock)) as address:
        stub = InstanceStub(address, load(made.folder / "router", clock))
        async with (
            aclosing(stub.generate(request("large", tokens=200_000))) as large,
            aclosing(stub.generate(request("small"))) as small,
        ):
            assert await anext(large)
            identities.issue(made, "router", f"router.{identities.DOMAIN}")
            clock.now_s += 1.1
            assert await anext(small)
            await asyncio.sleep(0.3)
            assert script.running == {"large", "small"}
        await stub.close()


async def test_a_service_is_called_by_its_kind_wherever_it_runs(made: Authority) -> None:
    clock, script = Clock(), Script()
    async with serving(script, load(made.folder / "router", clock)) as address:
        stub = InstanceStub(address, load(made.folder / "text", clock))
        with pytest.raises(Unavailable, match="another name"):
            await events(stub)
        await stub.close()
