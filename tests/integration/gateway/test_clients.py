"""Client behaviour beyond plain answers (``tests/e2e/test_clients.py``): usage, schemas, refusals by name."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI

from tests.e2e.reference import Question, answer
from triptych.cli.cluster import LocalCluster
from triptych.demo import MODEL_ID

pytestmark = [pytest.mark.timeout(180), pytest.mark.asyncio(loop_scope="module")]

SEEN = Question("What digits are shown?", ("3_a", "1_a"))
SCHEMA = {
    "type": "object",
    "properties": {"digit": {"enum": [1, 2]}},
    "required": ["digit"],
    "additionalProperties": False,
}


ASK: dict[str, Any] = SEEN.body()
CONTENT: list[Any] = ASK["messages"][0]["content"]
TO_THE_POINT: dict[str, Any] = {"frequency_penalty": 2.0, "max_tokens": 120}
"""JSON may have any number of spaces, and the demo model likes them."""
RIGHT = answer(SEEN).text


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    async with LocalCluster(roles="E:1,PD:1", log_dir=tmp_path_factory.mktemp("logs")) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def client(cluster: LocalCluster) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        openai.DefaultAsyncHttpxClient(trust_env=False) as http,
        openai.AsyncOpenAI(base_url=cluster.url + "/v1", api_key="none", http_client=http, max_retries=0) as made,
    ):
        yield made


async def test_the_official_client_can_ask_about_images(client: openai.AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(**ASK)
    assert whole.choices[0].message.content == RIGHT
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == answer(SEEN).prompt_tokens
    stream = await client.chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == RIGHT
    assert chunks[-1].usage == whole.usage


async def test_the_official_client_gets_answers_of_a_schema(client: openai.AsyncOpenAI) -> None:
    got = await client.chat.completions.create(
        **{**ASK, **TO_THE_POINT},
        response_format={"type": "json_schema", "json_schema": {"name": "digit", "schema": SCHEMA, "strict": True}},
    )
    assert json.loads(got.choices[0].message.content or "")["digit"] in (1, 2)
    with pytest.raises(openai.BadRequestError):
        await client.chat.completions.create(
            **ASK, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no"}}}
        )


async def test_the_official_client_raises_its_own_errors(client: openai.AsyncOpenAI) -> None:
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(**ASK, tools=tools)
    assert refused.value.param == "tools"
    audio: Any = [{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}]
    with pytest.raises(openai.BadRequestError, match="the model takes images, not audio") as deaf:
        await client.chat.completions.create(model=MODEL_ID, messages=[{"role": "user", "content": audio}])
    assert deaf.value.param == "messages[0].content[0].input_audio.data"
    with pytest.raises(openai.NotFoundError):
        await client.chat.completions.create(**{**ASK, "model": "other"})


async def test_tokenize_counts_the_positions_of_images(cluster: LocalCluster) -> None:
    async with httpx.AsyncClient(base_url=cluster.url, trust_env=False, timeout=60) as rest:
        got = (await rest.post("/tokenize", json={"messages": ASK["messages"]})).json()
    assert got["count"] == len(got["tokens"]) == answer(SEEN).prompt_tokens


async def test_langchain_gets_structured_answers(cluster: LocalCluster) -> None:
    async with openai.DefaultAsyncHttpxClient(trust_env=False) as http:
        model = ChatOpenAI(
            model=MODEL_ID,
            base_url=cluster.url + "/v1",
            api_key="none",  # type: ignore[arg-type]
            temperature=0,
            max_retries=0,
            max_completion_tokens=TO_THE_POINT["max_tokens"],
            http_async_client=http,
        )
        model.frequency_penalty = TO_THE_POINT["frequency_penalty"]
        held = model.with_structured_output({"title": "digit", **SCHEMA}, method="json_schema")
        assert (await held.ainvoke([HumanMessage(content=CONTENT)]))["digit"] in (1, 2)
