"""Unmodified third-party clients: OpenAI's, LangChain's on top of it, and Anthropic's."""

import json
from base64 import b64encode
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
import pytest_asyncio
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI

from tests.e2e import reference
from tests.e2e.reference import DIGITS, Question
from triptych.cli.cluster import LocalCluster
from triptych.demo import MODEL_ID
from triptych.services.gateway.keys import new_key

on_the_modules_loop = pytest.mark.asyncio(loop_scope="module")

_KEY, _ENTRY = new_key("clients")
QUESTION = "What digits are shown?"


def image(name: str) -> dict[str, Any]:
    data = b64encode((DIGITS / f"{name}.png").read_bytes()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}", "detail": "auto"}}


CONTENT: list[Any] = [image("3_a"), image("7_a"), {"type": "text", "text": QUESTION}]
MESSAGES: list[Any] = [{"role": "user", "content": CONTENT}]
ASKED: dict[str, Any] = {"model": MODEL_ID, "messages": MESSAGES, "temperature": 0, "max_completion_tokens": 32}
PROMPT_TOKENS = reference.answer(Question(QUESTION, ("3_a", "7_a"))).prompt_tokens
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"digit": {"enum": [1, 2]}},
    "required": ["digit"],
    "additionalProperties": False,
}
TO_THE_POINT: dict[str, Any] = {"frequency_penalty": 2.0, "max_completion_tokens": 120}
"""JSON may have any number of spaces, and the demo model likes them."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def base_url(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    keys = tmp_path_factory.mktemp("keys") / "keys.toml"
    keys.write_text(_ENTRY)
    options = {"gateway": ("--keys", str(keys))}
    async with LocalCluster(roles="E:1,PD:1", options=options, log_dir=tmp_path_factory.mktemp("logs")) as running:
        yield f"{running.url}/v1"


@pytest.fixture
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url, api_key=_KEY, max_retries=0) as connected:
        yield connected


@pytest_asyncio.fixture(loop_scope="module")
async def aclient(base_url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=base_url, api_key=_KEY, max_retries=0) as connected:
        yield connected


def test_openai_with_a_wrong_key(base_url: str) -> None:
    with (
        openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.chat.completions.create(**ASKED)


def test_openai_without_streaming(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**ASKED)
    assert answer.choices[0].message.content == "3 7"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == PROMPT_TOKENS
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert [model.id for model in client.models.list()] == [MODEL_ID]
    assert client.models.retrieve(MODEL_ID).id == MODEL_ID


def test_openai_streams(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(**ASKED, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "3 7"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens == PROMPT_TOKENS
    with client.chat.completions.stream(**ASKED) as stream:
        assert stream.get_final_completion().choices[0].message.content == "3 7"


@on_the_modules_loop
async def test_openai_async(aclient: openai.AsyncOpenAI) -> None:
    answer = await aclient.chat.completions.create(**ASKED)
    assert answer.choices[0].message.content == "3 7"
    stream = await aclient.chat.completions.create(**ASKED, stream=True)
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
    assert text == "3 7"


def test_openai_choices_logprobs_and_plain_completions(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**ASKED, n=2, logprobs=True, top_logprobs=2, seed=1)
    assert [choice.message.content for choice in answer.choices] == ["3 7", "3 7"]
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content
    assert all(entry.logprob <= 0 and len(entry.top_logprobs) == 2 for entry in logprobs.content)
    completion = client.completions.create(model=MODEL_ID, prompt="Hello", max_tokens=4, temperature=0)
    assert completion.choices[0].finish_reason in ("stop", "length")


def test_openai_with_the_smallest_nucleus_and_a_data_url_without_a_media_type(client: openai.OpenAI) -> None:
    url = CONTENT[0]["image_url"]["url"].replace("image/png", "").rstrip("=")
    content = [{"type": "image_url", "image_url": {"url": url}}, *CONTENT[1:]]
    asked = {**ASKED, "messages": [{"role": "user", "content": content}]}
    for temperature in (0, 2):
        answer = client.chat.completions.create(**{**asked, "temperature": temperature, "top_p": 0, "seed": 1})
        assert answer.choices[0].message.content == "3 7"


def test_openai_gets_answers_of_a_schema(client: openai.OpenAI) -> None:
    def asked(schema: dict[str, Any]) -> Any:
        told: Any = {"type": "json_schema", "json_schema": {"name": "digit", "schema": schema, "strict": True}}
        return client.chat.completions.create(**{**ASKED, **TO_THE_POINT}, response_format=told)

    assert json.loads(asked(SCHEMA).choices[0].message.content)["digit"] in (1, 2)
    with pytest.raises(openai.BadRequestError):
        asked({"type": "no"})


def test_openai_responses_with_images_whole_streamed_and_continued(client: openai.OpenAI) -> None:
    images = [{"type": "input_image", "image_url": part["image_url"]["url"], "detail": "auto"} for part in CONTENT[:2]]
    content: Any = [*images, {"type": "input_text", "text": QUESTION}]
    asked: dict[str, Any] = {
        "model": MODEL_ID,
        "input": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_output_tokens": 32,
    }
    whole = client.responses.create(**asked)
    assert (whole.status, whole.output_text) == ("completed", "3 7")
    assert whole.usage is not None
    assert whole.usage.input_tokens == PROMPT_TOKENS
    with client.responses.stream(**asked) as stream:
        deltas = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert (deltas, final.output_text) == ("3 7", "3 7")
    after = client.responses.create(**{**asked, "input": QUESTION}, previous_response_id=final.id)
    assert after.usage is not None
    assert after.usage.input_tokens > PROMPT_TOKENS
    assert client.responses.retrieve(final.id).output_text == "3 7"
    items = list(client.responses.input_items.list(final.id))
    assert [part.type for part in items[0].content] == ["input_image", "input_image", "input_text"]  # type: ignore[union-attr]
    client.responses.delete(final.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(final.id)
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**asked, previous_response_id=final.id)
    assert refused.value.param == "previous_response_id"


def test_openai_gets_responses_of_a_schema(client: openai.OpenAI) -> None:
    wanted: Any = {"format": {"type": "json_schema", "name": "digit", "schema": SCHEMA, "strict": True}}
    answer = client.responses.create(
        model=MODEL_ID, input=QUESTION, text=wanted, temperature=0, extra_body={"frequency_penalty": 2.0}
    )
    assert json.loads(answer.output_text)["digit"] in (1, 2)


def test_anthropic_with_images_whole_streamed_and_counted(base_url: str) -> None:
    def block(part: Any) -> Any:
        data = part["image_url"]["url"].partition(",")[2]
        return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}

    content: Any = [*map(block, CONTENT[:2]), {"type": "text", "text": QUESTION}]
    messages: Any = [{"role": "user", "content": content}]
    asked: dict[str, Any] = {"model": MODEL_ID, "messages": messages, "max_tokens": 32}
    root = base_url.removesuffix("/v1")
    with anthropic.Anthropic(base_url=root, api_key=_KEY, max_retries=0) as claude:
        whole = claude.messages.create(**asked, extra_body={"temperature": 0})
        assert [block.text for block in whole.content if block.type == "text"] == ["3 7"]
        with claude.messages.stream(**asked, extra_body={"temperature": 0}) as stream:
            assert "".join(stream.text_stream) == "3 7"
            final = stream.get_final_message()
        for message in (whole, final):
            assert message.stop_reason == "end_turn"
            assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) == PROMPT_TOKENS
        assert claude.messages.count_tokens(model=MODEL_ID, messages=messages).input_tokens == PROMPT_TOKENS
        with pytest.raises(anthropic.BadRequestError, match=r"max_tokens: "):
            claude.messages.create(**{**asked, "max_tokens": 0})
        with pytest.raises(anthropic.NotFoundError):
            claude.messages.create(**{**asked, "model": "nobody"})
    with (
        anthropic.Anthropic(base_url=root, api_key="none", max_retries=0) as stranger,
        pytest.raises(anthropic.AuthenticationError),
    ):
        stranger.messages.create(**asked)


def test_tokenize_counts_the_positions_of_images(base_url: str) -> None:
    url, key = f"{base_url.removesuffix('/v1')}/tokenize", {"authorization": f"Bearer {_KEY}"}
    got = httpx.post(url, json={"messages": MESSAGES}, headers=key, timeout=60, trust_env=False).json()
    assert got["count"] == len(got["tokens"]) == PROMPT_TOKENS


def test_openai_raises_its_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(**{**ASKED, "model": "nobody"})
    broken = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{**ASKED, "messages": broken})
    assert caught.value.code == "invalid_media"
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**ASKED, tools=tools)
    assert refused.value.param == "tools"
    audio: Any = [{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}]
    with pytest.raises(openai.BadRequestError, match="the model takes images, not audio") as deaf:
        client.chat.completions.create(model=MODEL_ID, messages=[{"role": "user", "content": audio}])
    assert deaf.value.param == "messages[0].content[0].input_audio.data"


@on_the_modules_loop
async def test_langchain_with_and_without_streaming_and_async(base_url: str) -> None:
    chat = ChatOpenAI(base_url=base_url, api_key=_KEY, model=MODEL_ID, temperature=0, max_retries=0)  # type: ignore[arg-type]
    message = HumanMessage(content=CONTENT)
    answer = await chat.ainvoke([message])
    assert answer.content == "3 7"
    assert answer.usage_metadata is not None
    assert "".join([str(chunk.content) async for chunk in chat.astream([message])]) == "3 7"


def test_langchain_gets_structured_answers(base_url: str) -> None:
    chat = ChatOpenAI(
        base_url=base_url,
        api_key=_KEY,  # type: ignore[arg-type]
        model=MODEL_ID,
        temperature=0,
        max_retries=0,
        **TO_THE_POINT,
    )
    held = chat.with_structured_output({"title": "digit", **SCHEMA}, method="json_schema")
    assert held.invoke([HumanMessage(content=CONTENT)])["digit"] in (1, 2)


def test_langchain_from_a_thread_without_a_loop(base_url: str) -> None:
    chat = ChatOpenAI(base_url=base_url, api_key=_KEY, model=MODEL_ID, temperature=0, max_retries=0)  # type: ignore[arg-type]
    message = HumanMessage(content=CONTENT)
    assert chat.invoke([message]).content == "3 7"
    assert "".join(str(chunk.content) for chunk in chat.stream([message])) == "3 7"
