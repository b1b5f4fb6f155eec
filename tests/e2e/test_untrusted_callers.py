"""A caller that reaches a port of a process cannot make it crash, grow, hang, or report its own error for a bad
request.
"""

import asyncio
import contextlib
import os
import random
import resource
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import grpc.aio
import psutil
import pytest
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from tests.e2e.mutations import mutations
from tests.e2e.reference import DIGITS
from triptych.cli.cluster import LocalCluster
from triptych.demo import MODEL_ID
from triptych.domain.media import digest_of
from triptych.rpc.scaler import SERVICE_NAME, ScalerServicer
from triptych.rpc.server import RpcServer
from triptych.scaling.none import NoScaler
from triptych.v1 import (
    calls_pb2,
    common_pb2,
    encoder_pb2,
    instance_pb2,
    pool_manager_pb2,
    router_pb2,
    scaler_pb2,
    text_pb2,
)
from triptych.wire.decode import REQUESTS

pytestmark = [pytest.mark.extended, pytest.mark.timeout(500)]

ROOM_NBYTES = 1 << 30
"""Address space beyond that of a ready process; each thread may map 64 MiB of it."""
GROWTH_NBYTES = 400 << 20
"""Of resident memory, over all that follows."""
CALL_S = 60.0
SERVICES = ("encoder-1", "text-1", "router", "pool-manager")
PNG = (DIGITS / "9_c.png").read_bytes()
REFUSED = {
    "/triptych.v1.PoolManager/SetLimits": grpc.StatusCode.INVALID_ARGUMENT,
    "/triptych.v1.PoolManager/Roll": grpc.StatusCode.INVALID_ARGUMENT,
    f"/{SERVICE_NAME}/SetDegree": grpc.StatusCode.INVALID_ARGUMENT,
    "/triptych.v1.Instance/LoadLora": grpc.StatusCode.FAILED_PRECONDITION,
    "/triptych.v1.Instance/UnloadLora": grpc.StatusCode.NOT_FOUND,
    "/triptych.v1.Router/LoadLora": grpc.StatusCode.FAILED_PRECONDITION,
    "/triptych.v1.Router/UnloadLora": grpc.StatusCode.NOT_FOUND,
}
"""How good requests are refused: the member has no limits that can change, nothing starts instances, and there are no adapters."""
DEFECTS = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DEADLINE_EXCEEDED)
CHANNEL = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))

SAMPLING = common_pb2.SamplingParams(temperature=1, top_p=1, n=1, repetition_penalty=1, max_tokens=2, seed=1)
_numbers = count()


def encode_request() -> encoder_pb2.EncodeRequest:
    number = next(_numbers)
    info = common_pb2.MediaInfo(
        modality=common_pb2.MODALITY_IMAGE, format="png", nbytes=len(PNG), digest=digest_of(PNG), frames=1
    )
    info.width, info.height = (int.from_bytes(PNG[at : at + 4], "big") for at in (16, 20))
    return encoder_pb2.EncodeRequest(
        request_id=f"e{number}",
        model=MODEL_ID,
        media=PNG,
        info=info,
        tokens=1000,
        lease_s=5,
        reader_lease=number.to_bytes(16, "big"),
        router_lease=(2**64 + number).to_bytes(16, "big"),
    )


def text_request() -> text_pb2.TextRequest:
    return text_pb2.TextRequest(
        request_id=f"t{next(_numbers)}", model=MODEL_ID, token_ids=[5, 6, 7, 8], sampling=SAMPLING
    )


def exchange_request(carried: text_pb2.TextRequest) -> calls_pb2.CallRequests:
    start = calls_pb2.StartCall(
        method="/triptych.v1.Text/Generate",
        request=carried.SerializeToString(),
        timeout_s=CALL_S,
        metadata={"x-request-id": carried.request_id},
    )
    return calls_pb2.CallRequests(requests=[calls_pb2.CallRequest(call=1, start=start)])


def chat_request() -> router_pb2.ChatRequest:
    chat = router_pb2.ChatRequest(request_id=f"c{next(_numbers)}", model=MODEL_ID, sampling=SAMPLING)
    message = chat.messages.add(role=router_pb2.SPEAKER_ROLE_USER)
    message.parts.add().media.CopyFrom(router_pb2.MediaPart(modality=common_pb2.MODALITY_IMAGE, data=PNG))
    message.parts.add(text="What digit is it?")
    return chat


def resolve_request() -> router_pb2.ResolveRequest:
    media = router_pb2.MediaPart(modality=common_pb2.MODALITY_IMAGE, data=PNG)
    return router_pb2.ResolveRequest(request_id=f"r{next(_numbers)}", model=MODEL_ID, media=[media])


def report(instance_id: str = "somebody", port: int = 1) -> pool_manager_pb2.MemberReport:
    """A registration. The stream ends after it, so that another may follow."""
    registration = pool_manager_pb2.Registration(
        kind=pool_manager_pb2.MEMBER_KIND_INSTANCE,
        instance_id=instance_id,
        epoch=1,
        address=f"127.0.0.1:{port}",
        model=MODEL_ID,
        role=instance_pb2.ROLE_E,
        switchable=instance_pb2.ROLE_EPD,
        transports=["tcp"],
        slo=["ttft=5x"],
    )
    identity = instance_pb2.PartIdentity(
        part=instance_pb2.MODEL_PART_ENCODER,
        digest="0" * 64,
        stages=[instance_pb2.STAGE_ENCODE],
        dtype=common_pb2.DTYPE_F32,
        tensor_parallel=1,
        options={"threads": "1"},
    )
    registration.parts.add(identity=identity, max_batch=1)
    return pool_manager_pb2.MemberReport(registration=registration)


def size_request() -> pool_manager_pb2.SetSizeRequest:
    return pool_manager_pb2.SetSizeRequest(model=MODEL_ID, role=instance_pb2.ROLE_E, size=1, for_s=60)


@dataclass
class Port:
    """One service's gRPC port."""

    name: str
    pid: int
    channel: grpc.aio.Channel

    async def call(self, path: str, data: bytes, timeout_s: float = CALL_S) -> grpc.StatusCode:
        """The status of a call, of which at most one response is read. A response counts as OK."""
        if path.endswith(("ServerReflectionInfo", "PoolManager/Attend", "Calls/Exchange")):
            streams: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = self.channel.stream_stream(path)
            return await self._first(streams(iter([data]), timeout=timeout_s))
        stream: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = self.channel.unary_stream(path)
        return await self._first(stream(data, timeout=timeout_s))

    async def _first(self, answers: Any) -> grpc.StatusCode:
        try:
            async for _ in answers:
                return grpc.StatusCode.OK
        except grpc.aio.AioRpcError as error:
            code: grpc.StatusCode = error.code()
            return code
        finally:
            answers.cancel()
        return grpc.StatusCode.OK

    async def ask(self, path: str, request: Message, answer: Any) -> Any:
        method: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = self.channel.unary_unary(path)
        return answer.FromString(await method(request.SerializeToString(), timeout=CALL_S))


@asynccontextmanager
async def cluster_under_a_memory_limit() -> AsyncIterator[tuple[LocalCluster, dict[str, Port]]]:
    patient = ("--suspect-s", "3600", "--remove-s", "3600")
    async with LocalCluster(roles="E:1,PD:1", options={"pool_manager": patient}) as cluster:
        ports = {
            name: Port(name, cluster.processes[name], grpc.aio.insecure_channel(cluster.targets[name], CHANNEL))
            for name in SERVICES
        }
        try:
            for port in ports.values():
                await is_healthy(port)
                limit = psutil.Process(port.pid).memory_info().vms + ROOM_NBYTES
                resource.prlimit(port.pid, resource.RLIMIT_AS, (limit, limit))
            yield cluster, ports
        finally:
            for port in ports.values():
                await port.channel.close()


async def is_healthy(port: Port) -> None:
    """Whether a good request is answered as before."""
    match port.name:
        case "encoder-1":
            request, path = encode_request().SerializeToString(), "/triptych.v1.Encoder/Encode"
        case "text-1":
            request, path = text_request().SerializeToString(), "/triptych.v1.Text/Generate"
        case "scaler":
            request, path = b"", f"/{SERVICE_NAME}/Pools"
        case "pool-manager":
            request, path = report().SerializeToString(), "/triptych.v1.PoolManager/Attend"
        case _:
            request, path = chat_request().SerializeToString(), "/triptych.v1.Router/Chat"
    for asked, data in ((path, request), ("/grpc.health.v1.Health/Check", b"")):
        code = await port.call(asked, data)
        assert code is grpc.StatusCode.OK, f"{port.name}: a good {asked} is answered with {code}"


async def good_requests(cluster: LocalCluster, ports: dict[str, Port]) -> list[tuple[Port, str, Message]]:
    """Requests, one for every rpc of every service."""
    encoder, text, router, manager = (ports[name] for name in SERVICES)
    encoded = await encoder.ask("/triptych.v1.Encoder/Encode", encode_request(), encoder_pb2.EncodeResponse)
    ticket = encoded.ticket
    ticket.address = cluster.targets["encoder-1"]
    asked = chat_request()
    assert await router.call("/triptych.v1.Router/Chat", asked.SerializeToString()) is grpc.StatusCode.OK
    with_item = text_request()
    placeholder = await placeholder_id(router)
    with_item.token_ids[2:2] = [placeholder] * ticket.tokens
    with_item.placements.add(start=2, ticket=ticket)
    another = report("another", 2).SerializeToString()
    assert await manager.call("/triptych.v1.PoolManager/Attend", another) is grpc.StatusCode.OK
    lease = encoder_pb2.LeaseRequest(key=ticket.key, generation=ticket.generation, lease_s=3, lease_id=bytes(range(16)))
    own: list[tuple[Port, str, Message]] = [
        (encoder, "Instance/Describe", instance_pb2.DescribeRequest()),
        (encoder, "Encoder/Encode", encode_request()),
        (encoder, "Encoder/Lease", lease),
        (encoder, "Encoder/Release", encoder_pb2.ReleaseRequest(lease_ids=[bytes(16)])),
        (encoder, "Instance/WatchLoad", instance_pb2.WatchLoadRequest()),
        (text, "Instance/Describe", instance_pb2.DescribeRequest()),
        (text, "Text/Generate", with_item),
        (text, "Calls/Exchange", exchange_request(text_request())),
        (text, "Instance/WatchLoad", instance_pb2.WatchLoadRequest()),
        (text, "Instance/LoadLora", common_pb2.LoadLoraRequest(name="adapter", directory="adapter")),
        (text, "Instance/UnloadLora", common_pb2.UnloadLoraRequest(name="adapter")),
        (router, "Router/LoadLora", common_pb2.LoadLoraRequest(name="adapter", directory="adapter", parent=MODEL_ID)),
        (router, "Router/UnloadLora", common_pb2.UnloadLoraRequest(name="adapter")),
        (router, "Router/Chat", chat_request()),
        (router, "Router/Tokenize", router_pb2.TokenizeRequest(chat=chat_request())),
        (router, "Router/Models", router_pb2.ModelsRequest()),
        (router, "Router/GetTimeline", router_pb2.TimelineRequest(request_id=asked.request_id)),
        (router, "Router/Readiness", router_pb2.ReadinessRequest()),
        (router, "Router/Resolve", resolve_request()),
        (manager, "PoolManager/Attend", report()),
        (manager, "PoolManager/Watch", pool_manager_pb2.WatchRequest(kinds=[pool_manager_pb2.MEMBER_KIND_INSTANCE])),
        (manager, "PoolManager/Status", pool_manager_pb2.StatusRequest()),
        (manager, "PoolManager/Drain", pool_manager_pb2.DrainRequest(instance_id="another")),
        (
            manager,
            "PoolManager/Switch",
            pool_manager_pb2.SwitchRequest(instance_id="somebody", role=instance_pb2.ROLE_E),
        ),
        (manager, "PoolManager/SetSize", size_request()),
        (
            manager,
            "PoolManager/SetLimits",
            pool_manager_pb2.SetLimitsRequest(
                instance_id="somebody", limits=instance_pb2.InstanceLimits(max_batch_items=2)
            ),
        ),
        (
            manager,
            "PoolManager/Roll",
            pool_manager_pb2.RollRequest(model=MODEL_ID, role=instance_pb2.ROLE_E, degree=2),
        ),
    ]
    reflected = reflection_pb2.ServerReflectionRequest(file_containing_symbol="triptych.v1.Text")
    return [
        *((port, f"/triptych.v1.{path}", message) for port, path, message in own),
        (text, "/grpc.health.v1.Health/Check", health_pb2.HealthCheckRequest(service="triptych.v1.Text")),
        (text, "/grpc.health.v1.Health/Watch", health_pb2.HealthCheckRequest(service="triptych.v1.Text")),
        (text, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", reflected),
    ]


@asynccontextmanager
async def scaler_requests() -> AsyncIterator[list[tuple[Port, str, Message]]]:
    """Requests, one for every rpc of a scaler, which serves in this process."""
    register = ScalerServicer(NoScaler()).register
    async with RpcServer(host="127.0.0.1", port=0, service_names=(SERVICE_NAME,), register=register) as server:
        port = Port("scaler", os.getpid(), grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", CHANNEL))
        pool = scaler_pb2.PoolName(model=MODEL_ID, role=instance_pb2.ROLE_E)
        yield [
            (port, f"/{SERVICE_NAME}/Scale", scaler_pb2.ScaleRequest(pool=pool, size=1, token=2**64 - 1)),
            (port, f"/{SERVICE_NAME}/Remove", scaler_pb2.RemoveRequest(pool=pool, instance="e", token=2**64 - 1)),
            (port, f"/{SERVICE_NAME}/SetDegree", scaler_pb2.SetDegreeRequest(pool=pool, degree=2, token=2**64 - 1)),
            (port, f"/{SERVICE_NAME}/Pools", scaler_pb2.PoolsRequest()),
        ]
        await port.channel.close()


async def placeholder_id(router: Port) -> int:
    """The item's placeholder in the prompt: its most frequent token."""
    chat = chat_request()
    answer = await router.ask(
        "/triptych.v1.Router/Tokenize", router_pb2.TokenizeRequest(chat=chat), router_pb2.TokenizeResponse
    )
    ids: list[int] = list(answer.token_ids)
    return max(ids, key=ids.count)


async def test_no_mutated_request_affects_an_instance() -> None:
    async with cluster_under_a_memory_limit() as (cluster, ports), scaler_requests() as of_scaler:
        before = resident(ports)
        faults: list[str] = []
        requests = [*await good_requests(cluster, ports), *of_scaler]
        assert REQUESTS.keys() <= {path for _, path, _ in requests}
        for port, path, good in requests:
            wanted = REFUSED.get(path, grpc.StatusCode.OK)
            assert await port.call(path, good.SerializeToString()) is wanted, f"{path} of a good request"
            for what, data in mutations(good, seed=7):
                code = await port.call(path, data)
                if code in DEFECTS:
                    faults.append(f"{path}, {what}: {code.name}")
                assert psutil.pid_exists(port.pid), f"{path}, {what}: the process died"
            await is_healthy(port)
        growth = {name: now - before[name] for name, now in resident(ports).items()}
        assert not faults, "\n".join(faults)
        assert max(growth.values()) < GROWTH_NBYTES, growth
        assert {name: pid for name, pid in cluster.processes.items() if not psutil.pid_exists(pid)} == {}


def resident(ports: dict[str, Port]) -> dict[str, int]:
    """Bytes of memory, by service."""
    return {name: psutil.Process(port.pid).memory_info().rss for name, port in ports.items()}


async def test_random_bytes_on_any_port_affect_no_process() -> None:
    async with cluster_under_a_memory_limit() as (_, ports):
        before = resident(ports)
        rng = random.Random(7)
        doors = [
            (port, family, address)
            for port in ports.values()
            for family, address in await asyncio.to_thread(listening, port.pid)
        ]
        assert len(doors) > len(ports), "data planes listen as well"
        for port, family, address in doors:
            for data in garbage(rng):
                await asyncio.to_thread(throw, family, address, data)
            await is_healthy(port)
        growth = {name: now - before[name] for name, now in resident(ports).items()}
        assert max(growth.values()) < GROWTH_NBYTES, growth


def garbage(rng: random.Random) -> Iterator[bytes]:
    for nbytes in (0, 1, 16, 40, 1000, 1 << 20):
        yield rng.randbytes(nbytes)
    yield b"\x00" * (1 << 16)
    yield b"\xff" * (1 << 16)
    yield b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * 100
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    yield preface + rng.randbytes(1 << 16)
    yield preface + b"\xff\xff\xff\x00\x00\x00\x00\x00\x00" * 100
    yield b"TRPQ" + rng.randbytes(36)
    yield (b"TRPQ" + b"\x01\x00\x00\x00" + bytes(16) + b"\xff" * 16) * 1000
    yield (b"TRPQ" + b"\x01\x00\x00\x00" + rng.randbytes(32)) * 1000


def listening(pid: int) -> list[tuple[int, Any]]:
    """Every address that accepts connections: TCP ports, and sockets in the abstract namespace."""
    process = psutil.Process(pid)
    found: list[tuple[int, Any]] = [
        (socket.AF_INET, (connection.laddr.ip, connection.laddr.port))
        for connection in process.net_connections("inet4")
        if connection.status == psutil.CONN_LISTEN
    ]
    own = {path.readlink().name for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()}
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        *_, inode, name = line.split() if "@" in line else ("", "", "")
        if f"socket:[{inode}]" in own and name.startswith("@triptych"):
            found.append((socket.AF_UNIX, b"\0" + name[1:].encode()))
    return sorted(set(found), key=str)


def throw(family: int, address: Any, data: bytes) -> None:
    """Sends as much as is accepted, then closes; a response is not required."""
    with socket.socket(family, socket.SOCK_STREAM) as thrown:
        thrown.settimeout(5)
        with contextlib.suppress(OSError):  # the connection was closed, or the server waits for more
            thrown.connect(address)
            thrown.sendall(data)
            thrown.shutdown(socket.SHUT_WR)
            thrown.settimeout(0.2)
            thrown.recv(1 << 16)
