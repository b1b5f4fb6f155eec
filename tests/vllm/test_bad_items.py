"""A cluster with vLLM whose encoder says something wrong of one item: that request fails, and nothing else.

The encoder is a real one behind a relay, which changes the tickets of one image.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import pytest_asyncio

from tests.e2e.client import post, rest, text_of
from tests.e2e.reference import DIGITS, Question, answer
from tests.vllm.test_cluster import ENGINES
from triptych.cli import ports
from triptych.cli.cluster import LocalCluster
from triptych.domain.embedding import Ticket, payload_nbytes
from triptych.domain.encoding import EncodeRequest, EncodeResult
from triptych.rpc import instance
from triptych.rpc.encoder import SERVICE_NAME, EncoderServicer
from triptych.rpc.instance import InstanceServicer
from triptych.rpc.server import RpcServer
from triptych.rpc.stubs import InstanceStub

pytestmark = [pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]

OTHERS = 100
TEXT = Question("Hello!")
TWO = Question("What digits are shown?", ("4_a", "9_b"))
Change = Callable[[Ticket], Ticket]


@dataclass
class Relay:
    """``ports.Encoder``: what the real encoder says, but for the tickets of the images in ``changes``, by their bytes."""

    real: InstanceStub
    changes: dict[bytes, Change] = field(default_factory=dict)
    once: bool = False
    """Whether a change is made of one encoding only."""
    awaited: dict[bytes, asyncio.Event] = field(default_factory=dict)
    """What it waits for before it answers, by the bytes of the image."""
    changed: int = 0

    async def encode(self, request: EncodeRequest) -> EncodeResult:
        result = await self.real.encode(request)
        if (event := self.awaited.get(request.media)) is not None:
            await event.wait()
        change = self.changes.pop(request.media, None) if self.once else self.changes.get(request.media)
        if change is None:
            return result
        self.changed += 1
        return replace(result, ticket=change(result.ticket))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


@dataclass
class Served:
    cluster: LocalCluster
    relay: Relay


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    (port,) = ports.free(1, ())
    flags = {**ENGINES["vllm"], "encoder": ("--advertise", ports.address(port))}
    cluster = LocalCluster(
        "demo", roles="E:1,PD:1", options=flags, log_dir=tmp_path_factory.mktemp("logs"), restart=True
    )
    relay = Relay(InstanceStub(cluster.targets["encoder-1"]))
    service: Any = relay

    def register(server: Any) -> None:
        InstanceServicer(service).register(server)
        EncoderServicer(service).register(server)

    names = (SERVICE_NAME, instance.SERVICE_NAME)
    async with RpcServer(host=ports.HOST, port=port, service_names=names, register=register), cluster:
        yield Served(cluster, relay)
    await relay.real.close()


def of_half_the_width(ticket: Ticket) -> Ticket:
    tensors = tuple(replace(tensor, shape=(*tensor.shape[:-1], tensor.shape[-1] // 2)) for tensor in ticket.tensors)
    return replace(ticket, tensors=tensors, payload_nbytes=payload_nbytes(tensors))


def of_another_length(ticket: Ticket) -> Ticket:
    tensors = tuple(replace(tensor, shape=(tensor.shape[0] - 1, *tensor.shape[1:])) for tensor in ticket.tensors)
    return replace(ticket, tokens=ticket.tokens - 1, tensors=tensors, payload_nbytes=payload_nbytes(tensors))


def gone(ticket: Ticket) -> Ticket:
    """Of an embedding whose slot has another by now, as the reader of the slot will see."""
    return replace(ticket, generation=ticket.generation - 1)


@pytest.mark.parametrize(
    ("change", "image", "failed", "told", "encodes"),
    [
        # The router sees it, and there is no other encoder.
        pytest.param(
            of_half_the_width,
            "3_a",
            (500, "internal_error"),
            r"encoder encoder-1 returned tensors of another form than the item's",
            1,
            id="of another width",
        ),
        pytest.param(
            of_another_length,
            "5_c",
            (500, "internal_error"),
            r"encoder encoder-1 returned .*",
            1,
            id="of another length",
        ),
        pytest.param(
            gone,
            "7_b",
            (503, "transfer_failed"),
            r"generation \d+ of the embedding is no longer in its slot",
            2,
            id="gone after its check",
        ),
    ],
)
async def test_a_request_with_a_bad_item_fails_and_a_hundred_others_succeed(
    served: Served, change: Change, image: str, failed: tuple[int, str], told: str, encodes: int
) -> None:
    bad = Question("What digits are shown?", (image,))
    others = [TWO if number % 5 == 0 else TEXT for number in range(OTHERS)]
    engine = served.cluster.processes["text-1"]
    media = (DIGITS / f"{image}.png").read_bytes()
    before, served.relay.changes[media] = served.relay.changed, change
    async with rest(served.cluster.url) as client, asyncio.TaskGroup() as group:
        lost = group.create_task(post(client, bad.body()))
        asked = [group.create_task(post(client, question.body())) for question in others]
    error = lost.result().json()["error"]
    assert (lost.result().status_code, error["code"]) == failed
    assert re.fullmatch(told, error["message"])
    assert served.relay.changed - before >= encodes
    assert [text_of(task.result()) for task in asked] == [answer(question).text for question in others]

    del served.relay.changes[media]
    async with rest(served.cluster.url) as client:
        assert text_of(await post(client, bad.body())) == answer(bad).text
    assert served.cluster.processes["text-1"] == engine


async def test_an_item_that_is_gone_once_is_encoded_again_for_its_request(served: Served) -> None:
    question = Question("What digits are shown?", ("8_c",))
    media = (DIGITS / "8_c.png").read_bytes()
    before, served.relay.changes[media], served.relay.once = served.relay.changed, gone, True
    async with rest(served.cluster.url) as client:
        assert text_of(await post(client, question.body())) == answer(question).text
    served.relay.once = False
    assert served.relay.changed - before == 1


async def test_an_item_that_is_late_holds_back_its_request_alone(served: Served) -> None:
    late = Question("What digits are shown?", ("6_c",))
    media = (DIGITS / "6_c.png").read_bytes()
    served.relay.awaited[media] = others_answered = asyncio.Event()
    async with rest(served.cluster.url) as client, asyncio.TaskGroup() as group:
        waiting = group.create_task(post(client, late.body()))
        for question in (TEXT, TWO):
            assert text_of(await post(client, question.body())) == answer(question).text
        assert not waiting.done()
        others_answered.set()
    assert text_of(waiting.result()) == answer(late).text
