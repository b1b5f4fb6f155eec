"""The pool manager's gRPC servicer: converts messages and calls the service."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import replace

import grpc.aio

from triptych.domain.pool import MemberReport, Registration
from triptych.policy.addresses import seen_from
from triptych.ports import PoolManager
from triptych.rpc.authorization import Context, ip_of
from triptych.runtime.tls import TlsIdentity
from triptych.v1 import pool_manager_pb2, pool_manager_pb2_grpc
from triptych.wire import pool_manager

from .member_hosts import MemberHosts

SERVICE_NAME = "triptych.v1.PoolManager"


class PoolManagerServicer(pool_manager_pb2_grpc.PoolManagerServicer):
    """Serves any ``ports.PoolManager``."""

    def __init__(self, service: PoolManager, tls: TlsIdentity | None = None) -> None:
        """Make a servicer. With ``tls`` that has a ``tls_name``, a member drains members of its own host only."""
        self._service = service
        self._hosts = MemberHosts(tls)

    def register(self, server: grpc.aio.Server) -> None:
        pool_manager_pb2_grpc.add_PoolManagerServicer_to_server(self, server)

    async def Attend(  # noqa: N802 - the name is the wire's
        self, requests: AsyncIterator[pool_manager_pb2.MemberReport], context: Context
    ) -> AsyncGenerator[pool_manager_pb2.Order]:
        reports = self._hosts.noted(_reports(requests, ip_of(context)), context)
        async with aclosing(self._service.attend(reports)) as orders:
            async for order in orders:
                yield pool_manager.ORDER.to_wire(order)

    async def Watch(  # noqa: N802
        self, request: pool_manager_pb2.WatchRequest, context: Context
    ) -> AsyncGenerator[pool_manager_pb2.MembershipDelta]:
        watch = pool_manager.WATCH.from_wire(request)
        watch = replace(watch, metrics=seen_from(watch.metrics, ip_of(context)))
        async with aclosing(self._service.watch(watch)) as deltas:
            async for delta in deltas:
                yield pool_manager.DELTA.to_wire(delta)

    async def Status(  # noqa: N802
        self, request: pool_manager_pb2.StatusRequest, context: Context
    ) -> pool_manager_pb2.ManagerStatus:
        del request, context
        return pool_manager.STATUS.to_wire(await self._service.status())

    async def Drain(self, request: pool_manager_pb2.DrainRequest, context: Context) -> pool_manager_pb2.DrainResponse:  # noqa: N802
        self._hosts.check(request.instance_id, f"/{SERVICE_NAME}/Drain", context)
        await self._service.drain_instance(request.instance_id, force=request.force)
        return pool_manager_pb2.DrainResponse()

    async def Switch(  # noqa: N802
        self, request: pool_manager_pb2.SwitchRequest, context: Context
    ) -> pool_manager_pb2.SwitchResponse:
        del context
        instance_id, role, force = pool_manager.switch_from_wire(request)
        await self._service.switch_instance(instance_id, role, force=force)
        return pool_manager_pb2.SwitchResponse()

    async def SetLimits(  # noqa: N802
        self, request: pool_manager_pb2.SetLimitsRequest, context: Context
    ) -> pool_manager_pb2.SetLimitsResponse:
        del context
        await self._service.set_limits(*pool_manager.limits_from_wire(request))
        return pool_manager_pb2.SetLimitsResponse()

    async def SetSize(  # noqa: N802
        self, request: pool_manager_pb2.SetSizeRequest, context: Context
    ) -> pool_manager_pb2.SetSizeResponse:
        del context
        await self._service.set_size(pool_manager.MANUAL_SIZE.from_wire(request))
        return pool_manager_pb2.SetSizeResponse()

    async def Roll(self, request: pool_manager_pb2.RollRequest, context: Context) -> pool_manager_pb2.RollResponse:  # noqa: N802
        del context
        await self._service.roll(*pool_manager.roll_from_wire(request))
        return pool_manager_pb2.RollResponse()


async def _reports(requests: AsyncIterator[pool_manager_pb2.MemberReport], caller: str) -> AsyncGenerator[MemberReport]:
    async for message in requests:
        report = pool_manager.report_from_wire(message)
        if isinstance(report, Registration):
            report = replace(report, metrics=seen_from(report.metrics, caller))
        yield report
