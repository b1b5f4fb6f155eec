"""Streams that last as long as their client are observed, also those whose requests are a stream."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from triptych.domain.pool import Farewell, MemberReport, Order, OrderKind
from triptych.errors import Unavailable
from triptych.rpc.server import RpcServer
from triptych.rpc.stubs import PoolManagerStub
from triptych.runtime.telemetry import Telemetry
from triptych.services.pool_manager.servicer import PoolManagerServicer

WAIT_S = 10.0


class Manager:
    """Accepts every stream, and ends it as its first report says."""

    async def attend(self, reports: AsyncGenerator[MemberReport]) -> AsyncGenerator[Order]:
        yield Order(OrderKind.REGISTERED)
        async for report in reports:
            assert isinstance(report, Farewell)
            if report.reason == "fail":
                raise Unavailable("it shuts down")
            return
        await asyncio.Event().wait()


async def until(line: str, telemetry: Telemetry) -> None:
    async with asyncio.timeout(WAIT_S):
        while line not in telemetry.metrics.render().decode().splitlines():  # noqa: ASYNC110 - it happens in the server
            await asyncio.sleep(0.005)


async def stays(reason: str, leave: asyncio.Event) -> AsyncGenerator[MemberReport]:
    await leave.wait()
    yield Farewell(reason)


async def test_streams_of_members_are_counted_while_they_are_open_and_by_how_they_end() -> None:
    telemetry, leave = Telemetry(), asyncio.Event()
    manager: Any = Manager()
    register = PoolManagerServicer(manager).register
    async with RpcServer(host="127.0.0.1", port=0, service_names=(), register=register, telemetry=telemetry) as server:
        stub = PoolManagerStub(f"127.0.0.1:{server.port}")
        open_, ended = "triptych_rpc_server_streams", "triptych_rpc_server_streams_ended_total"
        async with (
            aclosing(stub.attend(stays("done", leave))) as first,
            aclosing(stub.attend(stays("fail", leave))) as second,
        ):
            async with aclosing(stub.attend(stays("", leave))) as third:
                for stream in (first, second, third):
                    await anext(stream)
                await until(f'{open_}{{method="PoolManager/Attend"}} 3.0', telemetry)
            await until(f'{ended}{{code="CANCELLED",method="PoolManager/Attend"}} 1.0', telemetry)
            leave.set()
            await until(f'{ended}{{code="OK",method="PoolManager/Attend"}} 1.0', telemetry)
            await until(f'{ended}{{code="UNAVAILABLE",method="PoolManager/Attend"}} 1.0', telemetry)
        await until(f'{open_}{{method="PoolManager/Attend"}} 0.0', telemetry)
        await stub.close()
