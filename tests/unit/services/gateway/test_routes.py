import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.unit.services.gateway.conftest import Rest
from tests.unit.services.gateway.endpoints import Endpoint, each_endpoint
from tests.unit.services.gateway.fakes import FINISH, HELLO, BusyRouter, FakeRouter
from tests.unit.services.gateway.test_openai_api import BODY
from triptych import errors
from triptych.domain.chat import MediaPart, Message, TextPart
from triptych.domain.generation import TokenChunk
from triptych.domain.media import Modality
from triptych.domain.sampling import SamplingParams
from triptych.domain.timeline import Readiness
from triptych.services.gateway.keys import new_key

CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}
PNG = b"\x89PNG\r\n\x1a\n not really"
PNG_URL = "data:image/png;base64," + base64.b64encode(PNG).decode()


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def events_of(body: str) -> list[Any]:
    assert body.endswith("\n\n")
    return [
        json.loads(line.removeprefix("data: ")) if line != "data: [DONE]" else "[DONE]"
        for line in body.removesuffix("\n\n").split("\n\n")
    ]


# --- answers ----------------------------------------------------------------------------------------------------------


async def test_a_completion_has_the_full_text_and_the_usage(rest: Rest, router: FakeRouter) -> None:
    async with rest(router) as client:
        answer = await client.post(CHAT, json=ASK, headers={"x-request-id": "abc"})
    assert answer.status_code == 200
    assert answer.headers["x-request-id"] == "abc"
    assert answer.json() == {
        "id": "chatcmpl-abc",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": "demo",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 19,
            "completion_tokens": 3,
            "total_tokens": 22,
            "prompt_tokens_details": {"cached_tokens": 0, "image_tokens": 16, "audio_tokens": 0, "video_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    }


async def test_the_router_gets_the_parsed_request(rest: Rest, router: FakeRouter) -> None:
    body = {
        "model": "demo",
        "messages": [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [image(PNG_URL), {"type": "text", "text": "What?"}]},
        ],
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 4,
        "seed": 7,
        "stop": "\n",
        "max_tokens": 5,
        "some_future_field": {"a": 1},
    }
    async with rest(router) as client:
        assert (await client.post(CHAT, json=body, headers={"x-request-timeout": "9"})).status_code == 200
    (request,) = router.requests
    assert request.messages == (
        Message("system", (TextPart("Be brief."),)),
        Message("user", (MediaPart(Modality.IMAGE, PNG), TextPart("What?"))),
    )
    assert request.sampling == SamplingParams(temperature=0, top_p=0.5, top_k=4, seed=7, max_tokens=5, stop=("\n",))
    assert 8 < request.timeout_s <= 9


@pytest.mark.parametrize("stream", [False, True])
async def test_the_router_is_told_whether_the_answer_is_read_as_a_whole(
    rest: Rest, router: FakeRouter, stream: bool
) -> None:
    async with rest(router) as client:
        await client.post(CHAT, json={**ASK, "stream": stream})
    (request,) = router.requests
    assert request.whole is not stream


async def test_a_stream_has_the_role_then_text_then_the_finish_reason(rest: Rest, router: FakeRouter) -> None:
    async with rest(router) as client:
        answer = await client.post(CHAT, json={**ASK, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    *chunks, done = events_of(answer.text)
    assert done == "[DONE]"
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"content": "Hel"},
        {"content": "lo"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "stop"]
    assert {chunk["id"] for chunk in chunks} == {"chatcmpl-" + answer.headers["x-request-id"]}
    assert not any("usage" in chunk for chunk in chunks)


async def test_a_stream_ends_with_the_usage_on_request(rest: Rest, router: FakeRouter) -> None:
    async with rest(router) as client:
        body = {**ASK, "stream": True, "stream_options": {"include_usage": True}}
        *chunks, usage, _ = events_of((await client.post(CHAT, json=body)).text)
    assert usage["choices"] == []
    assert usage["usage"]["total_tokens"] == 22
    assert all(chunk["usage"] is None for chunk in chunks)


async def test_a_large_body_is_parsed_off_the_loop(rest: Rest, router: FakeRouter) -> None:
    content = [image("data:image/png;base64," + base64.b64encode(bytes(300_000)).decode())]
    async with rest(router) as client:
        answer = await client.post(CHAT, json={**ASK, "messages": [{"role": "user", "content": content}]})
    assert answer.status_code == 200
    assert router.requests[0].media[0].data == bytes(300_000)


async def test_models_health_and_readiness(rest: Rest, router: FakeRouter) -> None:
    async with rest(router) as client:
        assert [model["id"] for model in (await client.get("/v1/models")).json()["data"]] == ["demo"]
        assert (await client.get("/v1/models/demo")).json()["max_model_len"] == 512
        missing = await client.get("/v1/models/other/one")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/ready")).json()["instances"] == ["encoder-1", "text-1"]
        router.readiness_answer = Readiness(ready=False, missing=("encode",))
        not_ready = await client.get("/ready")
        assert (not_ready.status_code, not_ready.json()["missing"]) == (503, ["encode"])
        router.readiness_answer = errors.InstanceLost("gone")
        assert (await client.get("/ready")).json()["missing"] == ["router"]
        assert (await client.get("/health")).status_code == 200


async def test_the_timeline_is_found_by_request_id_and_by_completion_id(rest: Rest, router: FakeRouter) -> None:
    async with rest(router) as client:
        answer = await client.post(CHAT, json=ASK)
        for name in (answer.headers["x-request-id"], answer.json()["id"]):
            timeline = (await client.get(f"/v1/requests/{name}/timeline")).json()
            assert timeline["outcome"] == "done"
            assert timeline["items"][0]["encoder"] == "encoder-1"
        assert (await client.get("/v1/requests/unknown/timeline")).status_code == 404


# --- errors -----------------------------------------------------------------------------------------------------------


@each_endpoint
@pytest.mark.parametrize("error", [cls("why", param="model") for cls in errors.tree().values()], ids=lambda e: e.code)
async def test_an_error_before_the_first_token_is_a_status(
    rest: Rest, endpoint: Endpoint, error: errors.TriptychError
) -> None:
    async with rest(FakeRouter([error])) as client:
        answers = [
            await client.post(endpoint.path, json={**endpoint.ask, "stream": stream}) for stream in (False, True)
        ]
    for answer in answers:
        assert answer.status_code == error.http_status
        assert answer.headers["x-request-id"]
        assert endpoint.refusal(answer.json()) == ("model: why" if endpoint.is_anthropics else "why")
        if not endpoint.is_anthropics:
            assert (answer.json()["error"]["param"], answer.json()["error"]["code"]) == ("model", error.code)


@each_endpoint
@pytest.mark.parametrize(
    ("error", "wait"),
    [
        (errors.Overloaded("full", retry_after_s=0.2), "1"),
        (errors.InstanceLost("lost"), "1"),
        (errors.InvalidMedia("never"), None),
        (errors.EngineFailure("a bug"), None),
    ],
)
async def test_errors_that_may_go_away_have_a_retry_after_of_at_least_one_second(
    rest: Rest, endpoint: Endpoint, error: errors.TriptychError, wait: str | None
) -> None:
    async with rest(FakeRouter([error])) as client:
        assert (await client.post(endpoint.path, json=endpoint.ask)).headers.get("retry-after") == wait


@each_endpoint
async def test_an_answer_is_the_same_whole_and_as_a_stream(rest: Rest, router: FakeRouter, endpoint: Endpoint) -> None:
    async with rest(router) as client:
        whole = await client.post(endpoint.path, json=endpoint.ask)
        stream = await client.post(endpoint.path, json={**endpoint.ask, "stream": True})
    assert (endpoint.text(whole.json()), endpoint.streamed(stream.text)) == ("Hello", "Hello")


@each_endpoint
async def test_an_error_after_the_first_token_ends_the_stream(rest: Rest, endpoint: Endpoint) -> None:
    router = FakeRouter([TokenChunk((1,), "Hel"), errors.InstanceLost("text-1 is gone")])
    async with rest(router) as client:
        answer = await client.post(endpoint.path, json={**endpoint.ask, "stream": True})
        assert answer.status_code == 200
        assert endpoint.failure(answer.text) == "text-1 is gone"
        answer = await client.post(endpoint.path, json=endpoint.ask)
        assert answer.status_code == 503, "not a stream: nothing was sent yet"


@each_endpoint
async def test_a_stream_without_an_end_is_an_error(rest: Rest, endpoint: Endpoint) -> None:
    async with rest(FakeRouter([TokenChunk((1,), "Hel")])) as client:
        answer = await client.post(endpoint.path, json={**endpoint.ask, "stream": True})
        assert "ended early" in endpoint.failure(answer.text)
        assert (await client.post(endpoint.path, json=endpoint.ask)).status_code == 503
    async with rest(FakeRouter([])) as client:
        assert (await client.post(endpoint.path, json=endpoint.ask)).status_code == 503


@each_endpoint
async def test_unexpected_exceptions_are_logged_and_not_disclosed(
    rest: Rest, endpoint: Endpoint, caplog: pytest.LogCaptureFixture
) -> None:
    private = "10.0.0.7:/etc/weights"
    async with rest(FakeRouter([ValueError(private)])) as client:
        answer = await client.post(endpoint.path, json=endpoint.ask)
    assert answer.status_code == 500
    assert "internal error" in endpoint.refusal(answer.json())
    assert private not in answer.text
    assert private in caplog.text
    async with rest(FakeRouter([TokenChunk((1,), "x"), ValueError(private)])) as client:
        answer = await client.post(endpoint.path, json={**endpoint.ask, "stream": True})
    assert "internal error" in endpoint.failure(answer.text)
    assert private not in answer.text


async def test_spare_slashes_in_a_path_change_nothing(rest: Rest, router: FakeRouter) -> None:
    async with rest(router) as client:
        for path in ("/v1/models", "/v1/models/demo", "/health", "/ready", "/openapi.json"):
            plain, slashed = await client.get(path), await client.get(path + "/")
            assert (slashed.status_code, slashed.content) == (plain.status_code, plain.content)
            assert plain.status_code == 200
        for path in ("/v1/chat/completions/", "/v1//chat/completions", "//v1/chat/completions"):
            assert (await client.post(f"http://localhost{path}", json=ASK)).status_code == 200
        assert (await client.get("/")).status_code == 404


PREFLIGHT = {
    "origin": "https://chat.example",
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-os",
}


async def test_pages_of_allowed_origins_may_call_the_gateway(rest: Rest, router: FakeRouter, tmp_path: Path) -> None:
    (tmp_path / "keys.toml").write_text(new_key("a")[1])
    settings = {"allowed_origins": ("https://chat.example",), "keys": tmp_path / "keys.toml"}
    async with rest(router, **settings) as client:
        answer = await client.options("/v1/chat/completions", headers=PREFLIGHT)
        assert (answer.status_code, answer.content) == (204, b"")
        assert answer.headers["access-control-allow-origin"] == "https://chat.example"
        assert "POST" in answer.headers["access-control-allow-methods"]
        assert answer.headers["access-control-allow-headers"] == PREFLIGHT["access-control-request-headers"]
        assert answer.headers["x-request-id"]
        for path, status in (("/health", 200), ("/nowhere", 401), ("/v1/chat/completions", 401)):
            answer = await client.get(path, headers={"origin": "https://chat.example"})
            assert answer.status_code == status
            assert answer.headers["access-control-allow-origin"] == "https://chat.example"
            assert answer.headers["access-control-expose-headers"] == "*"
            assert "Origin" in answer.headers["vary"]


async def test_pages_of_other_origins_may_not(rest: Rest, router: FakeRouter) -> None:
    async with rest(router, allowed_origins=("https://chat.example",)) as client:
        for wrong in ({"origin": "https://evil.example"}, {"access-control-request-method": "PUT"}):
            answer = await client.options("/v1/chat/completions", headers={**PREFLIGHT, **wrong})
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "permission_denied")
        answer = await client.get("/v1/models", headers={"origin": "https://evil.example"})
        assert (answer.status_code, answer.headers.get("access-control-allow-origin")) == (200, None)
    async with rest(router) as client:
        assert (await client.options("/v1/chat/completions", headers=PREFLIGHT)).status_code == 405
        answer = await client.get("/v1/models", headers={"origin": "https://chat.example"})
        assert "access-control-allow-origin" not in answer.headers


async def test_pages_of_other_sites_may_not_post_what_browsers_send_unasked(rest: Rest, router: FakeRouter) -> None:
    """A form, or a text, is sent without a preflight request: its answer is kept from the page, but it would be computed."""
    form = {"origin": "https://evil.example", "sec-fetch-site": "cross-site", "content-type": "text/plain"}
    async with rest(router, allowed_origins=("https://chat.example",)) as client:
        answer = await client.post(CHAT, json=ASK, headers=form)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "permission_denied")
        assert router.requests == []
        for own in (
            {"origin": "https://chat.example"},
            {"sec-fetch-site": "same-site"},
            {"sec-fetch-site": "same-origin"},
        ):
            assert (await client.post(CHAT, json=ASK, headers={**form, **own})).status_code == 200
    async with rest(router, allowed_origins=("*",)) as client:
        assert (await client.post(CHAT, json=ASK, headers=form)).status_code == 200


async def test_every_origin_may_be_allowed(rest: Rest, router: FakeRouter) -> None:
    async with rest(router, allowed_origins=("*",)) as client:
        assert (await client.options("/v1/models", headers=PREFLIGHT)).headers["access-control-allow-origin"] == "*"
        answer = await client.get("/v1/models", headers={"origin": "null"})
        assert answer.headers["access-control-allow-origin"] == "*"


async def test_unknown_routes_and_methods_use_the_common_error_body(rest: Rest, router: FakeRouter) -> None:
    async with rest(router) as client:
        missing = await client.get("/v2/nothing")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
        wrong = await client.get(CHAT)
        assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
        assert wrong.json()["error"]["type"] == "invalid_request_error"
        assert missing.headers["x-request-id"] != wrong.headers["x-request-id"]


@pytest.mark.parametrize(
    ("given", "taken"),
    [("a-B_c.1:2", True), ("chatcmpl-x", True), ("", False), ("chatcmpl-", False), ("a b", False), ("x" * 129, False)],
)
async def test_only_well_formed_request_ids_are_accepted(
    rest: Rest, router: FakeRouter, given: str, taken: bool
) -> None:
    async with rest(router) as client:
        answer = await client.get("/health", headers={"x-request-id": given})
    assert (answer.headers["x-request-id"] == given) is taken


@pytest.mark.parametrize("given", ["mine", "resp_mine", "msg_resp_chatcmpl-mine", "chatcmpl-msg_mine"])
async def test_an_answers_id_and_the_requests_own_find_the_same_timeline(
    rest: Rest, router: FakeRouter, given: str
) -> None:
    async with rest(router) as client:
        answer = await client.post(CHAT, json=ASK, headers={"x-request-id": given})
        for name in (given, answer.json()["id"]):
            assert (await client.get(f"/v1/requests/{name}/timeline")).status_code == 200


async def test_the_id_of_a_running_request_is_not_reused(rest: Rest) -> None:
    gate = asyncio.Event()
    async with rest(FakeRouter([gate, *HELLO])) as client, asyncio.TaskGroup() as group:
        posts = [group.create_task(client.post(CHAT, json=ASK, headers={"x-request-id": "same"})) for _ in range(2)]
        await asyncio.sleep(0)
        gate.set()
    assert len({(await post).headers["x-request-id"] for post in posts}) == 2


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "soon", "601"])
async def test_an_invalid_timeout_header_is_refused(rest: Rest, router: FakeRouter, value: str) -> None:
    async with rest(router) as client:
        answer = await client.post(CHAT, json=ASK, headers={"x-request-timeout": value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-request-timeout")


@each_endpoint
@pytest.mark.slow
async def test_no_request_exceeds_its_timeout(rest: Rest, endpoint: Endpoint) -> None:
    path, ask = endpoint.path, endpoint.ask
    router = FakeRouter([asyncio.Event()])
    async with rest(router) as client:
        answer = await client.post(path, json=ask, headers={"x-request-timeout": "0.01"})
        assert answer.status_code == 504
        assert "took longer" in endpoint.refusal(answer.json())
        assert router.closed.is_set() or not router.requests, "on a slow machine it is over before the router is asked"
        router.script = [TokenChunk((1,), "x"), asyncio.Event()]
        answer = await client.post(path, json={**ask, "stream": True}, headers={"x-request-timeout": "1"})
        is_stream = answer.status_code == 200  # but on a slow machine
        assert "took longer" in (endpoint.failure(answer.text) if is_stream else endpoint.refusal(answer.json()))


@each_endpoint
@pytest.mark.parametrize("how", ["whole", "stream", "tokenize"])
async def test_an_answer_that_comes_after_the_deadline_is_a_timeout(rest: Rest, endpoint: Endpoint, how: str) -> None:
    """The event loop was held up, so that no timer has ended the request."""
    path, ask = endpoint.path, {**endpoint.ask, "stream": how == "stream"}
    if how == "tokenize":
        path, ask = ("/v1/messages/count_tokens" if endpoint.is_anthropics else "/tokenize"), ASK
    router = BusyRouter(0.2)
    async with rest(router) as client:
        answer = await client.post(path, json=ask, headers={"x-request-timeout": "0.1"})
        assert answer.status_code == 504
        assert "took longer" in answer.json()["error"]["message"]
        assert (await client.post(path, json=ask)).status_code == 200


# --- bounds -----------------------------------------------------------------------------------------------------------


@each_endpoint
async def test_a_body_above_the_limit_is_413_with_and_without_content_length(
    rest: Rest, router: FakeRouter, endpoint: Endpoint
) -> None:
    async def chunks() -> Any:
        for _ in range(5):
            yield b"x" * 1000

    async with rest(router, max_body_bytes=2048, max_buffered_bytes=4096) as client:
        assert (await client.post(endpoint.path, content=b"x" * 2049)).status_code == 413
        answer = await client.post(endpoint.path, content=chunks())
        assert answer.status_code == 413
        assert "2048 bytes" in endpoint.refusal(answer.json())
    assert router.requests == []


async def test_a_body_that_does_not_arrive_is_408_and_holds_no_capacity(rest: Rest, router: FakeRouter) -> None:
    stuck = asyncio.Event()

    async def chunks() -> Any:
        yield b"{"
        stuck.set()
        await asyncio.Event().wait()

    async with (
        rest(router, max_body_bytes=1024, max_buffered_bytes=1100, body_timeout_s=0.3) as client,
        asyncio.TaskGroup() as group,
    ):
        slow = group.create_task(client.post(CHAT, content=chunks(), headers={"content-length": "1024"}))
        await stuck.wait()
        assert (await client.post(CHAT, json=ASK)).status_code == 200
        answer = await slow
        assert (answer.status_code, answer.json()["error"]["code"]) == (408, "request_timeout")


@each_endpoint
async def test_a_deep_body_is_refused(rest: Rest, router: FakeRouter, endpoint: Endpoint) -> None:
    async with rest(router) as client:
        for opening in ("[", '{"a": [', '{"input": [{"content": '):
            deep = json.dumps({**endpoint.ask, "metadata": "?"}).replace('"?"', opening * 20_000)
            answer = await client.post(endpoint.path, content=deep.encode())
            assert answer.status_code == 400
            assert "not valid JSON" in endpoint.refusal(answer.json())


@each_endpoint
async def test_requests_above_the_bounds_are_429_until_capacity_is_free(rest: Rest, endpoint: Endpoint) -> None:
    path, ask = endpoint.path, endpoint.ask
    gate = asyncio.Event()
    router = FakeRouter([gate, *HELLO])
    async with (
        rest(router, max_concurrent_requests=2, max_body_bytes=1024, max_buffered_bytes=1050) as client,
        asyncio.TaskGroup() as group,
    ):
        first = group.create_task(client.post(path, json=ask))
        await router.next_request()
        by_bytes = await client.post(path, content=b" " * 1024)
        second = group.create_task(client.post(path, json=ask))
        await router.next_request()
        by_count = await client.post(path, json=ask)
        for refused in (by_bytes, by_count):
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        gate.set()
        assert (await first).status_code == (await second).status_code == 200
        assert (await client.post(path, json=ask)).status_code == 200


@pytest.mark.slow
@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(BODY.map(lambda body: json.dumps(body).encode()) | st.binary())
async def test_no_body_causes_a_server_error(rest: Rest, body: bytes) -> None:
    async with rest(FakeRouter()) as client:
        answer = await client.post(CHAT, content=body)
    assert answer.status_code in (200, 400)
    if answer.status_code == 400:
        assert answer.json()["error"]["message"]


# --- disconnects ------------------------------------------------------------------------------------------------------


@each_endpoint
@pytest.mark.parametrize("script", [[], [TokenChunk((1,), "x")]], ids=["waiting", "streaming"])
async def test_a_disconnect_cancels_the_request_at_the_router(
    rest: Rest, endpoint: Endpoint, script: list[Any]
) -> None:
    router = FakeRouter([*script, asyncio.Event()])
    async with rest(router) as client, asyncio.timeout(60):
        app = client._transport.app  # type: ignore[attr-defined]
        body = json.dumps({**endpoint.ask, "stream": True}).encode()
        leave, streaming = asyncio.Event(), asyncio.Event()
        messages = [{"type": "http.request", "body": body, "more_body": False}]
        sent: list[Any] = []

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await leave.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)
            if b'"x"' in message.get("body", b""):
                streaming.set()

        scope = {
            "type": "http",
            "method": "POST",
            "path": endpoint.path,
            "headers": [],
            "query_string": b"",
            "root_path": "",
        }
        async with asyncio.TaskGroup() as group:
            group.create_task(app(scope, receive, send))
            await (streaming.wait() if script else router.next_request())
            leave.set()
        assert router.closed.is_set()
        assert not any(endpoint.ends[0].encode() in message.get("body", b"") for message in sent)


async def test_an_answer_without_text_is_an_empty_string(rest: Rest) -> None:
    async with rest(FakeRouter(FINISH)) as client:
        answer = await client.post(CHAT, json=ASK)
    assert answer.json()["choices"][0]["message"]["content"] == ""
