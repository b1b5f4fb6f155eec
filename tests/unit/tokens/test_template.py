from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from tests.unit.tokens.published_templates import LLAMA_VISION
from triptych.domain.chat import MediaPart, Message, SpeakerRole, TextPart, ToolCall
from triptych.domain.media import Modality
from triptych.errors import InvalidRequest
from triptych.families.model_files import BadModel
from triptych.tokens.template import ChatTemplate
from triptych.tokens.tool_calls import SYNTAXES

IMAGE = MediaPart(Modality.IMAGE, b"")
QUESTION = [Message("user", (TextPart("a"), IMAGE, TextPart("b")))]
SHORT = [Message("user", (TextPart("hi"),))]
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


def ask(role: SpeakerRole, *texts: str) -> Message:
    return Message(role, tuple(map(TextPart, texts)))


def test_each_role_gets_the_form_that_the_template_takes_from_it() -> None:
    """Llama 3.2 Vision trims a system prompt, and with tools also a user's first message, but takes users' parts."""
    template = ChatTemplate(LLAMA_VISION, {"bos_token": "<b>"}, placeholders={Modality.IMAGE: "<image>"})
    messages = [ask("system", " Be", "brief. "), ask("user", "one", "two")]
    assert template.render(messages, 1000) == (
        "<b><head>system</head>Be\nbrief.<eot><head>user</head>onetwo<eot><head>assistant</head>"
    )
    with_tools = template.render([*QUESTION, ask("assistant", "x"), *QUESTION], 1000, "[]")
    assert with_tools.endswith(
        "\na\n<image>\nb<eot><head>assistant</head>x<eot><head>user</head>a<image>b<eot><head>assistant</head>"
    )


def test_a_single_text_is_a_string_where_strings_are_taken() -> None:
    """As clients send it: the template may treat a string otherwise."""
    source = "{% for m in messages %}{{ '[' + m.content | trim + ']' if m.content is string else PARTS }}{% endfor %}"
    source = source.replace("PARTS", "m.content | map(attribute='text') | join")
    assert render(source, [ask("user", " a ")]) == "[a]"
    assert render(source, [ask("user", " a ", "b ")]) == " a b "


def test_texts_are_joined_where_the_template_shows_only_the_first_part() -> None:
    assert render("{% for m in messages %}{{ m.content[0].text }}{% endfor %}", [ask("user", "a", "b")]) == "a\nb"


@pytest.mark.parametrize(
    ("source", "at"),
    [
        ("{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}", 0),
        ("{% for m in messages if m.role != 'assistant' %}{{ m.content }}{% endfor %}", 2),
        ("{% for m in messages if loop.first or m.role != 'system' %}{{ m.content }}{% endfor %}", 3),
    ],
)
def test_a_message_that_the_template_would_drop_is_refused_by_name(source: str, at: int) -> None:
    messages = [ask("system", "s"), ask("user", "u"), ask("assistant", "a"), ask("system", "s2"), ask("user", "u2")]
    source = source.replace(
        "messages if loop.first or m.role != 'system'",
        "messages[:1] + messages[1:] | rejectattr('role', 'equalto', 'system') | list",
    )
    with pytest.raises(InvalidRequest, match=rf"messages\[{at}\]: .* does not show the text of") as caught:
        render(source, messages)
    assert caught.value.param == f"messages[{at}]"
    for blank in ("", " \n"):
        empty = [Message(message.role, (TextPart("u" if message.role == "user" else blank),)) for message in messages]
        assert render(source, empty)


def test_a_list_that_the_template_prints_after_all_is_refused() -> None:
    source = "{% for m in messages %}{{ m.content if loop.index == 7 else m.content[0].text }}{% endfor %}"
    with pytest.raises(InvalidRequest, match="cannot render these messages"):
        render(source, [ask("user", "a")] * 7)


def test_a_call_has_no_content_as_in_transformers_and_its_arguments_the_form_that_is_taken() -> None:
    shown = (
        "{% for m in messages %}{% if m.tool_calls %}{{ 'content' in m }}{{ m.tool_calls[0].function.name }} ARGUMENTS"
    )
    shown += "{% else %}{{ m.content }}{% endif %}{% endfor %}{{ tools }}"
    for arguments, expected in (
        ("{{ m.tool_calls[0].function.arguments }}", '{"a": [1, "é"]}'),
        ("{{ m.tool_calls[0].function.arguments | tojson }}", '{"a": [1, "é"]}'),
        ("{{ m.tool_calls[0].function.arguments | dictsort | map('join', '=') | join }}", "a=[1, 'é']"),
    ):
        template = ChatTemplate(shown.replace("ARGUMENTS", arguments), {})
        assert template.render(CALLED, 1000) == f"qFalsef {expected}42None"


def test_a_template_of_its_own_is_used_for_requests_with_tools() -> None:
    plain, with_tools = STRINGS, "{{ tools | tojson }}<tool_call></tool_call>" + PARTS
    template = ChatTemplate(plain, {}, tools_source=with_tools)
    assert template.render(SHORT, 1000) == "[hi]"
    assert template.render(SHORT, 1000, "[]") == "[]<tool_call></tool_call>hi"
    assert template.call_syntax is SYNTAXES["hermes"]


def test_content_parts_keep_the_clients_order() -> None:
    assert render(PARTS) == "a*b"


@pytest.mark.parametrize("source", [STRINGS, "{% for m in messages %}{{ '[' + m.content + ']' }}{% endfor %}"])
def test_a_template_for_strings_gets_strings(source: str) -> None:
    assert render(source) == "[a\n<image>\nb]"


def test_a_template_that_calls_string_methods_gets_strings() -> None:
    assert render("{% for m in messages %}{{ m.content | trim }}{% endfor %}") == "a\n<image>\nb"


def test_special_tokens_and_the_generation_prompt_are_rendered() -> None:
    assert render("{{ bos_token }}{% if add_generation_prompt %}go{% endif %}" + STRINGS, SHORT) == "<s>go[hi]"


def test_json_is_not_escaped_for_html() -> None:
    assert render("{{ {'a': '<é>'} | tojson }}" + STRINGS, SHORT) == '{"a": "<é>"}[hi]'


def test_the_time_is_injected() -> None:
    assert render("{{ strftime_now('%Y') }}" + STRINGS, SHORT) == "time in %Y[hi]"


def test_loop_controls_blocks_and_namespaces_work_as_in_transformers() -> None:
    source = """
    {%- set state = namespace(n=0) %}
    {%- for x in range(9) %}
        {%- if x == 3 %}{% break %}{% endif %}
        {%- set state.n = state.n + x %}
    {%- endfor %}
    {% generation %}
    {%- set inner = 1 %}
    {{- state.n }}
    {%- endgeneration %}{{ inner }}{{ dict.fromkeys([1]) }}{{ messages[0].content[0].text }}"""
    assert render(source, [Message("user", (TextPart("a"),))]) == as_transformers(source)


def test_the_time_has_no_zone_as_in_transformers() -> None:
    source = "{{ strftime_now('%d %b %Y %Z%z') }}{{ messages[0].content[0].text }}"
    template = ChatTemplate(source, {})
    assert template.render([Message("user", (TextPart("a"),))], 1000) == as_transformers(source)


def test_a_refusal_of_the_template_reaches_the_caller() -> None:
    with pytest.raises(InvalidRequest, match="refuses the messages: roles must alternate") as error:
        render("{{ raise_exception('roles must alternate') if 'hi' in messages[0].content }}" + STRINGS, SHORT)
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
        render("{% if 'hi' in messages[0].content %}" + source + "{% endif %}" + STRINGS, SHORT)


def test_output_is_bounded_during_rendering() -> None:
    with pytest.raises(InvalidRequest, match="more than 1000 characters"):
        render(STRINGS + "{% for x in range(99999) if 'hi' in messages[0].content %}xxxx{% endfor %}", SHORT)


def test_input_is_bounded_before_rendering() -> None:
    with pytest.raises(InvalidRequest, match="the messages have 1002 characters, the limit is 1000"):
        render(PARTS, [Message("user", (TextPart("a" * 1000),))])
    with pytest.raises(InvalidRequest, match="the messages have 2000 characters"):
        render(PARTS, [Message("user", (TextPart(""),))] * 1000)


def test_a_template_with_an_error_is_a_bad_model() -> None:
    with pytest.raises(BadModel, match="error in line 2"):
        ChatTemplate("\n{% if %}", {})


@pytest.mark.parametrize(
    "source",
    ["", "{{ bos_token }}", "{% for m in messages %}{{ m.text }}{% endfor %}", "{{ 1 / 0 }}", "{{ messages }}"],
)
def test_a_template_that_does_not_show_a_users_text_is_a_bad_model(source: str) -> None:
    with pytest.raises(BadModel, match="does not show the text of a user's message"):
        ChatTemplate(source, {})


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
    assert (template.takes_calls, template.call_syntax) == (True, SYNTAXES["hermes"])
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


@pytest.mark.parametrize("arguments", ["", "[1]", "{", "null", '{"a": NaN}', '{"a": 1e999}', '{"a":' * 100_000])
def test_arguments_that_are_not_an_object_are_named(arguments: str) -> None:
    broken = Message("assistant", (), (ToolCall("c", "f", "{}"), ToolCall("d", "g", arguments)))
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate(CALLING, {}).render([*QUESTION, broken], 1_000_000)
    assert caught.value.param == "messages[1].tool_calls[1].function.arguments"


def test_tools_are_refused_if_the_template_does_not_support_them() -> None:
    with pytest.raises(InvalidRequest, match="does not support tools") as caught:
        ChatTemplate(PARTS, {}).render(QUESTION, 1000, "[{}]")
    assert caught.value.param == "tools"
