"""The REST API beyond plain chat: choices, logprobs, raw prompts, tokens, URLs, keys, OpenAPI description."""

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.gateway.door import make_gateway
from tests.unit.services.gateway.conftest import Rest
from tests.unit.services.gateway.endpoints import ENDPOINTS, MESSAGES, RESPONSES, Endpoint, each_endpoint
from tests.unit.services.gateway.fakes import FINISH, HELLO, FakeRouter, Step
from tests.unit.services.gateway.test_routes import ASK, CHAT, PNG_URL, events_of, image
from triptych import __version__
from triptych.domain.chat import ToolCall
from triptych.domain.generation import (
    Alternative,
    ChatEvent,
    ChatFinished,
    ChoiceFinished,
    FinishReason,
    TokenChunk,
    TokenLogprobs,
    ToolArguments,
    ToolCallMade,
    Usage,
)
from triptych.errors import DeadlineExceeded, InvalidMedia, InvalidRequest, Overloaded, Unavailable
from triptych.media.remote_url import HostRules
from triptych.runtime.clock import monotonic
from triptych.runtime.metrics import Metrics
from triptych.runtime.process import CannotStart
from triptych.services.gateway.app import serve
from triptych.services.gateway.keys import new_key
from triptych.services.gateway.routes import make_routes
from triptych.services.gateway.settings import GatewaySettings, RestTls
from triptych.virtual.offload import InlineOffload

COMPLETIONS = "/v1/completions"
END = ChatFinished(Usage(prompt_tokens=4, completion_tokens=3))
TWO: tuple[ChatEvent, ...] = (
    TokenChunk((1,), "a", 0),
    TokenChunk((2,), "b", 1),
    ChoiceFinished(FinishReason.LENGTH, 1),
    TokenChunk((3,), "c", 0),
    ChoiceFinished(FinishReason.STOP, 0),
    END,
)
HALF = Alternative(7, b"\xc3", -0.5)
NEVER = Alternative(8, "ä".encode(), float("-inf"))
LIKELY: tuple[ChatEvent, ...] = (
    TokenChunk((7,), "", 0, (TokenLogprobs(HALF, (HALF, NEVER)),)),
    TokenChunk((8,), "ä", 0, (TokenLogprobs(NEVER, ()),)),
    ChoiceFinished(FinishReason.STOP, 0),
    END,
)


@asynccontextmanager
async def web(body: bytes, status: str = "200 OK") -> AsyncGenerator[str]:
    """A host on loopback that serves ``body`` at every path."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield f"http://localhost:{server.sockets[0].getsockname()[1]}/a.png"
    finally:
        server.close()


def port_of(url: str) -> int:
    return httpx.URL(url).port or 0


def ask_about(*urls: str, **fields: Any) -> dict[str, Any]:
    return {**ASK, "messages": [{"role": "user", "content": [image(url) for url in urls]}], **fields}


# --- choices and logprobs ---------------------------------------------------------------------------------------------


async def test_choices_are_returned_in_order(rest: Rest) -> None:
    async with rest(FakeRouter(TWO)) as client:
        answer = (await client.post(CHAT, json={**ASK, "n": 2})).json()
    told = [(choice["index"], choice["message"]["content"], choice["finish_reason"]) for choice in answer["choices"]]
    assert told == [(0, "ac", "stop"), (1, "b", "length")]


async def test_chunks_of_a_stream_have_their_choice_index(rest: Rest) -> None:
    async with rest(FakeRouter(TWO)) as client:
        *chunks, done = events_of((await client.post(CHAT, json={**ASK, "n": 2, "stream": True})).text)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [(choice["index"], choice["delta"].get("content"), choice["finish_reason"]) for choice in choices] == [
        (0, "", None),
        (1, "", None),
        (0, "a", None),
        (1, "b", None),
        (1, None, "length"),
        (0, "c", None),
        (0, None, "stop"),
    ]
    assert done == "[DONE]"


async def test_logprobs_have_openais_format(rest: Rest) -> None:
    half = {"token": "\ufffd", "logprob": -0.5, "bytes": [0xC3]}
    never = {"token": "ä", "logprob": -9999.0, "bytes": [0xC3, 0xA4]}
    asked = {**ASK, "logprobs": True, "top_logprobs": 2}
    async with rest(FakeRouter(LIKELY)) as client:
        answer = (await client.post(CHAT, json=asked)).json()["choices"][0]
        *chunks, _ = events_of((await client.post(CHAT, json={**asked, "stream": True})).text)
        without = (await client.post(CHAT, json=ASK)).json()["choices"][0]
    assert answer["logprobs"] == {
        "content": [{**half, "top_logprobs": [half, never]}, {**never, "top_logprobs": []}],
        "refusal": None,
    }
    streamed = [entry for chunk in chunks for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert streamed == answer["logprobs"]["content"]
    assert without["logprobs"] is None


# --- tool calls ------------------------------------------------------------------------------------------------------


CALLS = (ToolCall("call_1", "f", '{"a": 1}'), ToolCall("call_2", "g", "{}"))
CALLING = (
    TokenChunk((1,), ""),
    ToolCallMade(CALLS[0], 0),
    ToolCallMade(CALLS[1], 1),
    ChoiceFinished(FinishReason.TOOL_CALLS),
    FINISH[1],
)
TOLD_CALLS = [
    {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
    {"id": "call_2", "type": "function", "function": {"name": "g", "arguments": "{}"}},
]


async def test_tool_calls_have_openais_format_and_empty_content_is_null(rest: Rest) -> None:
    async with rest(FakeRouter(CALLING)) as client:
        (choice,) = (await client.post(CHAT, json=ASK)).json()["choices"]
    message = {"role": "assistant", "content": None, "refusal": None, "tool_calls": TOLD_CALLS}
    assert choice == {"index": 0, "message": message, "logprobs": None, "finish_reason": "tool_calls"}
    async with rest(FakeRouter((TokenChunk((1,), "See:"), *CALLING))) as client:
        assert (await client.post(CHAT, json=ASK)).json()["choices"][0]["message"]["content"] == "See:"


IN_PIECES = (
    TokenChunk((1,), ""),
    ToolCallMade(CALLS[0], 0),
    ToolCallMade(replace(CALLS[1], arguments=""), 1),
    ToolArguments("{", 1),
    ToolArguments("}", 1),
    *CALLING[-2:],
)


async def test_tool_calls_are_streamed_with_their_arguments_in_pieces(rest: Rest) -> None:
    router = FakeRouter(IN_PIECES)
    async with rest(router) as client:
        *chunks, done = events_of((await client.post(CHAT, json={**ASK, "stream": True})).text)
    told = [(chunk["choices"][0]["delta"], chunk["choices"][0]["finish_reason"]) for chunk in chunks]
    assert told == [
        ({"role": "assistant", "content": ""}, None),
        ({"tool_calls": [{"index": 0, **TOLD_CALLS[0]}]}, None),
        ({"tool_calls": [{"index": 1, **TOLD_CALLS[1], "function": {"name": "g", "arguments": ""}}]}, None),
        ({"tool_calls": [{"index": 1, "function": {"arguments": "{"}}]}, None),
        ({"tool_calls": [{"index": 1, "function": {"arguments": "}"}}]}, None),
        ({}, "tool_calls"),
    ]
    assert done == "[DONE]"
    assert router.requests[0].streams_arguments


# --- plain completions and tokens -------------------------------------------------------------------------------------


async def test_a_completion_continues_a_raw_prompt(rest: Rest, router: FakeRouter) -> None:
    async with rest(router) as client:
        answer = await client.post(COMPLETIONS, json={"model": "demo", "prompt": "Once"}, headers={"x-request-id": "r"})
        assert (await client.get("/v1/requests/cmpl-r/timeline")).status_code == 200
    assert answer.json() == {
        "id": "cmpl-r",
        "object": "text_completion",
        "created": 1_700_000_000,
        "model": "demo",
        "choices": [{"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": 19,
            "completion_tokens": 3,
            "total_tokens": 22,
            "prompt_tokens_details": {"cached_tokens": 0, "image_tokens": 16, "audio_tokens": 0, "video_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    }
    assert (router.requests[0].prompt, router.requests[0].messages) == ("Once", ())


@pytest.mark.parametrize("prompts", [["a", "b"], [[5, 6], [7]]])
async def test_the_choices_of_several_prompts_follow_each_other(rest: Rest, prompts: list[Any]) -> None:
    router = FakeRouter(
        (
            TokenChunk((1,), "x"),
            TokenChunk((2,), "y", 1),
            ChoiceFinished(FinishReason.STOP, 0),
            ChoiceFinished(FinishReason.STOP, 1),
            ChatFinished(Usage(3, 2)),
        )
    )
    body = {"model": "demo", "prompt": prompts, "n": 2}
    async with rest(router) as client:
        answer = (await client.post(COMPLETIONS, json=body)).json()
        streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
        *chunks, usage, done = events_of((await client.post(COMPLETIONS, json=streamed)).text)
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == list(enumerate("xyxy"))
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (6, 4)
    texts = [chunk["choices"][0] for chunk in chunks]
    assert ["".join(choice["text"] for choice in texts if choice["index"] == index) for index in range(4)] == list(
        "xyxy"
    )
    assert (usage["usage"]["total_tokens"], done) == (10, "[DONE]")
    given = [(request.prompt, list(request.prompt_tokens)) for request in router.requests[:2]]
    assert given == [(prompt, []) if isinstance(prompt, str) else ("", prompt) for prompt in prompts]


async def test_an_error_for_one_of_several_prompts_is_that_of_all(rest: Rest) -> None:
    async with rest(FakeRouter([Overloaded("full")])) as client:
        assert (await client.post(COMPLETIONS, json={"model": "demo", "prompt": ["a", "b"]})).status_code == 429
        refused: list[Any] = [[], [1, "a"], [[]], [[-1]], ["a"] * 65, 5]
        for prompts in refused:
            answer = await client.post(COMPLETIONS, json={"model": "demo", "prompt": prompts})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")


async def test_a_completion_streams_with_logprobs(rest: Rest) -> None:
    body = {"model": "demo", "prompt": "x", "stream": True, "logprobs": 1, "stream_options": {"include_usage": True}}
    async with rest(FakeRouter(LIKELY)) as client:
        *chunks, usage, done = events_of((await client.post(COMPLETIONS, json=body)).text)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "ä"
    assert [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in chunks] == [[0], [1], []]
    assert chunks[0]["choices"][0]["logprobs"]["top_logprobs"] == [{"\ufffd": -0.5, "ä": -9999.0}]
    assert (usage["usage"]["total_tokens"], done) == (7, "[DONE]")


async def test_tokenize_counts_the_prompt_of_the_model(rest: Rest, router: FakeRouter) -> None:
    async with rest(router) as client:
        expected = {"count": 3, "max_model_len": 512, "tokens": [5, 6, 7], "token_strs": None}
        assert (await client.post("/tokenize", json={"prompt": "x"})).json() == expected
        assert (await client.post("/tokenize", json={**ask_about(PNG_URL)})).json() == expected
        spelled = await client.post("/tokenize", json={"prompt": "x", "return_token_strs": True})
        assert spelled.json() == {**expected, "token_strs": ["a", "<image>", "b"]}
        for wrong in ({}, {"prompt": "x", "messages": ASK["messages"]}):
            answer = await client.post("/tokenize", json=wrong)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
        assert (await client.post("/tokenize", json={"prompt": "x", "model": "other"})).status_code == 404
    assert [request.model for request in router.requests] == ["demo"] * 3


async def test_an_error_of_the_router_about_an_item_names_its_field(rest: Rest) -> None:
    said = InvalidMedia("the image is broken", param="messages[0].content[1]")
    text = {"type": "text", "text": "x"}
    audio = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
    async with rest(FakeRouter([said])) as client:
        for part, field in ((image(PNG_URL), "image_url.url"), (audio, "input_audio.data"), (text, "")):
            ask = {**ASK, "messages": [{"role": "user", "content": [text, part]}]}
            told = (await client.post(CHAT, json=ask)).json()["error"]["param"]
            assert told == "messages[0].content[1]" + (f".{field}" if field else "")
            said.param = "messages[0].content[1]"


# --- URLs -------------------------------------------------------------------------------------------------------------


async def test_an_image_is_fetched_from_its_url(rest: Rest, router: FakeRouter) -> None:
    async with web(b"pixels") as url:
        allowed = HostRules(fetch_hosts_private=("localhost",), fetch_ports=(port_of(url),))
        async with rest(router, fetch_rules=allowed) as client:
            assert (await client.post(CHAT, json=ask_about(url, PNG_URL, url))).status_code == 200
    first, second, third = router.requests[0].media
    assert (first.data, third.data) == (b"pixels", b"pixels")
    assert second.data != b"pixels"


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/",
        "http://localhost/",
        "http://[::ffff:169.254.169.254]/latest/meta-data",
        "http://0x7f000001/",
        "http://user:secret@example.com/",
        "https://does-not-exist.invalid/",
        "http://example.com:22/",
        "https://" + "a" * 300 + ".example/",
    ],
    ids=lambda url: url[:40],
)
async def test_forbidden_urls_are_400(rest: Rest, router: FakeRouter, url: str) -> None:
    async with rest(router) as client:
        answer = await client.post(CHAT, json=ask_about(PNG_URL, url))
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "invalid_media")
    assert error["param"] == "messages[0].content[1].image_url.url"
    assert "secret" not in answer.text
    assert router.requests == []


async def test_a_bad_response_of_a_media_host_is_400(rest: Rest, router: FakeRouter) -> None:
    async with web(b"x", "503 Service Unavailable") as url, web(b"x" * 5000) as large:
        allowed = HostRules(fetch_hosts_private=("localhost",), fetch_ports=(port_of(url), port_of(large)))
        async with rest(router, fetch_rules=allowed, max_item_bytes=1000) as client:
            assert "503" in (await client.post(CHAT, json=ask_about(url))).json()["error"]["message"]
            answer = await client.post(CHAT, json=ask_about(PNG_URL, large))
            assert (answer.status_code, "1000 bytes" in answer.text) == (400, True)


async def test_fetched_bytes_count_against_the_memory_bound(rest: Rest, router: FakeRouter) -> None:
    async with web(b"x" * 2000) as url:
        allowed = HostRules(fetch_hosts_private=("localhost",), fetch_ports=(port_of(url),))
        async with rest(router, fetch_rules=allowed, max_body_bytes=1024, max_buffered_bytes=1500) as client:
            answer = await client.post(CHAT, json=ask_about(url))
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "overloaded")


async def test_the_number_of_urls_is_bounded_and_fetching_can_be_turned_off(rest: Rest, router: FakeRouter) -> None:
    async with rest(router, max_urls_per_request=2) as client:
        answer = await client.post(CHAT, json=ask_about(*["https://example.invalid/"] * 3))
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
    async with rest(router, fetch=False) as client:
        answer = await client.post(CHAT, json=ask_about("https://example.com/a.png"))
        assert (answer.status_code, "data: URL" in answer.text) == (400, True)


# --- keys -------------------------------------------------------------------------------------------------------------


def key_file(path: Path, limits: str = "") -> tuple[Path, dict[str, str], dict[str, str]]:
    """A file with two keys, and the headers that each holder sends."""
    (alice, first), (bob, second) = new_key("alice"), new_key("bob")
    file = path / "keys.toml"
    file.write_text(first + limits + second)
    return file, {"authorization": f"Bearer {alice}"}, {"authorization": f"Bearer {bob}"}


HUGE = {"type": "object", "x": "HUGE"}
NAMED = {"type": "json_schema", "json_schema": {"name": "x", "schema": HUGE}}
CALLED = {"type": "tool_use", "id": "c", "name": "f", "input": HUGE}


@pytest.mark.parametrize(
    ("endpoint", "fields", "param"),
    [
        (ENDPOINTS[0], {"tools": [{"type": "function", "function": {"name": "f", "parameters": HUGE}}]}, "tools"),
        (ENDPOINTS[0], {"response_format": NAMED}, "response_format.json_schema.schema"),
        (ENDPOINTS[0], {"structured_outputs": {"json": HUGE}}, "structured_outputs.json"),
        (ENDPOINTS[0], {"chat_template_kwargs": HUGE}, "chat_template_kwargs"),
        (ENDPOINTS[0], {"temperature": "HUGE"}, "temperature"),
        (ENDPOINTS[0], {"logit_bias": {"1": "HUGE"}}, "logit_bias"),
        (ENDPOINTS[1], {"guided_json": HUGE}, "guided_json"),
        (RESPONSES, {"tools": [{"type": "function", "name": "f", "parameters": HUGE}]}, "tools"),
        (RESPONSES, {"text": {"format": {"type": "json_schema", "schema": HUGE}}}, "text.format.schema"),
        (RESPONSES, {"temperature": "HUGE"}, "temperature"),
        (RESPONSES, {"top_p": "HUGE"}, "top_p"),
        (MESSAGES, {"tools": [{"name": "f", "input_schema": HUGE}]}, "tools"),
        (
            MESSAGES,
            {"output_config": {"format": {"type": "json_schema", "schema": HUGE}}},
            "output_config.format.schema",
        ),
        (
            MESSAGES,
            {"messages": [{"role": "assistant", "content": [CALLED]}, *MESSAGES.ask["messages"]]},
            "messages[0].content[0].input",
        ),
    ],
)
async def test_numbers_that_no_float_holds_are_refused_by_name(
    rest: Rest, router: FakeRouter, endpoint: Endpoint, fields: dict[str, Any], param: str
) -> None:
    body = json.dumps({**endpoint.ask, **fields}).replace('"HUGE"', "1e999")
    async with rest(router) as client:
        answer = await client.post(endpoint.path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert endpoint.refusal(answer.json()).startswith(param)
    assert router.requests == []


async def test_version_and_load_are_shown(rest: Rest, router: FakeRouter) -> None:
    async with rest(router) as client:
        assert (await client.get("/version")).json() == {"version": __version__}
        assert (await client.get("/load")).json() == {"server_load": 0}


async def test_every_route_but_health_requires_a_key(rest: Rest, router: FakeRouter, tmp_path: Path) -> None:
    keys, alice, _ = key_file(tmp_path)
    routes = ["/v1/models", "/v1/models/demo", "/v1/requests/r/timeline", "/ready", "/metrics", "/openapi.json", "/x"]
    async with rest(router, keys=keys) as client:
        assert (await client.get("/health")).status_code == 200
        assert [(await client.request(method, "/ping")).status_code for method in ("GET", "POST")] == [200, 200]
        for route in routes:
            assert (await client.get(route)).status_code in (401, 429), route
        assert [(await client.get(route, headers=alice)).status_code for route in routes] == [
            200,
            200,
            404,
            200,
            200,
            200,
            404,
        ]
    async with rest(router, keys=keys) as client:
        for route in (CHAT, COMPLETIONS, "/tokenize", RESPONSES.path):
            refused = await client.post(route, json=ASK)
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
            assert refused.json()["error"]["type"] == "authentication_error"
        refused = await client.post(MESSAGES.path, json=MESSAGES.ask)
        assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
        assert router.requests == []
        assert (await client.post(CHAT, json=ASK, headers=alice)).status_code == 200
        own = {"x-api-key": alice["authorization"].removeprefix("Bearer ")}
        for endpoint in ENDPOINTS:
            assert (await client.post(endpoint.path, json=endpoint.ask, headers=own)).status_code == 200
        assert {request.tenant.name for request in router.requests if request.tenant} == {"alice"}


async def test_many_authentication_failures_from_one_source_are_429(
    rest: Rest, router: FakeRouter, tmp_path: Path
) -> None:
    keys, alice, _ = key_file(tmp_path)
    async with rest(router, keys=keys) as client:
        wrong = {"authorization": "Bearer nonsense"}
        statuses = [(await client.get("/v1/models", headers=wrong)).status_code for _ in range(12)]
        assert statuses == [401] * 10 + [429] * 2
        refused = await client.get("/v1/models", headers=wrong)
        assert int(refused.headers["retry-after"]) > 0
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/v1/models", headers=alice)).status_code == 200


@each_endpoint
async def test_the_limits_of_a_key_are_429_with_retry_after(
    rest: Rest, router: FakeRouter, tmp_path: Path, endpoint: Endpoint
) -> None:
    path, ask = endpoint.path, endpoint.ask
    keys, alice, bob = key_file(tmp_path, "tokens_per_minute = 20\n")
    async with rest(router, keys=keys) as client:
        assert (await client.post(path, json=ask, headers=alice)).status_code == 200
        refused = await client.post(path, json=ask, headers=alice)
        assert refused.status_code == 429
        assert "no tokens left" in endpoint.refusal(refused.json())
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert (await client.post(path, json=ask, headers=bob)).status_code == 200


@pytest.mark.parametrize(
    ("script", "told", "spent"),
    [
        ((TokenChunk((1,), "x"), asyncio.Event()), {"text_attempts": 1, "prompt_tokens": 19}, 20),
        ((asyncio.Event(),), {"text_attempts": 1, "prompt_tokens": 19}, 19),
        ((asyncio.Event(),), {"text_attempts": 0, "prompt_tokens": 19}, 16),
        ((DeadlineExceeded("late"),), {"text_attempts": 1, "prompt_tokens": 19}, 19),
        ((Unavailable("down"),), {"text_attempts": 1, "prompt_tokens": 19}, 0),
    ],
    ids=["after the first token", "during prefill", "while images are encoded", "out of time", "failed"],
)
async def test_a_key_is_charged_for_computed_tokens_however_its_request_ends(
    tmp_path: Path, script: Sequence[Step], told: dict[str, int], spent: int
) -> None:
    """The next request of the key is accepted only if fewer tokens were charged."""
    for limit, status in ((spent + 1, 200), (max(1, spent), 200 if spent == 0 else 429)):
        router = FakeRouter(script)
        router.told = told
        keys, alice, _ = key_file(tmp_path, f"tokens_per_minute = {limit}\n")
        async with (
            serve(GatewaySettings(port=0, keys=keys), router) as app,
            httpx.AsyncClient(
                trust_env=False, timeout=60, base_url=f"http://127.0.0.1:{app.port}", headers=alice
            ) as client,
            asyncio.timeout(60),
        ):
            async with asyncio.TaskGroup() as group:
                reading = group.create_task(first_bytes(client))
                await router.next_request()
                if isinstance(script[0], asyncio.Event):  # nothing comes: the client leaves
                    reading.cancel()
            await router.closed.wait()
            while (await client.get("/metrics")).text.count("triptych_http_requests_running 0.0") == 0:
                pass
            router.script = HELLO
            assert (await client.post(CHAT, json=ASK)).status_code == status


async def first_bytes(client: httpx.AsyncClient) -> None:
    """Asks for a stream, and leaves once something has come."""
    async with client.stream("POST", CHAT, json={**ASK, "stream": True}) as answer:
        await anext(answer.aiter_bytes())


@each_endpoint
async def test_embeddings_of_tenants_are_separate_unless_shared(
    rest: Rest, router: FakeRouter, tmp_path: Path, endpoint: Endpoint
) -> None:
    keys, alice, bob = key_file(tmp_path)
    ask = endpoint.ask
    salted = {**ask, "cache_salt": "mine"}
    async with rest(router, keys=keys) as client:
        for headers, body in ((alice, ask), (bob, ask), (alice, salted), (bob, salted), (alice, ask)):
            await client.post(endpoint.path, json=body, headers=headers)
    *different, again = [request.tenant_salt for request in router.requests]
    assert len(set(different)) == 4
    assert again == different[0] != b""
    router.requests.clear()
    async with rest(router, keys=keys, tenants_share=True) as client:
        for headers in (alice, bob):
            await client.post(endpoint.path, json=ask, headers=headers)
    assert [request.tenant_salt for request in router.requests] == [b"", b""]


async def test_a_timeline_is_visible_only_to_the_key_of_its_request(
    rest: Rest, router: FakeRouter, tmp_path: Path
) -> None:
    keys, alice, bob = key_file(tmp_path)
    async with rest(router, keys=keys) as client:
        await client.post(CHAT, json=ASK, headers={**alice, "x-request-id": "mine"})
        own = await client.get("/v1/requests/chatcmpl-mine/timeline", headers=alice)
        assert (own.status_code, own.json()["request_id"]) == (200, "mine")
        for name in ("mine", "alice/mine", "alice%2Fmine"):
            assert (await client.get(f"/v1/requests/{name}/timeline", headers=bob)).status_code == 404


def test_listening_beyond_loopback_requires_keys_and_tls_or_settings(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--allow-anyone"):
        GatewaySettings(host="0.0.0.0")
    with pytest.raises(ValueError, match="--rest-tls-cert"):
        GatewaySettings(host="0.0.0.0", keys=tmp_path / "keys.toml")
    GatewaySettings(host="0.0.0.0", allow_anyone=True, allow_network=True)
    GatewaySettings(host="0.0.0.0", keys=tmp_path / "keys.toml", allow_network=True)
    tls = RestTls(tmp_path / "cert.pem", tmp_path / "key.pem")
    GatewaySettings(host="0.0.0.0", keys=tmp_path / "keys.toml", rest_tls=tls)


async def test_an_unreadable_key_file_stops_the_start(router: FakeRouter, tmp_path: Path) -> None:
    with pytest.raises(CannotStart, match=r"the file of keys .* does not exist"):
        async with serve(GatewaySettings(port=0, keys=tmp_path / "missing"), router):
            pass


# --- the edge ---------------------------------------------------------------------------------------------------------


async def test_a_connection_above_the_limit_gets_the_common_error_body(router: FakeRouter) -> None:
    async with (
        serve(GatewaySettings(port=0, max_connections=1), router) as app,
        httpx.AsyncClient(trust_env=False, timeout=60, base_url=f"http://127.0.0.1:{app.port}") as first,
        httpx.AsyncClient(trust_env=False, timeout=60, base_url=f"http://127.0.0.1:{app.port}") as second,
    ):
        assert (await first.get("/v1/models")).status_code == 200
        refused = await second.get("/v1/models")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
        assert (refused.headers["retry-after"], refused.headers["connection"]) == ("1", "close")
        assert (await first.get("/v1/models")).status_code == 200


async def test_the_openapi_document_names_every_route(rest: Rest, router: FakeRouter) -> None:
    async with rest(router) as client:
        document = (await client.get("/openapi.json")).json()
    gateway = make_gateway(router, InlineOffload(), monotonic)
    routes = {route.path.replace(":path", "") for route in make_routes(gateway, Metrics(), monotonic)}
    assert routes - {"/openapi.json"} == set(document["paths"])
    fields = document["components"]["schemas"]["ChatCompletionRequest"]["properties"]
    assert {"n", "logprobs", "logit_bias", "response_format", "tools", "cache_salt"} <= set(fields)


async def test_a_refusal_of_the_chat_template_reaches_the_client(rest: Rest) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    router = FakeRouter([InvalidRequest("tools: the model's chat template does not support tools", param="tools")])
    async with rest(router) as client:
        answer = await client.post(CHAT, json={**ASK, "tools": tools})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")
    assert router.requests[0].tools == '[{"type": "function", "function": {"name": "f"}}]'


async def test_unknown_fields_are_ignored(rest: Rest) -> None:
    async with rest(FakeRouter(HELLO)) as client:
        answer = await client.post(CHAT, json={**ASK, "user": "u", "service_tier": "auto", "new": {}})
    assert answer.status_code == 200


async def test_only_a_valid_priority_reaches_the_router(rest: Rest, router: FakeRouter) -> None:
    async with rest(router) as client:
        for path, fields in ((CHAT, ASK), ("/v1/completions", {"model": "demo", "prompt": "p"})):
            for priority in (-7, None, 2**31 - 1):
                assert (await client.post(path, json={**fields, "priority": priority})).status_code == 200
                assert router.requests[-1].priority == (priority or 0)
        for wrong in (2**31, -(2**31) - 1, 0.5, "1", True):
            answer = await client.post(CHAT, json={**ASK, "priority": wrong})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "priority")
    assert len(router.requests) == 6
