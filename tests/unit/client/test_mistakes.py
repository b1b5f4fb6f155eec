"""Invalid arguments: each is an error of the tree that names the argument, before anything is sent."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.client.scripted import ScriptedRouter, behind_grpc
from triptych import AsyncClient
from triptych.client import RawPrompt, Tenant, ToolCall, ToolChoice, assistant, system, tool, user
from triptych.client.options import ChatOptions
from triptych.domain.chat import MediaPart, Message, TextPart
from triptych.domain.media import Modality
from triptych.domain.sampling import Grammar, ResponseFormat, SamplingParams
from triptych.errors import InvalidMedia, InvalidRequest

LONE = "a\ud800"
WEATHER = ToolCall("c1", "weather", "{}")


@pytest.mark.parametrize("name", [*ChatOptions.__annotations__])
async def test_every_option_is_validated(name: str) -> None:
    router = ScriptedRouter()
    options: dict[str, Any] = {name: object()}
    async with AsyncClient(router) as client:
        with pytest.raises(InvalidRequest, match=name) as caught:
            await client.chat("Hi", **options)
    assert (caught.value.param, router.requests) == (name, [])


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("response_format", "json_object", "ResponseFormat or a mapping"),
        ("response_format", {"type": "xml"}, "ResponseFormat or a mapping"),
        ("response_format", {"type": "json_schema"}, "needs"),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {"a": b""}}}, "written as JSON"),
        ("response_format", ResponseFormat(Grammar.JSON_SCHEMA, {}), "text"),  # type: ignore[arg-type]
        ("response_format", ResponseFormat("json_object"), "Grammar"),  # type: ignore[arg-type]
        ("logit_bias", {"a": 1.0}, "an integer"),
        ("logit_bias", {1: "a"}, "a number"),
        ("logit_bias", [1], "a mapping"),
        ("logit_bias", "12", "a mapping"),
        ("logit_bias", {2**32: 1}, "from 0"),
        ("tool_choice", "auto", r"ToolChoice\(required=True\)"),
        ("tool_choice", ToolChoice(name=3), "str"),  # type: ignore[arg-type]
        ("tool_choice", ToolChoice(name=LONE), "surrogate"),
        ("max_tokens", "7", "an integer"),
        ("max_tokens", 7.0, "an integer"),
        ("max_tokens", True, "an integer"),
        ("max_tokens", -1, "from 1"),
        ("max_tokens", 2**32, "from 1 to 2147483647"),
        ("temperature", "hot", "a number"),
        ("temperature", 10**400, "a number"),
        ("seed", 2**64, "seed is 18446744073709551616, must be from"),
        ("n", 0, "from 1"),
        ("stop", [3], "strings"),
        ("stop", LONE, "surrogate"),
        ("stop_token_ids", 3, "a list of token ids"),
        ("ignore_eos", 1, "True or False"),
        ("priority", 2**31, "from"),
        ("tenant_salt", "salt", "bytes"),
        ("tenant", b"team", r'a name, or a triptych.client.Tenant, as Tenant\("team", weight=2\)'),
        ("tenant", LONE, "surrogate"),
        ("tenant", "x" * 65, "tenant: its name has 65 characters"),
        ("tenant", Tenant("team", weight=0), "tenant: its weight is 0"),
        ("tenant", Tenant("team", weight="2"), "a number"),  # type: ignore[arg-type]
        ("model", 3, "text"),
        ("model", LONE, "surrogate"),
        ("timeout_s", 0, "above 0"),
        ("timeout_s", -1, "above 0"),
        ("timeout_s", float("nan"), "above 0"),
        ("timeout_s", float("inf"), "at most"),
        ("timeout_s", "3", "a number"),
        ("images", Path("a.png"), "a list of images, not one of them"),
        ("images", 3, "a list of images"),
        ("images", ["nowhere.png"], "nowhere.png"),
        ("max_token", 3, "no argument.*max_tokens"),
    ],
)
async def test_an_argument_that_cannot_be_sent_is_named(name: str, value: Any, said: str) -> None:
    router = ScriptedRouter()
    async with behind_grpc(router) as target, AsyncClient(target) as client:
        with pytest.raises(InvalidRequest, match=said) as caught:
            await client.chat("Hi", **{name: value})
    assert (caught.value.param, router.requests) == (name, [])


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ([{"role": "user", "content": "Hi"}], "triptych.client.user"),
        (["Hi"], "triptych.client.user"),
        ([user("Hi"), 3], r"prompt\[1\]"),
        ([], "without a turn"),
        (None, "a question"),
        (3, "a question"),
        (b"Hi", "a question"),
        (LONE, "surrogate"),
        (RawPrompt(LONE), "surrogate"),
        (RawPrompt(3), "text"),  # type: ignore[arg-type]
        ([Message("robot", ())], "role"),  # type: ignore[arg-type]
        ([Message("user", "Hi")], "TextPart"),  # type: ignore[arg-type]
        ([Message("user", (MediaPart(Modality.IMAGE, "x"),))], "MediaPart"),  # type: ignore[arg-type]
        ([Message("user", (TextPart(LONE),))], "surrogate"),
        ([Message("user", (), ("call",))], "ToolCall"),  # type: ignore[arg-type]
        ([assistant("", [ToolCall("c", LONE, "{}")])], "surrogate"),
        ([Message("tool", (), tool_call_id=3)], "text"),  # type: ignore[arg-type]
    ],
)
async def test_a_prompt_that_cannot_be_sent_is_refused(prompt: Any, said: str) -> None:
    router = ScriptedRouter()
    async with behind_grpc(router) as target, AsyncClient(target) as client:
        with pytest.raises(InvalidRequest, match=said) as caught:
            await client.chat(prompt)
        with pytest.raises(InvalidRequest, match=said):
            await client.tokenize(prompt)
    assert (caught.value.param, router.requests) == ("prompt", [])


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("text", lambda: user(3)),  # type: ignore[arg-type]
        ("text", lambda: user(LONE)),
        ("text", lambda: system(None)),  # type: ignore[arg-type]
        ("text", lambda: assistant(b"x")),  # type: ignore[arg-type]
        ("tool_calls", lambda: assistant("", WEATHER)),  # type: ignore[arg-type]
        ("tool_calls", lambda: assistant("", ["c1"])),  # type: ignore[list-item]
        ("call", lambda: tool("c1", "warm")),  # type: ignore[arg-type]
        ("result", lambda: tool(WEATHER, 3)),  # type: ignore[arg-type]
        ("images", lambda: user("Hi", Path("a.png"))),  # type: ignore[arg-type]
    ],
)
def test_a_message_is_validated_when_it_is_constructed(name: str, make: Any) -> None:
    with pytest.raises(InvalidRequest, match=name) as caught:
        make()
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("target", 50051),
        ("target", "127.0.0.1"),
        ("retry", {"max_attempts": 1}),
        ("timeout_s", 0),
        ("timeout_s", None),
        ("model", 3),
        ("tls", "cert.pem"),
    ],
)
def test_invalid_client_settings_are_refused(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        AsyncClient(**{"target": "127.0.0.1:1", name: value})
    assert caught.value.param == name


async def test_arguments_of_other_calls_are_validated() -> None:
    async with AsyncClient(ScriptedRouter()) as client:
        for name, call in (
            ("timeout_s", lambda: client.models(timeout_s=0)),
            ("timeout_s", lambda: client.tokenize("Hi", timeout_s=-1)),
            ("model", lambda: client.tokenize("Hi", model=3)),  # type: ignore[arg-type]
            ("request_id", lambda: client.timeline(3)),  # type: ignore[arg-type]
        ):
            with pytest.raises(InvalidRequest) as caught:
                await call()
            assert caught.value.param == name


async def test_values_in_openai_form_are_accepted() -> None:
    router = ScriptedRouter()
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    async with behind_grpc(router) as target, AsyncClient(target) as client:
        await client.chat("Hi", response_format={"type": "json_object"}, logit_bias={3: 1, 4: -2.5}, stop="end")
        await client.chat("Hi", response_format=schema, logit_bias=[(3, 1.0)], stop=["a", "b"], stop_token_ids=[7])
        await client.chat("Hi", response_format={"type": "text"}, logit_bias={"5": 1})
    first, second, third = (replace(request.sampling, seed=None) for request in router.requests)
    assert first == SamplingParams(
        response_format=ResponseFormat(Grammar.JSON_OBJECT), logit_bias=((3, 1.0), (4, -2.5)), stop=("end",)
    )
    assert second == SamplingParams(
        response_format=ResponseFormat(Grammar.JSON_SCHEMA, '{"type": "object"}'),
        logit_bias=((3, 1.0),),
        stop=("a", "b"),
        stop_token_ids=(7,),
    )
    assert third == SamplingParams(logit_bias=((5, 1.0),))


async def test_none_means_the_default() -> None:
    router = ScriptedRouter()
    async with behind_grpc(router) as target, AsyncClient(target) as client:
        await client.chat("Hi", **dict.fromkeys(ChatOptions.__annotations__))  # type: ignore[arg-type]
    (request,) = router.requests
    sampling = replace(request.sampling, seed=None)
    assert (sampling, request.tools, request.tool_choice) == (SamplingParams(), "", ToolChoice())


@pytest.mark.parametrize(("name", "item"), [("images", "no/such.png"), ("videos", "no/such.mp4"), ("audio", "no/a")])
def test_an_unreadable_file_is_named_by_its_given_path(name: str, item: str) -> None:
    with pytest.raises(InvalidMedia, match=f"the (image|video|audio) {item} does not exist") as caught:
        user("What?", **{name: [item]})
    assert caught.value.param == name
