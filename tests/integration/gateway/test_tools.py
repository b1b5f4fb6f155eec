"""Tool calls end to end, with OpenAI's and Anthropic's clients and the SDK: the demo model with templates that make it call tools."""

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
import pytest_asyncio

from triptych import AsyncClient
from triptych.cli.cluster import LocalCluster
from triptych.client import ToolChoice, assistant, tool, user
from triptych.client.options import ChatOptions
from triptych.demo import MODEL_DIR
from triptych.domain.generation import FinishReason
from triptych.errors import InvalidRequest

pytestmark = [pytest.mark.timeout(180), pytest.mark.asyncio(loop_scope="module")]

TAGGED = """\
{%- if tools -%}<|user|>Tools: {{ tools | tojson }} Answer <tool_call>{"name": ..., "arguments": ...}</tool_call><|end|>{%- endif -%}
{%- for m in messages -%}<|{{ 'user' if m.role == 'tool' else m.role }}|>
  {%- if m.content is string -%}{{ m.content }}
  {%- else -%}{%- for part in m.content -%}{{ '<image>\n' if part.type == 'image' else part.text }}{%- endfor -%}{%- endif -%}
  {%- for call in m.tool_calls -%}<tool_call>{{ call.function | tojson }}</tool_call>{%- endfor -%}<|end|>
{%- endfor -%}<|assistant|>"""
BARE = TAGGED.replace(
    '<tool_call>{"name": ..., "arguments": ...}</tool_call>', '{"name": ..., "parameters": ...}'
).replace(
    "<tool_call>{{ call.function | tojson }}</tool_call>",
    '{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}',
)
LEVEL = {
    "type": "object",
    "properties": {"level": {"enum": [1, 2, 3]}},
    "required": ["level"],
    "additionalProperties": False,
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "set_level", "parameters": LEVEL}},
    {"type": "function", "function": {"name": "stop", "parameters": NOTHING}},
]
ASK: dict[str, Any] = {
    "model": "caller",
    "messages": [{"role": "user", "content": "Go."}],
    "tools": TOOLS,
    "temperature": 1.5,
    "max_tokens": 200,
}
CALLED = [
    *ASK["messages"],
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "stop", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "done"},
]


def make_model(directory: Path, template: str) -> Path:
    shutil.copytree(MODEL_DIR, directory)
    (directory / "chat_template.jinja").write_text(template)
    return directory


FORMS = [pytest.param(TAGGED, id="tagged"), pytest.param(BARE, id="bare", marks=pytest.mark.extended)]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=FORMS)
async def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[LocalCluster]:
    model = make_model(tmp_path_factory.mktemp("model") / "caller", request.param)
    async with LocalCluster(model, roles="E:1,PD:1", log_dir=tmp_path_factory.mktemp("logs")) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(cluster: LocalCluster) -> AsyncIterator[Any]:
    async with (
        openai.DefaultAsyncHttpxClient(trust_env=False) as http,
        openai.AsyncOpenAI(base_url=cluster.url + "/v1", api_key="none", http_client=http, max_retries=0) as made,
    ):
        yield made


def check_call(name: str, arguments: str) -> None:
    assert name in ("set_level", "stop")
    told = json.loads(arguments)
    assert told in ([{"level": level} for level in (1, 2, 3)] if name == "set_level" else [{}])


async def test_a_required_call_is_made_whatever_the_model_would_generate(client: openai.AsyncOpenAI) -> None:
    names, ids = set(), set()
    for seed in range(8):
        answer = await client.chat.completions.create(
            **ASK, tool_choice="required", parallel_tool_calls=False, seed=seed
        )
        (choice,) = answer.choices
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        (call,) = choice.message.tool_calls or []
        assert call.type == "function"
        check_call(call.function.name, call.function.arguments)
        names.add(call.function.name)
        ids.add(call.id)
    assert (names, len(ids)) == ({"set_level", "stop"}, 8)


async def test_the_named_tool_is_called(client: openai.AsyncOpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "stop"}}
    answer = await client.chat.completions.create(**ASK, tool_choice=named, n=2)
    for choice in answer.choices:
        (call,) = choice.message.tool_calls or []
        assert call.type == "function"
        assert (call.function.name, json.loads(call.function.arguments)) == ("stop", {})


async def test_calls_are_streamed(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        **ASK, tool_choice="required", parallel_tool_calls=False, stream=True, seed=1
    )
    chunks = [chunk async for chunk in stream]
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert {call.index for call in calls} == {0}
    assert len(calls) > 1
    assert calls[0].id
    assert calls[0].function
    arguments = "".join(call.function.arguments or "" for call in calls if call.function)
    check_call(calls[0].function.name or "", arguments)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ""
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


async def test_responses_have_calls_and_take_their_results(client: openai.AsyncOpenAI) -> None:
    tools: Any = [{"type": "function", "strict": None, **tool["function"]} for tool in TOOLS]
    asked: dict[str, Any] = {"model": "caller", "tools": tools, "max_output_tokens": 200}
    forced: dict[str, Any] = {**asked, "tool_choice": "required", "parallel_tool_calls": False, "temperature": 1.5}
    async with client.responses.stream(**forced, input="Go.") as stream:
        deltas = [event.delta async for event in stream if event.type == "response.function_call_arguments.delta"]
        first = await stream.get_final_response()
    (call,) = first.output
    assert call.type == "function_call"
    check_call(call.name, call.arguments)
    assert "".join(deltas) == call.arguments
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    quiet = {**asked, "temperature": 0, "max_output_tokens": 8}
    assert (await client.responses.create(**quiet, input=[result], previous_response_id=first.id)).output_text
    by_hand: Any = [{"role": "user", "content": "Go."}, call.model_dump(exclude_none=True), result]
    assert (await client.responses.create(**quiet, input=by_hand)).output_text


async def test_messages_have_tool_use_and_take_its_results(cluster: LocalCluster) -> None:
    tools: Any = [{"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]} for tool in TOOLS]
    turns: list[Any] = [{"role": "user", "content": "Go."}]
    asked: dict[str, Any] = {"model": "caller", "tools": tools}
    only: Any = {"type": "any", "disable_parallel_tool_use": True}
    async with anthropic.AsyncAnthropic(base_url=cluster.url, api_key="none", max_retries=0) as claude:
        async with claude.messages.stream(**asked, messages=turns, max_tokens=200, tool_choice=only) as stream:
            message = await stream.get_final_message()
        (use,) = message.content
        assert message.stop_reason == "tool_use"
        assert use.type == "tool_use"
        check_call(use.name, json.dumps(use.input))
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "done"}
        turns += [
            {"role": "assistant", "content": [use.model_dump(include={"type", "id", "name", "input"})]},
            {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
        ]
        assert (await claude.messages.create(**asked, messages=turns, max_tokens=8)).content[0].type == "text"
        whole = await claude.messages.create(**asked, messages=turns[:1], max_tokens=200, tool_choice=only)
        assert [block.type for block in whole.content] == ["tool_use"]


async def test_the_model_sees_the_results_of_its_calls_and_may_answer_with_text(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(**{**ASK, "messages": CALLED, "temperature": 0, "max_tokens": 8})
    assert answer.choices[0].message.content
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].finish_reason in ("stop", "length")


async def test_the_sdk_returns_calls_and_accepts_their_results(cluster: LocalCluster) -> None:
    forced: ChatOptions = {
        "tools": TOOLS,
        "tool_choice": ToolChoice(name="stop"),
        "temperature": 1.5,
        "max_tokens": 200,
    }
    async with AsyncClient(cluster.router_target) as sdk:
        answer = await sdk.chat("Go.", **forced)
        assert (answer.text, answer.finish_reason) == ("", FinishReason.TOOL_CALLS)
        (call,) = answer.tool_calls
        assert (call.name, json.loads(call.arguments)) == ("stop", {})
        async with sdk.stream("Go.", **forced) as stream:
            assert "".join([chunk.text async for chunk in stream]) == ""
            assert [made.name for made in stream.tool_calls] == ["stop"]
        talk = [user("Go."), assistant("", answer.tool_calls), tool(call, "done")]
        assert (await sdk.chat(talk, tools=TOOLS, temperature=0, max_tokens=8)).text
        with pytest.raises(InvalidRequest, match="there is no tool 'other'"):
            await sdk.chat("Go.", tools=TOOLS, tool_choice=ToolChoice(name="other"))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
        (
            {
                "messages": [
                    {
                        **CALLED[1],
                        "tool_calls": [{**CALLED[1]["tool_calls"][0], "function": {"name": "f", "arguments": "["}}],
                    }
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            {
                "tool_choice": "required",
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "x"}}}],
            },
            "tools",
        ),
    ],
)
async def test_invalid_tools_are_refused_by_name(
    client: openai.AsyncOpenAI, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(**{**ASK, **fields})
    assert refused.value.param == param
