"""Process of ``benchmarks.refusals`` (arguments: its process id, a port): the real router service with one instance, at which every request would be late.

The time that its requests would wait is predicted as ever, and then said to be ``WAIT_S``, so that all that follows is the way
of a refusal under overload. A request of priority ``SLOW`` is refused after ``SLOW_S``, as by a router that is far behind.
"""

import asyncio
import sys
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import uvloop

from triptych.demo import MODEL_DIR
from triptych.domain.chat import ChatRequest
from triptych.domain.generation import ChatEvent
from triptych.domain.instance import InstanceInfo, InstanceLoad, StageLoad
from triptych.domain.stage import Role, Stage
from triptych.rpc.server import RpcServer
from triptych.runtime.parent import end_with_parent
from triptych.runtime.profiles import KnownProfiles
from triptych.runtime.telemetry import Telemetry
from triptych.runtime.world import real_world
from triptych.services.router.membership import FixedMembership
from triptych.services.router.record import RouterRecord
from triptych.services.router.service import RouterService
from triptych.services.router.servicer import SERVICE_NAME, RouterServicer
from triptych.services.router.settings import RouterSettings
from triptych.testing.fakes import FAKE_MODEL

WAIT_S = 60.0
SLOW, SLOW_S = 1, 1.0


class Idle:
    """An instance that gets no request."""

    async def describe(self) -> InstanceInfo:
        return InstanceInfo("idle", 1, Role.EPD, FAKE_MODEL, 1 << 30, (), max_items=64, kv_tokens=1 << 20)

    async def watch_load(self) -> AsyncGenerator[InstanceLoad]:
        while True:
            yield InstanceLoad({stage: StageLoad(0, 0) for stage in Stage})
            await asyncio.sleep(1)

    async def close(self) -> None:
        """Do nothing: no connection is open."""


class Refusing(RouterService):
    """Refuses what it is asked, some of it late."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        predicted = self.attainment.least_s

        def least_s(*asked: Any, **how: Any) -> tuple[float, float]:
            return WAIT_S, max(1.0, *predicted(*asked, **how))

        self.attainment.least_s = least_s  # type: ignore[method-assign]

    async def chat(self, request: ChatRequest) -> AsyncGenerator[Sequence[ChatEvent]]:
        if request.priority == SLOW:
            await asyncio.sleep(SLOW_S)
        async for events in super().chat(request):
            yield events


async def serve(port: int) -> None:
    """Until it is killed."""
    settings = RouterSettings(model=MODEL_DIR, instances=("idle:1",), port=port)
    telemetry = Telemetry()

    def prepare(*_: object) -> Any:
        raise AssertionError("a request was admitted")

    async with real_world("router", "router", 1) as world:
        service = Refusing(
            settings,
            world,
            FixedMembership(settings.instances),
            lambda _: Idle(),
            prepare=prepare,
            offload=world.threads(1, name="prepare"),
            record=RouterRecord(telemetry.metrics),
            profiles=KnownProfiles(),
        )
        service.start()
        async with RpcServer(
            host="127.0.0.1",
            port=port,
            service_names=(SERVICE_NAME,),
            register=RouterServicer(service).register,
            telemetry=telemetry,
        ):
            await asyncio.Event().wait()


if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]))
    uvloop.run(serve(int(sys.argv[2])))
