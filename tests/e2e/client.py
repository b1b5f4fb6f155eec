"""Clients of a cluster of real processes: REST, and gRPC where token ids matter."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

import httpx

from tests.e2e.reference import DIGITS, Question, answer, questions
from triptych.cli.cluster import LocalCluster
from triptych.demo import MODEL_ID
from triptych.domain.chat import ChatRequest, MediaPart, Message, TextPart
from triptych.domain.generation import ChatFinished, ChoiceFinished, TokenChunk
from triptych.domain.media import Modality
from triptych.domain.sampling import SamplingParams
from triptych.rpc.stubs import RouterStub

REST_TIMEOUT_S = 100.0


@dataclass(frozen=True)
class Streamed:
    """The events of a request's stream."""

    token_ids: tuple[int, ...]
    text: str
    finished: ChatFinished


def rest(url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=200)
    return httpx.AsyncClient(base_url=url, timeout=REST_TIMEOUT_S, limits=limits, trust_env=False)


async def post(client: httpx.AsyncClient, body: dict[str, Any]) -> httpx.Response:
    return await client.post("/v1/chat/completions", json=body)


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, f"{response.status_code}: {response.text}"
    text: str = response.json()["choices"][0]["message"]["content"]
    return text


class Refused(Exception):
    """A clear error instead of an answer, or within its stream: the API's code and message. ``code`` is empty if it has none."""

    def __init__(self, said: str) -> None:
        super().__init__(said)
        try:
            self.code = str(json.loads(said)["error"]["code"])
        except (ValueError, KeyError, TypeError):
            self.code = ""


async def asked(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> str:
    """The text of a whole answer, which is streamed if the body says so. Raises Refused, and AssertionError for a stream that
    ends without an end.
    """
    url = f"{url}/v1/chat/completions"
    if not body.get("stream"):
        response = await client.post(url, json=body)
        if response.status_code != httpx.codes.OK:
            raise Refused(response.text)
        return text_of(response)
    text, data = "", ""
    async with client.stream("POST", url, json=body) as response:
        if response.status_code != httpx.codes.OK:
            raise Refused((await response.aread()).decode())
        async for line in response.aiter_lines():
            if line.startswith("data: ") and data != "[DONE]":
                data = line.removeprefix("data: ")
                if '"error"' in data:
                    raise Refused(data)
                if data != "[DONE]":
                    text += json.loads(data)["choices"][0]["delta"].get("content") or ""
    assert data == "[DONE]", f"the stream ended after {text!r}"
    return text


PROBER = """
import http.client, select, sys, time
while not select.select([sys.stdin], [], [], 0.02)[0]:
    began = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]))
    connection.request("GET", "/health")
    assert connection.getresponse().status == 200
    print(time.perf_counter() - began)
    connection.close()
"""


@asynccontextmanager
async def probed(cluster: LocalCluster) -> AsyncIterator[list[float]]:
    """A process that asks the gateway for ``/health`` about every 20 ms; at the end the seconds that each answer took."""
    port = cluster.targets["gateway"].rpartition(":")[2]
    prober = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROBER, port, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    took_s: list[float] = []
    try:
        yield took_s
    finally:
        out, _ = await prober.communicate(b"")
    assert prober.returncode == 0
    took_s += map(float, out.split())


async def timeline_of(client: httpx.AsyncClient, response: httpx.Response) -> dict[str, Any]:
    found = await client.get(f"/v1/requests/{response.headers['x-request-id']}/timeline")
    assert found.status_code == 200, found.text
    timeline: dict[str, Any] = found.json()
    return timeline


async def stream(router: RouterStub, request_id: str, question: Question) -> Streamed:
    """Calls the router by gRPC."""
    images = (MediaPart(Modality.IMAGE, (DIGITS / f"{name}.png").read_bytes()) for name in question.images)
    message = Message("user", (*images, TextPart(question.text)))
    return await stream_message(router, request_id, MODEL_ID, message, question.max_tokens)


async def stream_message(
    router: RouterStub, request_id: str, model: str, message: Message, max_tokens: int
) -> Streamed:
    """Calls the router by gRPC, greedy."""
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens)
    token_ids: tuple[int, ...] = ()
    text = ""
    finished = None
    async with aclosing(router.chat(ChatRequest(request_id, model, (message,), sampling))) as stream:
        async for events in stream:
            for event in events:
                match event:
                    case TokenChunk():
                        token_ids += event.token_ids
                        text += event.text
                    case ChoiceFinished():
                        pass
                    case ChatFinished():
                        finished = event
    assert finished is not None, f"{request_id} has no end"
    return Streamed(token_ids, text, finished)


@asynccontextmanager
async def load(
    router: RouterStub, *, max_tokens: int = 40, whole: str | None = None
) -> AsyncIterator[list[tuple[Question, asyncio.Task[Streamed]]]]:
    """Requests all the time; every one must be answered right. ``whole``: the answer of engines that sleep, to all questions."""
    sent: list[tuple[Question, asyncio.Task[Streamed]]] = []
    async with asyncio.TaskGroup() as group:

        async def ask() -> None:
            for number, each in enumerate(cycle(questions((1, 2, 4), 24))):
                question = replace(each, max_tokens=max_tokens)
                sent.append((question, group.create_task(stream(router, f"r{number}", question))))
                await asyncio.sleep(0.2)

        asking = group.create_task(ask())
        yield sent
        asking.cancel()
    assert sent
    for question, task in sent:
        assert task.result().text == (answer(question).text if whole is None else whole)
