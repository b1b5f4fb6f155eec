"""Gateway, router, encoders and text instances on this event loop, with sockets between them; the engines are fake."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from services.encoder import servicer as encoder
from services.gateway.app import app as gateway_app
from services.gateway.settings import GatewaySettings
from services.router import servicer as router
from services.text import servicer as text
from tests.simulation.cluster import SimCluster, World
from triptych.rpc.server import Register, RpcServer
from triptych.rpc.stubs import EncoderStub, TextStub
from triptych.runtime.telemetry import Telemetry

HOST = "127.0.0.1"


@dataclass
class Wired:
    """``port`` is the gateway's."""

    cluster: SimCluster
    telemetry: Telemetry
    port: int

    def held(self) -> dict[str, int]:
        """As the cluster's, with what the gateway holds, and without what is zero."""
        gauges = ("triptych_http_requests_running", "triptych_http_body_bytes")
        read = self.telemetry.metrics.registry.get_sample_value
        gateway = {name: int(read(name) or 0) for name in gauges}
        return self.cluster.held() | {name: number for name, number in gateway.items() if number}


@asynccontextmanager
async def wired(world: World) -> AsyncIterator[Wired]:
    """HTTP to the gateway, gRPC to the router, and from there to all others; these pull in memory, as in the simulation."""
    cluster, telemetry = SimCluster(world), Telemetry()
    async with AsyncExitStack() as stack:

        async def listen(name: str, register: Register) -> str:
            server = RpcServer(host=HOST, port=0, service_name=name, register=register)
            return f"{HOST}:{(await stack.enter_async_context(server)).port}"

        encoders: dict[str, EncoderStub] = {}
        texts: dict[str, TextStub] = {}
        for node in cluster.encoders:
            target = await listen(encoder.SERVICE_NAME, encoder.EncoderServicer(node.service).register)
            encoders[node.name] = EncoderStub(target)
            stack.push_async_callback(encoders[node.name].close)
        for each in cluster.texts:
            target = await listen(text.SERVICE_NAME, text.TextServicer(each.service).register)
            texts[each.name] = TextStub(target)
            stack.push_async_callback(texts[each.name].close)
        cluster.router = cluster.make_router(encoders, texts)
        stack.push_async_callback(cluster.close)
        await cluster.start()
        front = await listen(router.SERVICE_NAME, router.RouterServicer(cluster.router).register)
        settings = GatewaySettings(router=front, port=0)
        gateway = await stack.enter_async_context(gateway_app(settings, telemetry))
        yield Wired(cluster, telemetry, gateway.port)
