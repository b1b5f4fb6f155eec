"""Fields that are not served: refused by name, or named in a header; and the table of them."""

from pathlib import Path
from typing import Any, get_type_hints

import pytest
from anthropic.types import message_create_params
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params
from pydantic import BaseModel

from scripts import request_fields
from tests.unit.services.gateway.conftest import Rest
from tests.unit.services.gateway.endpoints import MESSAGES, RESPONSES
from tests.unit.services.gateway.fakes import HELLO, FakeRouter
from triptych.domain.generation import FieldsIgnored, Reasoned, TokenChunk
from triptych.domain.sampling import Grammar, ResponseFormat
from triptych.services.gateway.keys import KeyEntry, key_digest
from triptych.services.gateway.messages_models import MessagesRequest
from triptych.services.gateway.openai_models import ChatCompletionRequest, CompletionRequest
from triptych.services.gateway.request_fields import HEADER, MAX_NAMED, On, Use, rows_of
from triptych.services.gateway.responses_models import ResponsesRequest

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ASK: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
PROMPT: dict[str, Any] = {"model": "demo", "prompt": "hi"}
BODIES = {
    On.CHAT: (CHAT, ASK),
    On.COMPLETIONS: (COMPLETIONS, PROMPT),
    On.RESPONSES: (RESPONSES.path, RESPONSES.ask),
    On.MESSAGES: (MESSAGES.path, MESSAGES.ask),
}
ROUTES = list(BODIES)
MODELS: dict[On, type[BaseModel]] = {
    On.CHAT: ChatCompletionRequest,
    On.COMPLETIONS: CompletionRequest,
    On.RESPONSES: ResponsesRequest,
    On.MESSAGES: MessagesRequest,
}


@pytest.mark.parametrize("route", ROUTES)
def test_the_table_has_exactly_the_fields_that_are_served(route: On) -> None:
    served = {name for name, row in rows_of(route).items() if row.use is Use.SERVED}
    assert served == set(MODELS[route].model_fields)


@pytest.mark.parametrize(
    ("route", "params", "by"),
    [
        (On.CHAT, chat_params.CompletionCreateParamsStreaming, "O"),
        (On.COMPLETIONS, completion_create_params.CompletionCreateParamsStreaming, "O"),
        (On.RESPONSES, response_create_params.ResponseCreateParamsStreaming, "O"),
        (On.MESSAGES, message_create_params.MessageCreateParamsStreaming, "A"),
    ],
)
def test_the_table_has_all_fields_of_the_clients_package(route: On, params: type, by: str) -> None:
    rows = rows_of(route)
    assert {name for name in get_type_hints(params) if name not in rows or by not in rows[name].by} == set()


def test_the_page_has_the_current_table() -> None:
    assert request_fields.PAGE.read_text() == request_fields.page()


@pytest.mark.parametrize("route", ROUTES)
async def test_each_field_that_is_not_served_is_refused_by_name_or_named_in_the_header(rest: Rest, route: On) -> None:
    path, body = BODIES[route]
    async with rest(FakeRouter(HELLO)) as client:
        for name, row in rows_of(route).items():
            if row.use is Use.SERVED or "." in name:
                continue
            answer = await client.post(path, json={**body, name: "something"})
            if row.use is Use.REFUSED:
                error = answer.json()["error"]
                assert (answer.status_code, error["message"].partition(":")[0]) == (400, name)
                assert error.get("param", name) == name
                for harmless in row.harmless:
                    accepted = await client.post(path, json={**body, name: harmless})
                    assert (accepted.status_code, HEADER in accepted.headers) == (200, False), name
            else:
                assert (answer.status_code, answer.headers[HEADER]) == (200, name)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_header_names_fields_of_every_depth_and_those_that_nobody_defines(rest: Rest, stream: bool) -> None:
    image = {"url": "data:image/png;base64,AAAA", "detail": "low"}
    body = {
        "model": "demo",
        "messages": [
            {"role": "system", "content": "a", "name": "x"},
            {"role": "user", "content": [{"type": "image_url", "image_url": image, "uuid": "1"}], "name": "y"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "strict": True}}],
        "stream_options": {"include_obfuscation": False},
        "new field\n": 1,
        "other": {},
        "stream": stream,
        "prompt_cache_key": None,
    }
    async with rest(FakeRouter(HELLO)) as client:
        answer = await client.post(CHAT, json=body)
    assert answer.headers[HEADER].split(", ") == [
        "messages[].content[].image_url.detail",
        "messages[].content[].uuid",
        "messages[].name",
        "other",
        "stream_options.include_obfuscation",
        "tools[].function.strict",
        "...",
    ]


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"response_format": {"type": "text", "json_schema": "x"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_object", "schema": {}, "json_schema": []}},
            "response_format.json_schema, response_format.schema",
        ),
        ({"tools": [{"type": "function", "function": {"name": "f"}, "cache_control": {}}]}, "tools[].cache_control"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f"}}],
                "tool_choice": {"type": "function", "function": {"name": "f", "x": 1}, "y": 1},
            },
            "tool_choice.function.x, tool_choice.y",
        ),
        ({"messages": [{"role": "user", "content": "a", "tool_call_id": "1"}]}, "messages[].tool_call_id"),
    ],
)
async def test_fields_of_another_kind_or_role_are_named(rest: Rest, fields: dict[str, Any], names: str) -> None:
    async with rest(FakeRouter(HELLO)) as client:
        answer = await client.post(CHAT, json={**ASK, **fields})
    assert (answer.status_code, answer.headers.get(HEADER)) == (200, names)


async def test_completions_do_not_look_into_fields_of_chats(rest: Rest) -> None:
    path, body = BODIES[On.COMPLETIONS]
    async with rest(FakeRouter(HELLO)) as client:
        answer = await client.post(path, json={**body, "messages": 1, "tools": [1], "tool_choice": {}})
    assert (answer.status_code, answer.headers[HEADER]) == (200, "messages, tool_choice, tools")


async def test_the_names_in_the_header_are_bounded(rest: Rest) -> None:
    async with rest(FakeRouter(HELLO)) as client:
        answer = await client.post(CHAT, json={**ASK, **{f"new{number}": 1 for number in range(100)}})
    named = answer.headers[HEADER].split(", ")
    assert (len(named), named[-1]) == (MAX_NAMED + 1, "...")


async def test_a_request_without_such_fields_has_no_header(rest: Rest) -> None:
    async with rest(FakeRouter(HELLO)) as client:
        assert HEADER not in (await client.post(CHAT, json=ASK)).headers


@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_template_does_not_use_is_named_as_the_router_says(rest: Rest, stream: bool) -> None:
    first = (FieldsIgnored(("chat_template_kwargs.a", "reasoning_effort")), TokenChunk((1,), "x"))
    router = FakeRouter([first, *HELLO])
    asked = {**ASK, "reasoning_effort": "low", "chat_template_kwargs": {"a": 1}, "user": "u", "stream": stream}
    async with rest(router) as client:
        answer = await client.post(CHAT, json=asked)
    assert answer.headers[HEADER] == "chat_template_kwargs.a, reasoning_effort, user"
    assert router.requests[0].template_kwargs == '{"a": 1, "reasoning_effort": "low"}'


async def test_variables_of_the_template_are_bounded(rest: Rest) -> None:
    async with rest(FakeRouter(HELLO)) as client:
        answer = await client.post(CHAT, json={**ASK, "chat_template_kwargs": {"a": "x" * (64 << 10)}})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "chat_template_kwargs")


@pytest.mark.parametrize(("path", "body"), [BODIES[On.CHAT], BODIES[On.COMPLETIONS]])
async def test_vllms_structured_outputs_are_response_formats_where_they_are_equal(
    rest: Rest, path: str, body: dict[str, Any]
) -> None:
    schema = {"type": "object"}
    wanted = ResponseFormat(Grammar.JSON_SCHEMA, '{"type": "object"}')
    router = FakeRouter(HELLO)
    fields: dict[str, Any]
    async with rest(router) as client:
        for fields in (
            {"structured_outputs": {"json": schema, "regex": None, "disable_fallback": False}},
            {"structured_outputs": {"json": '{"type": "object"}'}},
            {"guided_json": schema},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
        ):
            answer = await client.post(path, json={**body, **fields})
            assert (answer.status_code, HEADER in answer.headers) == (200, False)
            assert router.requests[-1].sampling.response_format == wanted
        assert (await client.post(path, json={**body, "structured_outputs": {"json_object": True}})).status_code == 200
        assert router.requests[-1].sampling.response_format == ResponseFormat(Grammar.JSON_OBJECT)
        for fields, param in (
            ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs.choice"),
            ({"structured_outputs": {"json": schema}, "guided_json": schema}, "structured_outputs"),
        ):
            refused = await client.post(path, json={**body, **fields})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


async def test_special_tokens_are_shown_if_they_are_not_to_be_skipped(rest: Rest) -> None:
    router = FakeRouter(HELLO)
    async with rest(router) as client:
        for skip in (None, True, False):
            await client.post(CHAT, json={**ASK, "skip_special_tokens": skip})
    assert [request.sampling.special_tokens for request in router.requests] == [False, False, True]


@pytest.mark.parametrize(
    ("fields", "least", "priority", "named"),
    [
        ({"service_tier": "auto"}, None, 0, False),
        ({"service_tier": "flex"}, None, 1, False),
        ({"service_tier": "priority"}, None, -1, False),
        ({"service_tier": "priority", "priority": 3}, None, 3, False),
        ({"service_tier": "priority"}, 0, 0, True),
        ({"service_tier": "default"}, 5, 5, True),
        ({"service_tier": "scale"}, None, 0, True),
    ],
)
async def test_a_tier_is_a_priority_as_far_as_the_key_allows(
    rest: Rest, tmp_path: Path, fields: dict[str, Any], least: int | None, priority: int, named: bool
) -> None:
    entry = KeyEntry(sha256=key_digest("key").hex(), least_priority=least)
    lines = [f'sha256 = "{entry.sha256}"', *([] if least is None else [f"least_priority = {least}"])]
    keys = tmp_path / "keys.toml"
    keys.write_text("\n".join(["[keys.one]", *lines]))
    router = FakeRouter(HELLO)
    async with rest(router, keys=keys) as client:
        answer = await client.post(CHAT, json={**ASK, **fields}, headers={"authorization": "Bearer key"})
    assert answer.status_code == 200
    assert router.requests[0].priority == priority
    assert (answer.headers.get(HEADER) == "service_tier") is named


# --- reasoning --------------------------------------------------------------------------------------------------------

THOUGHTS = (
    (TokenChunk((1,), ""), Reasoned("On")),
    (TokenChunk((2,), ""), Reasoned("e")),
    *HELLO,
)


async def test_reasoning_is_part_of_messages_and_deltas_by_both_names(rest: Rest) -> None:
    async with rest(FakeRouter(THOUGHTS)) as client:
        message = (await client.post(CHAT, json=ASK)).json()["choices"][0]["message"]
        stream = (await client.post(CHAT, json={**ASK, "stream": True})).text
        without = (await client.post(CHAT, json={**ASK, "include_reasoning": False})).json()["choices"][0]["message"]
    assert message == {
        "role": "assistant",
        "content": "Hello",
        "refusal": None,
        "reasoning": "One",
        "reasoning_content": "One",
    }
    assert '"delta":{"reasoning":"On","reasoning_content":"On"}' in stream
    assert without == {"role": "assistant", "content": "Hello", "refusal": None}


async def test_an_answer_of_reasoning_alone_has_no_content(rest: Rest) -> None:
    async with rest(FakeRouter([*THOUGHTS[:2], *HELLO[-2:]])) as client:
        message = (await client.post(CHAT, json=ASK)).json()["choices"][0]["message"]
    assert (message["content"], message["reasoning"]) == (None, "One")


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
async def test_reasoning_of_earlier_turns_reaches_the_router(rest: Rest, name: str) -> None:
    router = FakeRouter(HELLO)
    turns = [*ASK["messages"], {"role": "assistant", "content": "a", name: "Thus"}, *ASK["messages"]]
    async with rest(router) as client:
        answer = await client.post(CHAT, json={**ASK, "messages": turns, "separate_reasoning": False})
    assert (answer.status_code, HEADER in answer.headers) == (200, False)
    assert [message.reasoning for message in router.requests[0].messages] == ["", "Thus", ""]
    assert not router.requests[0].separates_reasoning
