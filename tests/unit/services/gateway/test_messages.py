"""Anthropic's Messages: what reaches the router, and blocks, events and errors as its client parses them."""

from typing import Any

import pytest
from anthropic.types import Message as AnthropicMessage
from anthropic.types import RawMessageStreamEvent
from pydantic import TypeAdapter

from tests.unit.services.gateway.conftest import Rest
from tests.unit.services.gateway.endpoints import MESSAGES
from tests.unit.services.gateway.fakes import FINISH, HELLO, FakeRouter
from tests.unit.services.gateway.test_responses import THINKING
from tests.unit.services.gateway.test_routes import PNG, PNG_URL
from tests.unit.services.gateway.test_surface import CALLS, IN_PIECES
from triptych.domain.chat import MediaPart, Message, TextPart, ToolCall, ToolChoice
from triptych.domain.generation import ChatFinished, FieldsIgnored, TokenChunk, ToolCallMade, Usage
from triptych.domain.media import Modality
from triptych.domain.sampling import SamplingParams
from triptych.errors import InvalidMedia, InvalidRequest
from triptych.services.gateway.request_fields import HEADER

PATH, ASK = MESSAGES.path, MESSAGES.ask
COUNT = f"{PATH}/count_tokens"
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
INLINE = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": PNG_URL.partition(",")[2]},
}
AT_URL = {"type": "image", "source": {"type": "url", "url": PNG_URL}}
TOOL = {"name": "f", "input_schema": {"type": "object"}}
TURNS = [
    {"role": "user", "content": [INLINE, {"type": "text", "text": "What?", "cache_control": {"type": "ephemeral"}}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "s"},
            {"type": "text", "text": "See"},
            {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": [AT_URL]},
            {"type": "tool_result", "tool_use_id": "c2", "content": "done"},
            {"type": "text", "text": "Go."},
        ],
    },
]


async def test_the_router_gets_blocks_as_messages(rest: Rest, router: FakeRouter) -> None:
    body = {
        **ASK,
        "system": [{"type": "text", "text": "Be brief."}],
        "messages": TURNS,
        "max_tokens": 5,
        "temperature": 0,
        "top_k": 3,
        "stop_sequences": ["\n"],
        "tools": [TOOL],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"effort": "low"},
    }
    async with rest(router) as client:
        answer = await client.post(PATH, json=body, headers={"anthropic-version": "2023-06-01"})
    assert (answer.status_code, answer.headers[HEADER].split(", ")) == (
        200,
        [
            "messages[].content[].cache_control",
            "messages[].content[].signature",
            "messages[].content[].source.media_type",
        ],
    )
    (request,) = router.requests
    image = MediaPart(Modality.IMAGE, PNG)
    assert request.messages == (
        Message("system", (TextPart("Be brief."),)),
        Message("user", (image, TextPart("What?"))),
        Message("assistant", (TextPart("See"),), (ToolCall("c1", "f", '{"a": 1}'),), "", "Hm."),
        Message("tool", (image,), (), "c1"),
        Message("tool", (TextPart("done"),), (), "c2"),
        Message("user", (TextPart("Go."),)),
    )
    assert request.sampling == SamplingParams(temperature=0, top_k=3, max_tokens=5, stop=("\n",))
    assert request.tools == '[{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]'
    assert request.tool_choice == ToolChoice(required=True, parallel=False)
    assert request.template_kwargs == '{"reasoning_effort": "low", "enable_thinking": true, "thinking_budget": 1024}'


async def test_a_message_has_the_clients_form(rest: Rest) -> None:
    usage = Usage(19, 3, image_tokens=16, cached_tokens=4, reasoning_tokens=2)
    async with rest(FakeRouter([*THINKING[:-1], ChatFinished(usage)])) as client:
        answer = await client.post(PATH, json=ASK)
    message = AnthropicMessage.model_validate(answer.json())
    assert message.id == "msg_" + answer.headers["x-request-id"]
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert (message.content[0].thinking, message.content[2].input) == ("Hm.", {"a": 1})  # type: ignore[union-attr]
    assert message.stop_reason == "tool_use"
    assert answer.json()["usage"] == {
        "input_tokens": 15,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
        "output_tokens": 3,
        "output_tokens_details": {"thinking_tokens": 2},
    }


@pytest.mark.parametrize("arguments", ['{"x": 1e999}', '{"x": NaN}', '{"x": ', "[1]", "[" * 100_000])
async def test_arguments_that_are_no_json_object_are_given_as_text(rest: Rest, arguments: str) -> None:
    async with rest(FakeRouter([ToolCallMade(ToolCall("c", "f", arguments), 0), *FINISH])) as client:
        answer = await client.post(PATH, json=ASK)
    assert answer.status_code == 200
    assert answer.json()["content"][0]["input"] == {"arguments": arguments}


async def test_events_describe_each_block_from_its_beginning_to_its_end(rest: Rest) -> None:
    async with rest(FakeRouter(THINKING)) as client:
        events = MESSAGES.events((await client.post(PATH, json={**ASK, "stream": True})).text)
    for event in events:
        if event["type"] != "ping":
            EVENT.validate_python(event)
    told = [event["delta"]["type"] if "index" in event and "delta" in event else event["type"] for event in events]
    assert told == [
        "message_start",
        "ping",
        *("content_block_start", "thinking_delta", "thinking_delta", "signature_delta", "content_block_stop"),
        *("content_block_start", "text_delta", "content_block_stop"),
        *("content_block_start", "input_json_delta", "content_block_stop") * 2,
        "message_delta",
        "message_stop",
    ]
    assert [event["index"] for event in events if event["type"] == "content_block_stop"] == [0, 1, 2, 3]
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == 3


async def test_arguments_in_pieces_are_deltas_of_their_block(rest: Rest) -> None:
    router = FakeRouter(IN_PIECES)
    async with rest(router) as client:
        events = MESSAGES.events((await client.post(PATH, json={**ASK, "stream": True})).text)
    assert router.requests[0].streams_arguments
    deltas = [event for event in events if event["type"] == "content_block_delta"]
    pieces = [(event["index"], event["delta"]["partial_json"]) for event in deltas]
    assert [piece for piece in pieces if piece[1]] == [(0, CALLS[0].arguments), (1, "{"), (1, "}")]
    assert [event["index"] for event in events if event["type"] == "content_block_stop"] == [0, 1]


async def test_the_tokens_of_a_prompt_are_counted(rest: Rest, router: FakeRouter) -> None:
    asked = {name: value for name, value in ASK.items() if name != "max_tokens"}
    async with rest(router) as client:
        answer = await client.post(COUNT, json={**asked, "messages": TURNS[:1], "tools": [TOOL], "metadata": {}})
        assert (answer.json(), "metadata" in answer.headers[HEADER]) == ({"input_tokens": 3}, True)
        assert (await client.post(COUNT, json=ASK)).json()["error"]["message"].startswith("max_tokens: ")
        missing = await client.post(COUNT, json={**asked, "model": "other"})
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")
    assert router.requests[0].media == (MediaPart(Modality.IMAGE, PNG),)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (InvalidMedia("it is broken", param="messages[1].content[0]"), "messages[0].content[0].source.data: it is"),
        (
            InvalidMedia("it is broken", param="messages[3].content[0]"),
            "messages[2].content[0].content[0].source.url: ",
        ),
        (InvalidRequest("messages[2].tool_calls: no tools", param="messages[2].tool_calls"), "messages[1]: no tools"),
        (InvalidRequest("too deep", param="response_format"), "output_config.format: too deep"),
        (InvalidRequest("tools: none", param="tools"), "tools: none"),
    ],
)
async def test_an_error_of_the_router_names_the_field_of_this_api(
    rest: Rest, error: InvalidRequest, message: str
) -> None:
    async with rest(FakeRouter([error])) as client:
        answer = await client.post(PATH, json={**ASK, "system": "s", "messages": TURNS})
    assert answer.status_code == 400
    assert MESSAGES.refusal(answer.json()).startswith(message)


async def test_what_the_template_does_not_use_is_named_as_this_api_names_it(rest: Rest) -> None:
    unused = ("chat_template_kwargs.enable_thinking", "chat_template_kwargs.thinking_budget")
    async with rest(FakeRouter([(FieldsIgnored(unused), TokenChunk((1,), "x")), *HELLO])) as client:
        answer = await client.post(PATH, json={**ASK, "thinking": {"type": "enabled", "budget_tokens": 5}})
    assert answer.headers[HEADER] == "thinking.budget_tokens, thinking.type"


def content(*blocks: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(blocks)}]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [5]}, "messages[0]"),
        ({"messages": [{"role": "critic", "content": "x"}]}, "messages[0].role"),
        ({"messages": [*ASK["messages"], {"role": "assistant", "content": "The answer is"}]}, "messages[1]"),
        (content(5), "messages[0].content[0]"),
        (content(), "messages[0].content"),
        (content({"type": "document", "source": {}}), "messages[0].content[0]"),
        (content({"type": "tool_use", "id": "x", "name": "f", "input": {}}), "messages[0].content[0]"),
        (content({"type": "redacted_thinking", "data": ""}, role="assistant"), "messages[0].content[0]"),
        (content({"type": "image", "source": {"type": "file", "file_id": "x"}}), "messages[0].content[0].source"),
        (content({"type": "image", "source": {"type": "base64", "data": "?"}}), "messages[0].content[0].source.data"),
        (content({"type": "image", "source": {"type": "url", "url": "x:"}}), "messages[0].content[0].source.url"),
        (content({"type": "tool_result", "content": "x"}), "messages[0].content[0].tool_use_id"),
        (
            content({"type": "tool_result", "tool_use_id": "x", "content": [{"type": "search_result"}]}),
            "messages[0].content[0].content[0]",
        ),
        ({"system": [INLINE]}, "system[0]"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0]"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"thinking": {"type": "much"}}, "thinking.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"container": "x"}, "container"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"system": [{"type": "text", "text": ""}] * 4097}, "system: 4097 content parts"),
        (
            content({"type": "tool_result", "tool_use_id": "x", "content": [{"type": "text", "text": ""}] * 4097}),
            "messages: 4098 content parts",
        ),
    ],
)
async def test_what_is_not_served_is_refused_by_name(
    rest: Rest, router: FakeRouter, fields: dict[str, Any], param: str
) -> None:
    async with rest(router) as client:
        answer = await client.post(PATH, json={**ASK, **fields})
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    assert MESSAGES.refusal(answer.json()).startswith(param)
    assert router.requests == []
