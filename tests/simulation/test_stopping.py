"""A client that leaves, or a deadline that passes, stops a request wherever it is: nothing of it is left 100 ms and one engine
step later, and no work is begun for it any more. The real services under virtual time.
"""

import asyncio
from base64 import b64encode
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
from _pytest.mark.structures import ParameterSet

from tests.router_client import LocalRouter
from tests.simulation.cluster import SimCluster, World
from tests.simulation.test_cluster import check_right, now_s, simulate
from tests.simulation.test_ordering import asked
from tests.simulation.workload import Ask, Reply, play
from triptych.client import AsyncClient, user
from triptych.domain.chat import ChatRequest, TextPart
from triptych.domain.embedding import Ticket
from triptych.domain.encoding import EncodeRequest, EncodeResult
from triptych.domain.generation import ChatEvent
from triptych.domain.instance import ModelInfo
from triptych.domain.kv_segment import KvSegment
from triptych.domain.stage import Stage
from triptych.errors import DeadlineExceeded, Overloaded
from triptych.machine.encoder.batch_queue import BatchLimits
from triptych.machine.router.request import RequestPhase
from triptych.policy.policies import PolicyNames
from triptych.rpc.routers import Routers
from triptych.services.encoder.file_tier import READ_PATIENCE_S
from triptych.services.gateway.app import remote_media
from triptych.services.gateway.keys import KeyRing
from triptych.services.gateway.routes import create_app
from triptych.services.gateway.service import Gateway
from triptych.services.gateway.settings import GatewaySettings
from triptych.services.router.prepare import Prompted
from triptych.services.router.service import RouterService
from triptych.virtual.offload import InlineOffload, spend

STOPS_WITHIN_S = 0.1
SENT_S = 0.5
"""When the request is sent, after the one that it waits for."""
STOPPED_S = 0.5
"""When its client leaves, or its deadline is."""
PULL_S = 5.0
PATIENT_S = 300.0
SIDE_PX, ITEM_BYTES = 224, 256 * 8 * 4
"""An image, and its embedding in the fake model."""


BLOCKED_S = 2.0
"""Work of a thread that nothing interrupts. Processes that decode are killed instead."""
APART = {"texts": 0, "prefills": 1, "decodes": 1}


async def slow_pull(reader: str, ticket: Ticket) -> None:
    del reader, ticket
    await asyncio.sleep(PULL_S)


@dataclass(frozen=True)
class Place:
    """Where a request is at ``STOPPED_S``. One that it waits for was sent before it, if ``behind``; ``step_s`` is the longest
    engine step, in which nothing can be stopped.
    """

    is_there: Callable[[SimCluster, RequestPhase], bool]
    setup: Callable[[SimCluster], None] = lambda cluster: None
    world: dict[str, Any] = field(default_factory=dict)
    images: int = 1
    behind: bool = False
    encodes: int = 0
    """Items that are encoded in all, then and afterwards."""
    step_s: float = 0.0
    prefill_token_s: float = 0.00005
    for_deadlines: bool = True
    """Whether a deadline can pass there: a pause that would outlast it ends the request at once."""


def text_load(cluster: SimCluster, stage: Stage, at: int = 0) -> int:
    return cluster.texts[at].service.load().at(stage).pending


def items(cluster: SimCluster) -> int:
    return cluster.encoders[0].service.load().at(Stage.ENCODE).pending


def prepares_slowly(cluster: SimCluster) -> None:
    prepare = cluster.router._prepare

    def slow(request: ChatRequest, model: ModelInfo) -> Prompted:
        spend(BLOCKED_S)
        return prepare(request, model)

    cluster.router._prepare = slow  # type: ignore[assignment]


def preprocesses_slowly(cluster: SimCluster) -> None:
    cluster.encoders[0].engine.prepare_s = BLOCKED_S


def refuses(cluster: SimCluster) -> None:
    async def encode(request: EncodeRequest) -> EncodeResult:
        raise Overloaded("the encoder's queue is full")

    cluster.encoders[0].service.encode = encode  # type: ignore[method-assign]


def reads_slowly(cluster: SimCluster) -> None:
    """Longer than an item waits for its file."""
    files = cluster.encoders[0].service._files
    assert files is not None
    read = files._files.read

    def slow(key: bytes, most_nbytes: int) -> Any:
        spend(READ_PATIENCE_S + 1)
        return read(key, most_nbytes)

    files._files.read = slow  # type: ignore[method-assign]


def prefills_at_once(cluster: SimCluster) -> None:
    cluster.texts[0].engine.step_s = 0.001


def copies_slowly(cluster: SimCluster) -> None:
    """Keys and values, in the engine's thread."""
    engine = cluster.texts[0].engine
    pack = engine.kv.pack

    def slow(request_id: str, choice: int, segment: KvSegment, memory: memoryview) -> bool:
        spend(BLOCKED_S)
        return pack(request_id, choice, segment, memory)

    engine.kv.pack = slow  # type: ignore[method-assign]


PLACES = {
    "preparation": Place(
        lambda cluster, phase: phase is RequestPhase.PREPARING,
        prepares_slowly,
        world={"router": {"prepare_inline_chars": 0}},  # in a thread
    ),
    "preprocessing": Place(
        lambda cluster, phase: phase is RequestPhase.ENCODING and items(cluster) == 1,
        preprocesses_slowly,
        step_s=BLOCKED_S,
    ),
    "file tier": Place(
        lambda cluster, phase: phase is RequestPhase.ENCODING and bool(cluster.encoders[0].service._files._reads),  # type: ignore[union-attr]
        reads_slowly,
        {"encoder": {"embedding_files": Path("kept"), "embedding_files_bytes": 1 << 20}},
    ),
    "pause": Place(
        lambda cluster, phase: phase is RequestPhase.ENCODING and items(cluster) == 0,
        refuses,
        {"router": {"attempts": {"arena_retry_s": 1.0}}},
        for_deadlines=False,
    ),
    "KV memory": Place(
        lambda cluster, phase: cluster.router.cluster.machine.waiting_for_kv == 1,
        prefills_at_once,
        {**APART, "kv_tokens": 60, "text_step_s": 0.15},
        images=0,
        behind=True,
        step_s=0.15,
    ),
    "KV transfer": Place(
        lambda cluster, phase: phase is RequestPhase.STREAMING and bool(cluster.texts[0].store.memory.leased_bytes),  # type: ignore[union-attr]
        copies_slowly,
        APART,
        images=0,
        step_s=BLOCKED_S,
    ),
    "pull of KV": Place(
        lambda cluster, phase: text_load(cluster, Stage.DECODE, 1) == 1,
        world={**APART, "before_pull": slow_pull},
        images=0,
    ),
    "router queue": Place(
        lambda cluster, phase: phase is RequestPhase.WAITING,
        world={"encoder_arena_bytes": ITEM_BYTES + 1024, "before_pull": slow_pull},
        behind=True,
        encodes=1,
    ),
    "encoder queue": Place(
        lambda cluster, phase: phase is RequestPhase.ENCODING and items(cluster) == 2,
        world={"encode_token_s": 0.008},
        behind=True,
        encodes=1,
    ),
    "batch": Place(
        lambda cluster, phase: phase is RequestPhase.ENCODING and items(cluster) == 1,
        world={"encode_token_s": 0.004},
        step_s=1.1,
        encodes=1,
    ),
    "pull": Place(
        lambda cluster, phase: phase is RequestPhase.DISPATCHING and text_load(cluster, Stage.PREFILL) == 1,
        world={"before_pull": slow_pull},
        encodes=1,
    ),
    "engine queue": Place(
        lambda cluster, phase: cluster.texts[0].engine.waiting != frozenset(),
        world={"max_running": 1, "text_step_s": 0.2},
        images=0,
        behind=True,
        step_s=0.2,
    ),
    "prefill": Place(
        lambda cluster, phase: phase is RequestPhase.DISPATCHING and not cluster.texts[0].engine.waiting,
        images=0,
        step_s=1.0,
        prefill_token_s=0.1,
    ),
    "decode": Place(
        lambda cluster, phase: phase is RequestPhase.STREAMING,
        world={"text_step_s": 0.15},
        images=0,
        step_s=0.15,
    ),
}


def counts(cluster: SimCluster) -> dict[str, int]:
    """What is held, but for tokens, which a request that goes on uses up, and sequences, as an engine may have computed them before their answers
    have been sent.
    """
    held = cluster.held().items()
    return {name: number for name, number in held if "tokens" not in name and "sequences" not in name}


class Caller(LocalRouter):
    """A router in the same process, for gateways and clients of the SDK."""

    continues = connected = True
    refused = False

    def __init__(self, service: RouterService) -> None:
        self.service = service

    async def chat(self, request: ChatRequest) -> AsyncGenerator[Sequence[ChatEvent]]:
        async with aclosing(self.service.chat(request)) as answer:
            async for events in answer:
                yield events


async def routers_of(cluster: SimCluster) -> Routers:
    routers = Routers(lambda _: Caller(cluster.router), Random(1))
    routers.use(["router"])
    await routers.ask()
    return routers


def text_of(request: ChatRequest) -> str:
    (text,) = [part.text for part in request.messages[0].parts if isinstance(part, TextPart)]
    return text


async def by_router(cluster: SimCluster, request: ChatRequest) -> None:
    async with aclosing(cluster.router.chat(request)) as answer:
        async for _ in answer:
            pass


async def by_sdk(cluster: SimCluster, request: ChatRequest) -> None:
    images, sampling = [part.data for part in request.media], request.sampling
    async with AsyncClient(await routers_of(cluster), model=request.model) as client:
        await client.chat(
            [user(text_of(request), images)], temperature=0, max_tokens=sampling.max_tokens, timeout_s=request.timeout_s
        )


async def by_gateway(cluster: SimCluster, request: ChatRequest) -> None:
    settings = GatewaySettings()
    gateway = Gateway(
        await routers_of(cluster),
        InlineOffload(),
        settings,
        now_s,
        keys=KeyRing.load(None, now_s),
        media=remote_media(settings),
    )
    urls = [f"data:image/png;base64,{b64encode(part.data).decode()}" for part in request.media]
    content: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    body = {
        "model": request.model,
        "messages": [{"role": "user", "content": [*content, {"type": "text", "text": text_of(request)}]}],
        "temperature": 0,
        "max_tokens": request.sampling.max_tokens,
    }
    transport = httpx.ASGITransport(create_app(gateway, clock=now_s))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        headers = {"x-request-timeout": str(request.timeout_s)}
        response = await client.post("/v1/chat/completions", json=body, headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (504, DeadlineExceeded.code)
    raise DeadlineExceeded(response.json()["error"]["message"])


Through = Callable[[SimCluster, ChatRequest], Awaitable[None]]


async def reply_to(through: Through, cluster: SimCluster, ask: Ask) -> Reply:
    reply = Reply(ask)
    try:
        async with asyncio.timeout(ask.leave_after_s):
            await through(cluster, ask.request)
    except TimeoutError:
        reply.left = True
    except DeadlineExceeded as error:
        reply.error = error
    reply.ended_s = now_s()
    return reply


SURFACES = (by_router, by_sdk, by_gateway)


def cases() -> Iterator[ParameterSet]:
    """Each end at each place through each surface; those but one of the surfaces, in turn, are ``extended``."""
    ends = [
        (name, leaves) for name, place in PLACES.items() for leaves in (True, False) if leaves or place.for_deadlines
    ]
    for number, (name, leaves) in enumerate(ends):
        for through in SURFACES:
            marks = () if SURFACES[number % len(SURFACES)] is through else pytest.mark.extended
            end = "the client leaves" if leaves else "the deadline passes"
            yield pytest.param(name, leaves, through, id=f"{name}-{end}-{through.__name__}", marks=marks)


@pytest.mark.parametrize(("name", "leaves", "through"), list(cases()))
def test_a_request_stops_within_100_ms_and_one_engine_step(
    name: str, leaves: bool, through: Through, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = PLACES[name]
    monkeypatch.chdir(tmp_path)
    first = asked("first", sides_px=(SIDE_PX,) * place.images, timeout_s=PATIENT_S, seed=1)
    ask = asked("stopped", sides_px=(SIDE_PX,) * place.images, timeout_s=PATIENT_S, seed=2)
    if leaves:
        ask = replace(ask, leave_after_s=STOPPED_S)
    else:
        ask = replace(ask, request=replace(ask.request, timeout_s=STOPPED_S))

    async def scenario(cluster: SimCluster) -> None:
        cluster.texts[0].engine.prefill_token_s = place.prefill_token_s
        place.setup(cluster)
        async with asyncio.TaskGroup() as group:
            others = group.create_task(play(cluster.router, [first] if place.behind else []))
            await asyncio.sleep(SENT_S)
            before, began_s = counts(cluster), now_s()
            playing = group.create_task(reply_to(through, cluster, ask))
            await asyncio.sleep(STOPPED_S - 0.01)
            tasks = cluster.router._requests
            (task,) = [running for running in tasks if running.request.request_id != first.request.request_id]
            assert place.is_there(cluster, task.machine.phase), (task.machine.phase, cluster.held())
            await asyncio.sleep(began_s + STOPPED_S + STOPS_WITHIN_S + place.step_s - now_s())
            assert counts(cluster) == before
            reply = playing.result()
            assert reply.left if leaves else isinstance(reply.error, DeadlineExceeded), reply
            assert reply.ended_s <= began_s + STOPPED_S + STOPS_WITHIN_S
            await others
        check_right(others.result())
        await asyncio.sleep(PATIENT_S)
        assert cluster.encoders[0].engine.encoded_items == place.encodes

    world = World(
        seed=9,
        encoders=1,
        encoder={"batches": BatchLimits(max_batch_items=1), **place.world.get("encoder", {})},
        router={"policies": PolicyNames(deadlines="admit"), **place.world.get("router", {})},
        **{name: value for name, value in place.world.items() if name not in ("encoder", "router")},
    )
    simulate(world, scenario)
