"""Gateway, router, encoders and text instances on this event loop, with sockets between them; the engines are fake."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import grpc.aio

from tests.simulation.cluster import SimCluster, TextNode, World
from triptych.rpc import encoder, instance
from triptych.rpc.server import Register, RpcServer
from triptych.rpc.stubs import InstanceStub
from triptych.runtime.telemetry import Telemetry
from triptych.services.gateway.app import app as gateway_app
from triptych.services.gateway.settings import GatewaySettings
from triptych.services.router import servicer as router
from triptych.services.router.membership import FixedMembership
from triptych.services.text import servicer as text

HOST = "127.0.0.1"


@dataclass
class Wired:
    """``port`` is the gateway's."""

    cluster: SimCluster
    telemetry: Telemetry
    port: int

    def held(self) -> dict[str, int]:
        """The nonzero counts of what the cluster and the gateway hold."""
        gauges = ("triptych_http_requests_running", "triptych_http_body_bytes")
        read = self.telemetry.metrics.registry.get_sample_value
        gateway = {name: int(read(name) or 0) for name in gauges}
        return self.cluster.held() | {name: number for name, number in gateway.items() if number}


@asynccontextmanager
async def wired(world: World) -> AsyncIterator[Wired]:
    """HTTP to the gateway, gRPC to the router and on to the instances, which pull in memory as in the simulation."""
    cluster, telemetry = SimCluster(world), Telemetry()
    async with AsyncExitStack() as stack:

        async def listen(*servicers: tuple[str, Register]) -> str:
            def register(server: grpc.aio.Server) -> None:
                for _, add in servicers:
                    add(server)

            names = [name for name, _ in servicers]
            server = RpcServer(host=HOST, port=0, service_names=names, register=register)
            return f"{HOST}:{(await stack.enter_async_context(server)).port}"

        addresses = []
        await cluster.start_instances()
        for node in cluster.processes.values():
            servicers = [(instance.SERVICE_NAME, instance.InstanceServicer(node.instance).register)]
            if not isinstance(node, TextNode) or node.built.encoder is not None:
                servicers.append((encoder.SERVICE_NAME, encoder.EncoderServicer(node.instance).register))
            if isinstance(node, TextNode):
                servicers.append((text.SERVICE_NAME, text.TextServicer(node.instance).register))
            addresses.append(await listen(*servicers))
            cluster.names[addresses[-1]] = node.name
        stack.push_async_callback(cluster.close)
        await cluster.start(cluster.make_router(FixedMembership(addresses), InstanceStub))
        front = await listen((router.SERVICE_NAME, router.RouterServicer(cluster.router).register))
        settings = GatewaySettings(router=(front,), port=0)
        gateway = await stack.enter_async_context(gateway_app(settings, telemetry))
        yield Wired(cluster, telemetry, gateway.port)
