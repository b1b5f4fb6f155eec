import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from triptych.domain.chat import MediaPart, Message, TextPart, ToolCall, ToolChoice
from triptych.domain.media import Modality
from triptych.domain.sampling import Grammar, ResponseFormat, SamplingParams
from triptych.errors import InvalidMedia, InvalidRequest
from triptych.services.gateway.openai_api import (
    MAX_PARTS,
    ParsedRequest,
    parse_chat,
    parse_completion,
    tenant_salt,
)
from triptych.services.gateway.openai_models import ChatCompletionRequest

ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
LIMIT = 1000


def read(**fields: Any) -> ParsedRequest:
    return parse_chat(json.dumps({**ASK, **fields}).encode(), LIMIT)


def content(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


def url(value: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": value}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": 5}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": {"role": "user"}}, "messages"),
        ({"messages": [5]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "critic", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
        ({"messages": ["x"]}, "messages[0]"),
        ({"messages": [{"role": "assistant", "tool_calls": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].id"),
        (content(5), "messages[0].content[0]"),
        (content({"type": "text", "text": "x"}, {"type": "input_audio"}), "messages[0].content[1].input_audio"),
        (content({"type": "input_audio", "input_audio": {"data": "A?=="}}), "messages[0].content[0].input_audio.data"),
        (content({"type": "input_audio", "input_audio": {"data": ""}}), "messages[0].content[0].input_audio.data"),
        (content({"type": "audio_url", "audio_url": {"url": "file:///a"}}), "messages[0].content[0].audio_url.url"),
        (content({"type": ["text"]}), "messages[0].content[0]"),
        (content({"type": "text"}), "messages[0].content[0].text"),
        (content({"type": "image_url", "image_url": "data:"}), "messages[0].content[0].image_url"),
        (content(url(7)), "messages[0].content[0].image_url.url"),
        (content(url("ftp://example.com/a.png")), "messages[0].content[0].image_url.url"),
        (content({"type": "image_embeds", "image_embeds": "AAAA"}), "messages[0].content[0]"),
        (content({"type": "video_url", "video_url": {"url": "data:"}}), "messages[0].content[0].video_url.url"),
        (content({"type": "video_url", "video_url": {}}), "messages[0].content[0].video_url.url"),
        (content(*[{"type": "text", "text": ""}] * (MAX_PARTS + 1)), "messages"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"top_p": []}, "top_p"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 2**40}, "top_k"),
        ({"seed": -(2**63) - 1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": True}, "max_completion_tokens"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        ({"stop": ["a"] * 65}, "stop"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": 5}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": 5}, "stream_options"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"n": 129}, "n"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        (
            {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": {"type": "function"}},
            "tool_choice.function",
        ),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": 1}, "tool_choice"),
        ({"functions": [{}]}, "functions"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"logit_bias": {"x" * 5000: "y"}}, "logit_bias...."),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"presence_penalty": "1"}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 1e-308}, "repetition_penalty"),
        ({"min_p": 1.5}, "min_p"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
        ({"cache_salt": ""}, "cache_salt"),
        ({"priority": "high"}, "priority"),
        ({"n": 17}, "n"),
        ({"n": 0}, "n"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "audio"),
    ],
    ids=str,
)
def test_unsupported_parameters_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(**fields)
    assert caught.value.param == param
    assert caught.value.message.startswith(f"{param}")
    assert len(caught.value.message) < 300


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1, "tools": [], "tool_choice": "none", "logprobs": False, "response_format": {"type": "text"}},
        {"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "modalities": ["text"]},
        {"stop": "", "top_logprobs": 0},
        {"stop": [], "top_logprobs": 0, "logprobs": False},
        {"user": "u", "priority": 0, "parallel_tool_calls": True, "stop_token_ids": [], "min_tokens": 0},
        {name: None for name in ChatCompletionRequest.model_fields if name not in ("model", "messages")},
        {"user": "u", "metadata": {"deep": [[1]]}, "store": True, "unknown": [None]},
    ],
)
def test_fields_with_neutral_values_change_nothing(fields: dict[str, Any]) -> None:
    assert replace(read(**fields), ignored=()) == read()


def test_values_at_the_edge_of_their_range_are_taken() -> None:
    edges: dict[str, Any] = {
        "temperature": 0,
        "top_p": 0,
        "top_k": -1,
        "min_p": 0,
        "repetition_penalty": 1e-9,
        "seed": -(2**63),
    }
    assert read(**edges).sampling == SamplingParams(**edges)
    assert read(temperature=5e-324, seed=2**63 - 1).sampling == SamplingParams(temperature=5e-324, seed=2**63 - 1)
    for top_k in (0, -1):
        assert read(top_k=top_k).sampling == SamplingParams(top_k=top_k)


def test_null_is_the_default_of_optional_parts() -> None:
    function = {"name": "f", "description": None, "parameters": None, "strict": None}
    assert read(tools=[{"type": "function", "function": function}]) == read(
        tools=[{"type": "function", "function": {"name": "f"}}]
    )
    schema = {"name": None, "description": None, "strict": None, "schema": {"type": "object"}}
    assert read(response_format={"type": "json_schema", "json_schema": schema}) == read(
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    )
    assert read(stream_options={"include_usage": None}) == read()
    for detail in (None, "auto", "original"):
        image = {"type": "image_url", "image_url": {"url": "data:;base64,AAAA", "detail": detail}}
        assert read(**content(image)).messages[0].parts == (MediaPart(Modality.IMAGE, bytes(3)),)


def test_a_byte_order_mark_before_the_body_is_skipped() -> None:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}]}).encode()
    assert parse_chat(b"\xef\xbb\xbf" + body, LIMIT) == parse_chat(body, LIMIT)
    assert parse_chat(bytearray(b"\xef\xbb\xbf" + body), LIMIT) == parse_chat(body, LIMIT)


def test_best_of_is_taken_where_it_changes_nothing() -> None:
    for fields in ({}, {"best_of": None}, {"best_of": 1}, {"n": 2, "best_of": 2}, {"n": 2, "best_of": 1}):
        body = json.dumps({"model": "m", "prompt": "x", **fields}).encode()
        assert parse_completion(body, LIMIT).sampling.n == fields.get("n", 1)


def test_every_parameter_reaches_the_sampling() -> None:
    read_all = read(
        temperature=0.5,
        top_p=0.5,
        top_k=3,
        min_p=0.1,
        n=2,
        seed=7,
        max_completion_tokens=9,
        min_tokens=1,
        stop=["a", "b"],
        stop_token_ids=[4],
        ignore_eos=True,
        repetition_penalty=1.1,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        logit_bias={"5": -100, "6": 1.5},
        logprobs=True,
        top_logprobs=2,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
    )
    assert read_all.sampling == SamplingParams(
        temperature=0.5,
        top_p=0.5,
        top_k=3,
        min_p=0.1,
        n=2,
        seed=7,
        max_tokens=9,
        min_tokens=1,
        stop=("a", "b"),
        stop_token_ids=(4,),
        ignore_eos=True,
        repetition_penalty=1.1,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        logit_bias=((5, -100), (6, 1.5)),
        logprobs=2,
        response_format=ResponseFormat(Grammar.JSON_SCHEMA, '{"type": "object"}'),
    )
    assert read(logprobs=True).sampling.logprobs == 0
    assert read(response_format={"type": "json_object"}).sampling.response_format == ResponseFormat(Grammar.JSON_OBJECT)


def test_tools_go_to_the_template_unless_tool_choice_is_none() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    assert json.loads(read(tools=tools).tools) == tools
    assert json.loads(read(tools=tools, tool_choice="auto").tools) == tools
    assert read(tools=tools, tool_choice="none").tools == ""
    assert read(tools=tools).tool_choice == ToolChoice()
    assert read(tools=tools, tool_choice="required", parallel_tool_calls=False).tool_choice == ToolChoice(
        required=True, parallel=False
    )
    named = {"type": "function", "function": {"name": "f"}}
    assert read(tools=tools, tool_choice=named).tool_choice == ToolChoice(name="f")


def test_tool_calls_and_results_in_messages_are_parsed() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "42"}]},
        {"role": "assistant", "content": "It is 42.", "tool_calls": None},
    ]
    assert read(messages=messages).messages[1:] == (
        Message("assistant", (), (ToolCall("c1", "f", "{}"),)),
        Message("tool", (TextPart("42"),), tool_call_id="c1"),
        Message("assistant", (TextPart("It is 42."),)),
    )


def test_urls_are_left_to_the_fetcher_and_filled_in_afterwards() -> None:
    parsed = read(**content({"type": "text", "text": "x"}, url("https://a.example/1"), url("HTTP://a.example/2")))
    assert [(remote.url, remote.param) for remote in parsed.remote] == [
        ("https://a.example/1", "messages[0].content[1].image_url.url"),
        ("HTTP://a.example/2", "messages[0].content[2].image_url.url"),
    ]
    whole = parsed.with_media([b"one", b"two"])
    assert whole.messages[0].parts == (
        TextPart("x"),
        MediaPart(Modality.IMAGE, b"one"),
        MediaPart(Modality.IMAGE, b"two"),
    )
    assert whole.remote == ()


def test_videos_and_audio_are_accepted_by_url_or_inline() -> None:
    parts = (
        {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}},
        {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,AAEC"}},
        {"type": "input_audio", "input_audio": {"data": "AAEC", "format": "wav"}},
        {"type": "input_audio", "input_audio": {"data": "AAEC"}},
    )
    assert read(**content(*parts)).messages[0].parts == (
        MediaPart(Modality.VIDEO, b"\0\0\0"),
        *[MediaPart(Modality.AUDIO, b"\0\1\2")] * 3,
    )


def test_fetched_media_keeps_its_modality() -> None:
    video = {"type": "video_url", "video_url": {"url": "https://a.example/v"}}
    audio = {"type": "audio_url", "audio_url": {"url": "http://a.example/a"}}
    parsed = read(**content(url("https://a.example/i"), audio, video))
    assert [remote.param for remote in parsed.remote] == [
        "messages[0].content[0].image_url.url",
        "messages[0].content[1].audio_url.url",
        "messages[0].content[2].video_url.url",
    ]
    assert parsed.with_media([b"i", b"a", b"v"]).messages[0].parts == (
        MediaPart(Modality.IMAGE, b"i"),
        MediaPart(Modality.AUDIO, b"a"),
        MediaPart(Modality.VIDEO, b"v"),
    )


def test_salts_separate_tenants_and_their_cache_salts() -> None:
    salts = {tenant_salt(*pair) for pair in (("a", ""), ("", "a"), ("a", "b"), ("ab", ""), ('a","', ""), ("b", "a"))}
    assert len(salts) == 6
    assert tenant_salt("", "") == b""
    assert tenant_salt("a", "b") == tenant_salt("a", "b")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({}, "prompt"),
        ({"prompt": "x", "echo": True}, "echo"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "best_of": 2}, "best_of"),
        ({"prompt": "x", "logprobs": 50}, "logprobs"),
    ],
    ids=str,
)
def test_unsupported_parameters_of_a_completion_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_completion(json.dumps({"model": "m", **fields}).encode(), LIMIT)
    assert caught.value.param == param


def test_a_completion_has_a_raw_prompt() -> None:
    for prompt in ("hi", ["hi"]):
        parsed = parse_completion(json.dumps({"model": "m", "prompt": prompt, "logprobs": 1}).encode(), LIMIT)
        assert (parsed.prompt, parsed.messages, parsed.sampling) == ("hi", (), SamplingParams(logprobs=1))


def test_a_bad_image_is_named() -> None:
    for bad in ("data:", "data:image/png;base64,", "data:image/png;base64,A?==", "data:image,abc"):
        with pytest.raises(InvalidMedia) as caught:
            read(**content({"type": "text", "text": "x"}, url(bad)))
        assert caught.value.param == "messages[0].content[1].image_url.url"


@pytest.mark.parametrize("data", ["AAEC", "data:;base64,AAEC", "data:audio/wav;base64,AAEC"])
def test_inline_audio_is_base64_or_a_data_url(data: str) -> None:
    (message,) = read(**content({"type": "input_audio", "input_audio": {"data": data, "format": "wav"}})).messages
    assert message.parts == (MediaPart(Modality.AUDIO, bytes(range(3))),)


def test_an_image_above_the_limit_is_refused_with_both_sizes() -> None:
    with pytest.raises(InvalidMedia, match=r"1002.*1000"):
        read(**content(url("data:image/png;base64," + "AAAA" * 334)))
    with pytest.raises(InvalidMedia, match=r"input_audio.data: the data holds 1002 bytes, the limit is 1000"):
        read(**content({"type": "input_audio", "input_audio": {"data": "AAAA" * 334}}))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"model": "\xc3("}',
        b'{"model": "\\ud800"}',
        b"{" * 100_000,
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"model": NaN}',
        b'{"model": 1' + b"0" * 10_000 + b"}",
        b'{"model": "m"} x',
    ],
    ids=lambda body: repr(body[:20]),
)
def test_a_body_that_is_not_a_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse_chat(body, LIMIT)


def test_error_messages_truncate_values_of_the_caller() -> None:
    with pytest.raises(InvalidRequest, match="of 100000 characters") as caught:
        read(temperature="x" * 100_000)
    assert len(caught.value.message) < 300


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
PART = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "image_url", "video_url", "audio_url", "input_audio"]) | JSON},
    optional={
        "text": JSON,
        "image_url": st.fixed_dictionaries({}, optional={"url": JSON, "detail": JSON}) | JSON,
        "video_url": st.fixed_dictionaries({}, optional={"url": JSON}) | JSON,
        "input_audio": st.fixed_dictionaries({}, optional={"data": JSON, "format": JSON}) | JSON,
    },
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "system"]) | JSON, "content": st.lists(PART | JSON, max_size=3) | JSON}
)
FIELDS = sorted(set(ChatCompletionRequest.model_fields) - {"model", "messages"})
BODY = st.fixed_dictionaries(
    {"model": st.text() | JSON, "messages": st.lists(MESSAGE | JSON, max_size=3) | JSON},
    optional=dict.fromkeys(FIELDS, JSON),
)


@given(BODY.map(lambda body: json.dumps(body).encode()) | st.binary())
@example(b'{"model":"m","messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:"}}]}]}')
def test_any_body_is_parsed_or_refused(body: bytes) -> None:
    try:
        parsed = parse_chat(body, LIMIT)
    except InvalidRequest as error:
        refusal = error.message
    else:
        refusal = parsed.model.encode().decode()[:500]
    assert len(refusal) <= 500


def test_an_unknown_role_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidRequest, match="must be one of system, developer, user, assistant, tool"):
        read(messages=[{"role": "robot", "content": "x"}])
