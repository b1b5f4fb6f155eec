from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from triptych.domain.chat import MediaPart, Message, TextPart, ToolCall
from triptych.domain.media import Modality
from triptych.errors import InvalidRequest
from triptych.families.model_files import BadModel
from triptych.tokens.template import ChatTemplate
from triptych.tokens.tool_calls import CallSyntax

IMAGE = MediaPart(Modality.IMAGE, b"")
QUESTION = [Message("user", (TextPart("a"), IMAGE, TextPart("b")))]
STRINGS = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
PARTS = (
    "{% for m in messages %}{% for c in m.content %}{{ '*' if c.type == 'image' else c.text }}{% endfor %}{% endfor %}"
)


def render(source: str, messages: list[Message] | None = None, max_chars: int = 1000) -> str:
    template = ChatTemplate(
        source,
        {"bos_token": "<s>"},
        placeholders={Modality.IMAGE: "<image>"},
        strftime_now=lambda form: f"time in {form}",
    )
    return template.render(QUESTION if messages is None else messages, max_chars)


def as_transformers(source: str) -> str:
    conversation = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    rendered: Any = render_jinja_template([conversation], chat_template=source, add_generation_prompt=True)
    return str(rendered[0][0])


def test_content_parts_keep_the_clients_order() -> None:
    assert render(PARTS) == "a*b"


@pytest.mark.parametrize("source", [STRINGS, "{% for m in messages %}{{ '[' + m.content + ']' }}{% endfor %}"])
def test_a_template_for_strings_gets_strings(source: str) -> None:
    assert render(source) == "[a\n<image>\nb]"


def test_a_template_that_calls_string_methods_gets_strings() -> None:
    assert render("{% for m in messages %}{{ m.content | trim }}{% endfor %}") == "a\n<image>\nb"


def test_special_tokens_and_the_generation_prompt_are_rendered() -> None:
    assert render("{{ bos_token }}{% if add_generation_prompt %}go{% endif %}") == "<s>go"


def test_json_is_not_escaped_for_html() -> None:
    assert render("{{ {'a': '<é>'} | tojson }}") == '{"a": "<é>"}'


def test_the_time_is_injected() -> None:
    assert render("{{ strftime_now('%Y') }}") == "time in %Y"


def test_loop_controls_blocks_and_namespaces_work_as_in_transformers() -> None:
    source = """
    {%- set state = namespace(n=0) %}
    {%- for x in range(9) %}
        {%- if x == 3 %}{% break %}{% endif %}
        {%- set state.n = state.n + x %}
    {%- endfor %}
    {% generation %}
    {{- state.n }}
    {%- endgeneration %}"""
    assert render(source) == as_transformers(source)


def test_a_refusal_of_the_template_reaches_the_caller() -> None:
    with pytest.raises(InvalidRequest, match="refuses the messages: roles must alternate") as error:
        render("{{ raise_exception('roles must alternate') }}")
    assert error.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages[0].x.y.z }}",
        "{{ 1 / 0 }}",
        "{% set n = namespace(__class__=1) %}",
        "{{ range(10 ** 9) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_an_error_in_rendering_is_an_invalid_request_without_details(source: str) -> None:
    with pytest.raises(InvalidRequest, match="cannot render these messages"):
        render(source)


def test_output_is_bounded_during_rendering() -> None:
    with pytest.raises(InvalidRequest, match="more than 1000 characters"):
        render("{% for x in range(99999) %}{% for y in range(99999) %}xxxx{% endfor %}{% endfor %}")


def test_input_is_bounded_before_rendering() -> None:
    with pytest.raises(InvalidRequest, match="the messages have 1002 characters, the limit is 1000"):
        render(PARTS, [Message("user", (TextPart("a" * 1000),))])
    with pytest.raises(InvalidRequest, match="the messages have 2000 characters"):
        render(PARTS, [Message("user", (TextPart(""),))] * 1000)


def test_a_template_with_an_error_is_a_bad_model() -> None:
    with pytest.raises(BadModel, match="error in line 2"):
        ChatTemplate("\n{% if %}", {})


def test_tools_are_rendered_by_templates_that_support_them() -> None:
    source = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
    template = ChatTemplate(source, {})
    tools = '[{"type": "function", "function": {"name": "f"}}]'
    assert template.render([Message("user", (TextPart("hi"),))], 1000, tools) == tools + "hi"
    assert template.render([Message("user", (TextPart("hi"),))], 1000) == "hi"
    for broken in ("{}", "[" * 100_000, "x"):
        with pytest.raises(InvalidRequest, match="must be a JSON array"):
            template.render([], 1_000_000, broken)


CALLING = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls %}<tool_call>{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}"
    "</tool_call>{% endfor %}{% if m.role == 'tool' %}({{ m.name }} {{ m.tool_call_id }}){% endif %}{% endfor %}"
)
CALLED = [
    Message("user", (TextPart("q"),)),
    Message("assistant", (), (ToolCall("c1", "f", '{"a": [1, "é"]}'),)),
    Message("tool", (TextPart("42"),), tool_call_id="c1"),
]


def test_tool_calls_and_results_are_rendered() -> None:
    template = ChatTemplate(CALLING, {})
    assert (template.takes_calls, template.call_syntax) == (True, CallSyntax.TAGGED)
    shown = '[user]q[assistant]<tool_call>{"name": "f", "arguments": {"a": [1, "é"]}}</tool_call>[tool]42(f c1)'
    assert template.render(CALLED, 1000) == shown


@pytest.mark.parametrize("source", [STRINGS, PARTS, CALLING.replace("{% for c in", "{% for c in [] and")])
def test_tool_calls_are_refused_if_the_template_drops_them(source: str) -> None:
    template = ChatTemplate(source, {})
    assert not template.takes_calls
    for messages, param in ((CALLED, "messages[1].tool_calls"), (CALLED[2:], "messages[0].role")):
        with pytest.raises(InvalidRequest, match="does not support tool calls") as caught:
            template.render(messages, 1000)
        assert caught.value.param == param


@pytest.mark.parametrize("arguments", ["", "[1]", "{", "null", '{"a":' * 100_000])
def test_arguments_that_are_not_an_object_are_named(arguments: str) -> None:
    broken = Message("assistant", (), (ToolCall("c", "f", "{}"), ToolCall("d", "g", arguments)))
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate(CALLING, {}).render([*QUESTION, broken], 1_000_000)
    assert caught.value.param == "messages[1].tool_calls[1].function.arguments"


def test_tools_are_refused_if_the_template_does_not_support_them() -> None:
    with pytest.raises(InvalidRequest, match="does not support tools") as caught:
        ChatTemplate(PARTS, {}).render(QUESTION, 1000, "[{}]")
    assert caught.value.param == "tools"
