"""What the pool manager's service is told of a request, and which requests are refused before that."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc.aio
import pytest

from tests import identities
from triptych.cli.authority import Authority
from triptych.domain.membership import MemberKind
from triptych.domain.pool import MemberReport, MembershipDelta, Order, OrderKind, Registration, Watch
from triptych.errors import PermissionDenied
from triptych.rpc.multiplex import Multiplexer
from triptych.rpc.server import RpcServer
from triptych.rpc.stubs import PoolManagerStub
from triptych.runtime.tls import TlsIdentity
from triptych.services.pool_manager.servicer import SERVICE_NAME, PoolManagerServicer
from triptych.v1.pool_manager_pb2 import DrainRequest

HERE, ELSEWHERE = "127.0.0.1", "127.0.0.2"
TIMEOUT_S = 20.0


class Manager:
    def __init__(self) -> None:
        self.drained: list[tuple[str, bool]] = []
        self.metrics: list[str] = []

    async def attend(self, reports: AsyncGenerator[MemberReport]) -> AsyncGenerator[Order]:
        async with aclosing(reports):
            async for report in reports:
                if isinstance(report, Registration):
                    self.metrics.append(report.metrics)
                yield Order(OrderKind.REGISTERED)

    async def watch(self, watch: Watch) -> AsyncGenerator[MembershipDelta]:
        self.metrics.append(watch.metrics)
        yield MembershipDelta(1, 1)

    async def drain_instance(self, instance_id: str, *, force: bool) -> None:
        self.drained.append((instance_id, force))


@asynccontextmanager
async def serving(tls: TlsIdentity | None = None) -> AsyncIterator[tuple[Manager, int]]:
    manager: Any = Manager()
    register = PoolManagerServicer(manager, tls).register
    async with RpcServer(host=HERE, port=0, service_names=(SERVICE_NAME,), register=register, tls=tls) as server:
        yield manager, server.port


@asynccontextmanager
async def relay(port: int) -> AsyncIterator[int]:
    """A port whose connections reach ``port`` from another address."""
    ended = asyncio.Event()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(HERE, port, local_addr=(ELSEWHERE, 0))
        await asyncio.gather(carry(reader, back), carry(there, writer))
        ended.set()

    server = await asyncio.start_server(connected, HERE, 0)
    async with server:
        yield server.sockets[0].getsockname()[1]
        async with asyncio.timeout(TIMEOUT_S):
            await ended.wait()


@pytest.mark.parametrize(
    ("request_", "force"),
    [
        (DrainRequest(instance_id="e1", force=False), False),
        (DrainRequest(instance_id="e1", force=True), True),
        (DrainRequest(instance_id="e1"), False),
    ],
)
async def test_only_a_drain_that_says_so_is_forced(request_: DrainRequest, *, force: bool) -> None:
    """Also over the stream that calls share."""
    async with serving() as (manager, port), grpc.aio.insecure_channel(f"{HERE}:{port}") as channel:
        calls = Multiplexer(channel)
        method, sent = f"/{SERVICE_NAME}/Drain", request_.SerializeToString()
        await calls.unary(method, sent, lambda _: None, timeout_s=TIMEOUT_S, metadata=())
        await calls.close()
    assert manager.drained == [("e1", force)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return identities.cluster(tmp_path_factory.mktemp("certs") / "ca")


async def drain(made: Authority, folder: str, port: int, name: str) -> None:
    stub = PoolManagerStub(f"{HERE}:{port}", identities.identity(made.folder / folder))
    try:
        await stub.drain_instance(name, force=False)
    finally:
        await stub.close()


@asynccontextmanager
async def attending(made: Authority, folder: str, port: int, *names: str) -> AsyncIterator[None]:
    """A member that has registered under these names, one after the other."""

    async def reports() -> AsyncGenerator[MemberReport]:
        for name in names:
            yield Registration(MemberKind.INSTANCE, name, 1, f"{HERE}:1", "m")
        await asyncio.Event().wait()

    stub = PoolManagerStub(f"{HERE}:{port}", identities.identity(made.folder / folder))
    async with aclosing(stub.attend(reports())) as orders:
        for _ in names:
            await anext(orders)
        yield
    await stub.close()


@pytest.mark.timeout(60)
async def test_a_member_drains_members_of_its_own_host_only(made: Authority) -> None:
    refusal = (
        r"^Drain of another member needs a certificate for operator\.triptych\.test or pool-manager\.triptych\.test$"
    )
    async with serving(identities.identity(made.folder / "pool-manager")) as (manager, port):
        async with attending(made, "encoder", port, "former", "e1"), attending(made, "router", port, "r1"):
            for folder, name in (("encoder", "e1"), ("router", "r1"), ("operator", "r1"), ("pool-manager", "e1")):
                await drain(made, folder, port, name)
            async with relay(port) as elsewhere:
                with pytest.raises(PermissionDenied, match=refusal):
                    await drain(made, "encoder", elsewhere, "e1")
            async with relay(port) as elsewhere:
                await drain(made, "operator", elsewhere, "e1")
            for name in ("former", "unknown"):
                with pytest.raises(PermissionDenied, match=refusal):
                    await drain(made, "encoder", port, name)
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                try:
                    await drain(made, "encoder", port, "e1")
                except PermissionDenied:  # the manager has seen that it left
                    break
                manager.drained.pop()
    assert [name for name, _ in manager.drained] == ["e1", "r1", "r1", "e1", "e1"]


async def test_without_a_domain_every_certificate_may_drain_every_member(made: Authority) -> None:
    async with serving(identities.identity(made.folder / "pool-manager", "")) as (manager, port):
        await drain(made, "encoder", port, "unknown")
    assert manager.drained == [("unknown", False)]


async def test_wildcard_addresses_of_metrics_become_those_of_the_callers_host() -> None:
    registered = Registration(MemberKind.ROUTER, "r1", 1, "127.0.0.1:1", "model")

    async def reports(metrics: str) -> AsyncGenerator[MemberReport]:
        yield replace(registered, metrics=metrics)

    async with serving() as (manager, port):
        stub = PoolManagerStub(f"{HERE}:{port}", None)
        async with aclosing(stub.attend(reports("0.0.0.0:9100"))) as orders:
            await anext(orders)
        async with aclosing(stub.watch(Watch(metrics="0.0.0.0:9101"))) as deltas:
            await anext(deltas)
        await stub.close()
    assert manager.metrics == [f"{HERE}:9100", f"{HERE}:9101"]
