"""OpenAI's Responses: what reaches the router, items and events as its client parses them, and stored responses."""

import base64
from pathlib import Path
from typing import Any

import pytest
from openai.types.responses import Response, ResponseItemList, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.unit.services.gateway.conftest import Rest
from tests.unit.services.gateway.endpoints import RESPONSES
from tests.unit.services.gateway.fakes import FINISH, HELLO, FakeRouter
from tests.unit.services.gateway.test_routes import PNG, PNG_URL
from tests.unit.services.gateway.test_surface import CALLING, CALLS, IN_PIECES, LIKELY, key_file
from triptych.domain.chat import MediaPart, Message, TextPart, ToolCall, ToolChoice
from triptych.domain.generation import ChoiceFinished, FieldsIgnored, FinishReason, Reasoned, TokenChunk
from triptych.domain.media import Modality
from triptych.domain.sampling import Grammar, ResponseFormat, SamplingParams
from triptych.errors import InvalidMedia
from triptych.services.gateway import responses_form
from triptych.services.gateway.request_fields import HEADER
from triptych.services.gateway.response_store import StoreLimits

PATH, ASK = RESPONSES.path, RESPONSES.ask
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": None}
THINKING = (
    (TokenChunk((1,), ""), Reasoned("Hm")),
    (TokenChunk((2,), ""), Reasoned(".")),
    TokenChunk((3,), "See:"),
    *CALLING,
)


async def test_the_router_gets_items_as_messages(rest: Rest, router: FakeRouter) -> None:
    body = {
        "model": "demo",
        "instructions": "Be brief.",
        "input": [
            {"role": "developer", "content": "Rules."},
            {
                "type": "message",
                "role": "user",
                "content": [
                    {"type": "input_image", "image_url": PNG_URL, "detail": "auto"},
                    {"type": "input_text", "text": "What?"},
                ],
            },
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "See"}]},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
            {"type": "function_call", "call_id": "c2", "name": "f", "arguments": "{}"},
            {
                "type": "function_call_output",
                "call_id": "c1",
                "output": [{"type": "input_image", "image_url": PNG_URL}],
            },
            {"type": "function_call_output", "call_id": "c2", "output": "done"},
        ],
        "tools": [TOOL],
        "tool_choice": {"type": "function", "name": "f"},
        "parallel_tool_calls": False,
        "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}},
        "reasoning": {"effort": "low"},
        "max_output_tokens": 5,
        "temperature": 0,
        "seed": 7,
        "priority": 2,
    }
    async with rest(router) as client:
        answer = await client.post(PATH, json=body)
    assert (answer.status_code, answer.headers[HEADER]) == (200, "input[].content[].detail, input[].id")
    (request,) = router.requests
    image = MediaPart(Modality.IMAGE, PNG)
    assert request.messages == (
        Message("system", (TextPart("Be brief."),)),
        Message("system", (TextPart("Rules."),)),
        Message("user", (image, TextPart("What?"))),
        Message("assistant", (TextPart("See"),), (ToolCall("c1", "f", "{}"), ToolCall("c2", "f", "{}")), "", "Hm."),
        Message("tool", (image,), (), "c1"),
        Message("tool", (TextPart("done"),), (), "c2"),
    )
    wanted = ResponseFormat(Grammar.JSON_SCHEMA, '{"type": "object"}')
    assert request.sampling == SamplingParams(temperature=0, seed=7, max_tokens=5, response_format=wanted)
    assert request.tools == '[{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]'
    assert request.tool_choice == ToolChoice(name="f", parallel=False)
    assert (request.template_kwargs, request.priority) == ('{"reasoning_effort": "low"}', 2)
    assert request.separates_reasoning


async def test_a_response_has_the_clients_form(rest: Rest, router: FakeRouter) -> None:
    async with rest(router) as client:
        answer = await client.post(PATH, json={**ASK, "metadata": {"a": "b"}, "tools": [TOOL]})
    told = answer.json()
    response = Response.model_validate(told)
    assert (response.status, response.output_text, response.metadata) == ("completed", "Hello", {"a": "b"})
    assert response.id == "resp_" + answer.headers["x-request-id"]
    assert (told["store"], told["tools"]) == (True, [{**TOOL, "description": None}])
    assert told["usage"] == {
        "input_tokens": 19,
        "input_tokens_details": {
            "cached_tokens": 0,
            "cache_write_tokens": 0,
            "image_tokens": 16,
            "audio_tokens": 0,
            "video_tokens": 0,
        },
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 22,
    }


async def test_events_are_numbered_and_describe_each_item_from_its_beginning_to_its_end(rest: Rest) -> None:
    async with rest(FakeRouter(THINKING)) as client:
        stream = await client.post(PATH, json={**ASK, "stream": True})
        whole = (await client.post(PATH, json=ASK)).json()
    events = RESPONSES.events(stream.text)
    for event in events:
        EVENT.validate_python(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    text = ["content_part.added", "{}.delta", "{}.done", "content_part.done"]
    item = ["output_item.added", *text, "output_item.done"]
    thought = [name.format("reasoning_text") for name in item]
    thought.insert(2, "reasoning_text.delta")
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        *thought,
        *[name.format("output_text") for name in item],
        *call,
        *call,
        "completed",
    ]
    output = events[-1]["response"]["output"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert output == done
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call", "function_call"]
    assert output[0]["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert (output[2]["name"], output[2]["arguments"], output[2]["call_id"]) == ("f", '{"a": 1}', "call_1")

    def shape(items: Any) -> Any:
        return [{name: value for name, value in item.items() if name != "id"} for item in items]

    assert shape(whole["output"]) == shape(output)


async def test_arguments_in_pieces_are_deltas_of_their_call(rest: Rest) -> None:
    router = FakeRouter(IN_PIECES)
    async with rest(router) as client:
        events = RESPONSES.events((await client.post(PATH, json={**ASK, "stream": True})).text)
    assert router.requests[0].streams_arguments
    deltas = [(event["output_index"], event["delta"]) for event in events if event["type"].endswith("arguments.delta")]
    assert deltas == [(0, CALLS[0].arguments), (1, "{"), (1, "}")]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [(item["name"], item["arguments"], item["status"]) for item in done] == [
        (CALLS[0].name, CALLS[0].arguments, "completed"),
        (CALLS[1].name, "{}", "completed"),
    ]
    assert events[-1]["response"]["output"] == done


async def test_an_answer_that_is_cut_off_is_incomplete(rest: Rest) -> None:
    router = FakeRouter([TokenChunk((1,), "Hel"), ChoiceFinished(FinishReason.LENGTH), FINISH[1]])
    async with rest(router) as client:
        whole = (await client.post(PATH, json=ASK)).json()
        last = RESPONSES.events((await client.post(PATH, json={**ASK, "stream": True})).text)[-1]
    assert (last["type"], last["response"]["output"][0]["status"]) == ("response.incomplete", "incomplete")
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})


async def test_logprobs_come_with_the_text_that_their_tokens_complete(rest: Rest) -> None:
    async with rest(FakeRouter(LIKELY)) as client:
        whole = (await client.post(PATH, json={**ASK, "top_logprobs": 2})).json()
        asked = {**ASK, "include": ["message.output_text.logprobs"], "stream": True}
        events = RESPONSES.events((await client.post(PATH, json=asked)).text)
    (delta,) = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [entry["logprob"] for entry in delta["logprobs"]] == [-0.5, -9999.0]
    assert whole["output"][0]["content"][0]["logprobs"] == delta["logprobs"]


# --- stored responses -------------------------------------------------------------------------------------------------


async def test_a_conversation_goes_on_after_a_stored_response(rest: Rest) -> None:
    router = FakeRouter(THINKING)
    async with rest(router) as client:
        content = [{"type": "input_image", "image_url": PNG_URL}]
        first = {**ASK, "input": [{"role": "user", "content": content}], "instructions": "Be brief.", "stream": True}
        at = RESPONSES.events((await client.post(PATH, json=first)).text)[-1]["response"]["id"]
        router.script = HELLO
        outputs = [{"type": "function_call_output", "call_id": f"call_{n}", "output": "1"} for n in (1, 2)]
        second = await client.post(PATH, json={**ASK, "input": outputs, "previous_response_id": at})
        assert second.json()["previous_response_id"] == at
        third = {**ASK, "previous_response_id": second.json()["id"], "instructions": "Be long."}
        assert (await client.post(PATH, json=third)).status_code == 200
        messages = router.requests[-1].messages
        roles = ["system", "user", "assistant", "tool", "tool", "assistant", "user"]
        assert [message.role for message in messages] == roles
        assert messages[0].parts == (TextPart("Be long."),)
        assert messages[1].parts == (MediaPart(Modality.IMAGE, PNG),)
        assert (messages[2].reasoning, [call.call_id for call in messages[2].tool_calls]) == (
            "Hm.",
            ["call_1", "call_2"],
        )
        router.script = [InvalidMedia("it is broken", param="messages[1].content[0]")]
        again = (await client.post(PATH, json={**first, "stream": False})).json()["error"]
        assert again["param"] == "input[0].content[0].image_url"


async def test_a_stored_response_is_read_and_deleted_by_its_own_key_alone(
    rest: Rest, router: FakeRouter, tmp_path: Path
) -> None:
    keys, alice, bob = key_file(tmp_path)
    async with rest(router, keys=keys) as client:
        made = (await client.post(PATH, json=ASK, headers=alice)).json()
        one = f"{PATH}/{made['id']}"
        assert (await client.get(one, headers=alice)).json() == made
        assert (await client.get(f"{one}?stream=true", headers=alice)).json()["error"]["param"] == "stream"
        for url in (one, f"{one}/input_items"):
            assert (await client.get(url, headers=bob)).status_code == 404
        assert (await client.delete(one, headers=bob)).status_code == 404
        stranger = await client.post(PATH, json={**ASK, "previous_response_id": made["id"]}, headers=bob)
        assert (stranger.status_code, stranger.json()["error"]["param"]) == (400, "previous_response_id")
        assert (await client.delete(one, headers=alice)).json() == {
            "id": made["id"],
            "object": "response",
            "deleted": True,
        }
        assert (await client.get(one, headers=alice)).status_code == 404


async def test_the_items_of_a_request_are_listed_by_pages(rest: Rest, router: FakeRouter) -> None:
    content = [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": PNG_URL}]
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "done"}
    asked = {**ASK, "input": [{"role": "user", "content": content}, call, output]}
    async with rest(router) as client:
        url = f"{PATH}/{(await client.post(PATH, json=asked)).json()['id']}/input_items"
        newest = (await client.get(url, params={"limit": 2})).json()
        rest_of = (await client.get(url, params={"after": newest["last_id"]})).json()
        for wrong in ({"limit": 0}, {"limit": "x"}, {"order": "up"}, {"after": "x"}):
            answer = await client.get(url, params=wrong)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(wrong)))
    for page in (newest, rest_of):
        ResponseItemList.model_validate(page)
    assert [item["type"] for item in newest["data"]] == ["function_call_output", "function_call"]
    assert (newest["has_more"], rest_of["has_more"]) == (True, False)
    image = "data:image/png;base64," + base64.b64encode(PNG).decode()
    assert rest_of["data"][0]["content"][1]["image_url"] == image


async def test_a_page_encodes_its_own_items_alone(rest: Rest, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[bytes] = []

    def encode(data: bytes) -> bytes:
        encoded.append(data)
        return base64.b64encode(data)

    monkeypatch.setattr(responses_form, "b64encode", encode)
    message = {"role": "user", "content": [{"type": "input_image", "image_url": PNG_URL}]}
    async with rest(FakeRouter()) as client:
        made = (await client.post(PATH, json={**ASK, "input": [message] * 5})).json()
        page = (await client.get(f"{PATH}/{made['id']}/input_items", params={"limit": 1})).json()
    assert (len(page["data"]), page["has_more"], len(encoded)) == (1, True, 1)


async def test_a_page_counts_as_a_request_of_its_key(rest: Rest, tmp_path: Path) -> None:
    keys, alice, _ = key_file(tmp_path, "requests_per_minute = 2\n")
    async with rest(FakeRouter(), keys=keys) as client:
        made = (await client.post(PATH, json=ASK, headers=alice)).json()
        url = f"{PATH}/{made['id']}/input_items"
        assert [(await client.get(url, headers=alice)).status_code for _ in range(2)] == [200, 429]


async def test_a_page_holds_its_bytes_until_it_is_sent(rest: Rest) -> None:
    async with rest(FakeRouter(), max_body_bytes=2000, max_buffered_bytes=2000) as client:
        messages = [{"role": "user", "content": "x" * 500} for _ in range(3)]
        made = (await client.post(PATH, json={**ASK, "input": messages})).json()
        url = f"{PATH}/{made['id']}/input_items"
        codes = [(await client.get(url, params={"limit": limit})).status_code for limit in (1, 3)]
    assert codes == [200, 429]


async def test_a_stream_that_fails_ends_its_open_item_before_the_error(rest: Rest) -> None:
    async with rest(FakeRouter([TokenChunk((1,), "Hel"), InvalidMedia("it is broken")])) as client:
        events = RESPONSES.events((await client.post(PATH, json={**ASK, "stream": True})).text)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[-3:]] == ["response.output_item.done", "error", "response.failed"]
    assert events[-3]["item"]["status"] == "incomplete"


async def test_what_is_not_to_be_stored_or_does_not_fit_is_not_there_later(rest: Rest, router: FakeRouter) -> None:
    async with rest(router, response_store=StoreLimits(max_stored_responses=1)) as client:
        for asked in ({**ASK, "store": False}, {**ASK, "store": False, "stream": True}):
            request_id = (await client.post(PATH, json=asked)).headers["x-request-id"]
            assert (await client.get(f"{PATH}/resp_{request_id}")).status_code == 404
        first, second = [(await client.post(PATH, json=ASK)).json() for _ in range(2)]
        assert (await client.get(f"{PATH}/{first['id']}")).status_code == 404
        assert (await client.get(f"{PATH}/{second['id']}")).status_code == 200
    async with rest(router, response_store=StoreLimits(max_stored_responses=0)) as client:
        assert (await client.post(PATH, json=ASK)).json()["store"] is False


async def test_requests_of_the_same_id_have_responses_of_their_own(rest: Rest, router: FakeRouter) -> None:
    headers = {"x-request-id": "same"}
    async with rest(router) as client:
        first = (await client.post(PATH, json=ASK, headers=headers)).json()["id"]
        second = (await client.post(PATH, json={**ASK, "previous_response_id": first}, headers=headers)).json()["id"]
        assert (first, first != second) == ("resp_same", True)
        assert (await client.post(PATH, json={**ASK, "previous_response_id": second})).status_code == 200
    assert len(router.requests[-1].messages) == 5


async def test_bytes_of_the_conversation_before_count_as_those_of_a_body(rest: Rest, router: FakeRouter) -> None:
    image = "data:image/png;base64," + base64.b64encode(bytes(60_000)).decode()
    asked = {**ASK, "input": [{"role": "user", "content": [{"type": "input_image", "image_url": image}]}]}
    async with rest(router, max_body_bytes=100_000, max_buffered_bytes=100_000) as client:
        at = (await client.post(PATH, json=asked)).json()["id"]
        refused = await client.post(PATH, json={**asked, "previous_response_id": at})
        assert (refused.status_code, refused.json()["error"]["param"]) == (413, "previous_response_id")
        assert (await client.post(PATH, json={**ASK, "previous_response_id": at})).status_code == 200


# --- refusals ---------------------------------------------------------------------------------------------------------


def content(*parts: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": list(parts)}]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": 5}, "input"),
        ({"input": []}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"input": [{"type": "web_search_call"}]}, "input[0]"),
        ({"input": [{"type": ["message"], "role": "user"}]}, "input[0]"),
        ({"input": [{"role": "critic", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]}, "input[].encrypted_content"),
        (content({"type": "input_file", "file_id": "x"}), "input[0].content[0]"),
        (content({"type": "input_image", "file_id": "x"}), "input[0].content[0].image_url"),
        (content({"type": "input_image", "image_url": "ftp://x"}), "input[0].content[0].image_url"),
        (content({"type": "input_audio", "input_audio": {"data": "?"}}), "input[0].content[0].input_audio.data"),
        (content(*[{"type": "input_text", "text": ""}] * 4097), "input"),
        ({"input": [{"type": "reasoning", "summary": [{"type": "summary_text", "text": ""}] * 4097}]}, "input"),
        (
            {
                "input": [
                    {
                        "type": "function_call_output",
                        "call_id": "c",
                        "output": [{"type": "input_text", "text": ""}] * 4097,
                    }
                ]
            },
            "input",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"previous_response_id": "resp_nobody"}, "previous_response_id"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"temperature": "1"}, "temperature"),
    ],
)
async def test_what_is_not_served_is_refused_by_name(
    rest: Rest, router: FakeRouter, fields: dict[str, Any], param: str
) -> None:
    async with rest(router) as client:
        answer = await client.post(PATH, json={**ASK, **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param.replace("[]", ""))
    assert router.requests == []


async def test_what_the_template_does_not_use_is_named_as_this_api_names_it(rest: Rest) -> None:
    first = (FieldsIgnored(("reasoning_effort",)), TokenChunk((1,), "x"))
    async with rest(FakeRouter([first, *HELLO])) as client:
        answer = await client.post(PATH, json={**ASK, "reasoning": {"effort": "low", "summary": "auto"}})
    assert answer.headers[HEADER] == "reasoning.effort, reasoning.summary"
