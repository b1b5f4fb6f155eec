"""Tool calls are recognized however an answer is split; other text is unchanged."""

import json
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.tokens.calls import Call, calls_of
from triptych.errors import InvalidRequest
from triptych.tokens.call_reader import CallEnded, CallReader
from triptych.tokens.tool_calls import SYNTAXES, find_syntax, read_tools

PROPERTIES: dict[str, Any] = {
    "text": {"type": "string"},
    "n": {"type": "integer"},
    "x": {"type": ["number", "null"]},
    "many": {"type": "array"},
    "either": {"anyOf": [{"type": "string"}, {"type": "boolean"}]},
    "named": {"$ref": "#/$defs/word"},
}
TOOLS: dict[str, dict[str, Any]] = {
    "f": {"type": "object", "properties": PROPERTIES, "$defs": {"word": {"enum": ["7", "b"]}}},
    "get_weather": {},
}


def read(name: str, *pieces: str, ends: bool = True) -> list[str | Call]:
    reader = CallReader(SYNTAXES[name], TOOLS)
    parts = [part for piece in pieces for part in reader.feed(piece)]
    assert "" not in parts
    return calls_of(parts + reader.flush() if ends else parts)


def deepseek(text: str) -> str:
    """With the letters of its marks, which are not ASCII."""
    return text.replace("<|", "<\uff5c").replace("|>", "\uff5c>").replace("_", "\u2581")


F, NONE = Call("f", '{"n": 1}'), Call("f", "{}")
CITY = Call("get_weather", '{"city": "Zürich }</tool_call>{ \\" \\\\", "days": [{"n": 2}]}')
HERMES = '<tool_call>\n{"name": "f", "arguments": {"n": 1}}\n</tool_call>'
HERMES_CITY = f'<tool_call>{{"name":"get_weather","arguments":{CITY.arguments}}}</tool_call>'
LLAMA = '{"name": "f", "parameters": {"n": 1}}'
QWEN = "<tool_call>\n<function=f>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>"
GLM = "<tool_call>f\n<arg_key>n</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
MINIMAX = '<invoke name="f">\n<parameter name="n">1</parameter>\n</invoke>'
KIMI = '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"n": 1}<|tool_call_end|>'
KIMI_OPEN, KIMI_CLOSE = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
V3 = deepseek('<|tool_call_begin|>function<|tool_sep|>f\n```json\n{"n": 1}\n```<|tool_call_end|>')
V31 = deepseek('<|tool_call_begin|>f<|tool_sep|>{"n": 1}<|tool_call_end|>')
DS_OPEN, DS_CLOSE = deepseek("<|tool_calls_begin|>"), deepseek("<|tool_calls_end|>")
GEMMA = '<|tool_call>call:f{n:1,text:<|"|>é "a"\n<|"|>,many:[{k:true,l:[]},null,-1.5e3]}<tool_call|>'
OF_GEMMA = Call("f", '{"n": 1, "text": "é \\"a\\"\\n", "many": [{"k": true, "l": []}, null, -1.5e3]}')
VALUES = Call(
    "f",
    '{"text": " 1\\n\\"é\\" <b>", "n": 12, "x": null, "many": [1, {"a": "é"}], "either": true, "named": "7", "other": {"a": 1}}',
)
WRITTEN = {
    "text": ' 1\n"é" <b>',
    "n": "12",
    "x": "None",
    "many": '[1, {"a": "é"}]',
    "either": "True",
    "named": "7",
    "other": '{"a": 1}',
}

CASES: list[tuple[str, str, list[str | Call]]] = [
    ("hermes", "Hello, < world", ["Hello, < world"]),
    ("hermes", " spaces \n", [" spaces \n"]),
    ("hermes", HERMES, [F]),
    ("hermes", f"Let me see.\n\n{HERMES}\n{HERMES_CITY}\n", ["Let me see.", F, CITY]),
    ("hermes", f"{HERMES} and then", [F, " and then"]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"n": 1}}', [F]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', [NONE]),
    ("hermes", '<tool_call>{"arguments": {"n": 1}, "name": "f"}</tool_call>', [F]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"n": 1}, "id": "x"}</tool_call>', [F]),
    ("hermes", HERMES.replace('"f"', '"unknown"'), [Call("unknown", '{"n": 1}')]),
    ("hermes", " <tool_call>no", [" <tool_call>no"]),
    ("hermes", f'<tool_call>{{"name": f}}</tool_call>{HERMES}', ['<tool_call>{"name": f}</tool_call>', F]),
    ("hermes", '<tool_call>{"name": "f", "argum', ['<tool_call>{"name": "f", "argum']),
    ("hermes", '<tool_call>{"name": "f", "arguments": "x"}', ['<tool_call>{"name": "f", "arguments": "x"}']),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a', [Call("f", '{"a', False)]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}', [Call("f", '{"a": NaN}', False), "}"]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1e999}}', [Call("f", '{"a": 1e999}', False), "}"]),
    (
        "hermes",
        '<tool_call>{"arguments": {"a": 1e999}, "name": "f"}',
        ['<tool_call>{"arguments": {"a": 1e999}, "name": "f"}'],
    ),
    ("hermes", "<tool_call><tool_call>", ["<tool_call><tool_call>"]),
    ("hermes", f"<tool_call>{HERMES}", ["<tool_call>", F]),
    ("hermes", LLAMA, [LLAMA]),
    ("llama3_json", LLAMA, [F]),
    ("llama3_json", f" {LLAMA}; {LLAMA} ;\n", [F, F]),
    ("llama3_json", f"{LLAMA} done", [F, " done"]),
    ("llama3_json", LLAMA.replace('"f"', '"unknown"'), [LLAMA.replace('"f"', '"unknown"')]),
    ("llama3_json", f"I call {LLAMA}", [f"I call {LLAMA}"]),
    ("llama3_json", '\n{"answer": 42}', ['\n{"answer": 42}']),
    ("llama3_json", "{curly} " + LLAMA, ["{curly} " + LLAMA]),
    ("llama3_json", '{"name": "f", "param', ['{"name": "f", "param']),
    ("llama3_json", " ; text", [" ; text"]),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "f", "arguments": {"n": 1}, "id": "abc"}, {"name": "f", "arguments": {}}]',
        [F, NONE],
    ),
    ("mistral", 'So [TOOL_CALLS][{"arguments": {}, "name": "f"}] yes', ["So", NONE, " yes"]),
    ("mistral", "[TOOL_CALLS] nothing", ["[TOOL_CALLS] nothing"]),
    ("mistral_args", 'x[TOOL_CALLS]f[ARGS]{"n": 1}[TOOL_CALLS]g[CALL_ID]1a[ARGS]{}', ["x", F, Call("g", "{}")]),
    ("mistral_args", '[TOOL_CALLS]f{"n": 1}', [F]),
    ("mistral_args", "[TOOL_CALLS]f is", ["[TOOL_CALLS]f is"]),
    ("deepseek_v3", f"Now.\n{DS_OPEN}{V3}\n{V3}{DS_CLOSE}", ["Now.", F, F]),
    ("deepseek_v31", f"Now. {DS_OPEN}{V31}{V31}{DS_CLOSE}.", ["Now.", F, F, "."]),
    ("deepseek_v31", f"{DS_OPEN}none", [f"{DS_OPEN}none"]),
    ("kimi_k2", f"Hm.{KIMI_OPEN}{KIMI}{KIMI.replace(':0', ':1')}{KIMI_CLOSE}", ["Hm.", F, F]),
    ("kimi_k2", f"{KIMI_OPEN}{KIMI.removesuffix('call_end|>')}", [F, "<|tool_"]),
    (
        "functiongemma",
        GEMMA.replace("<|tool_call>", "<start_function_call>")
        .replace("<tool_call|>", "<end_function_call>")
        .replace('<|"|>', "<escape>"),
        [OF_GEMMA],
    ),
    ("gemma4", f"a {GEMMA}{GEMMA} b", ["a", OF_GEMMA, OF_GEMMA, " b"]),
    ("gemma4", "<|tool_call>call:f{}<tool_call|>", [NONE]),
    ("gemma4", "<|tool_call>call:f{n:x}<tool_call|>", [Call("f", '{"n"', False), "x}<tool_call|>"]),
    ("gemma4", "<|tool_call>call:f{n:1e999}<tool_call|>", [Call("f", '{"n"', False), "1e999}<tool_call|>"]),
    ("gemma4", "<|tool_call>call:f{text:<|", [Call("f", '{"text"', False)]),
    ("glm45", f"So.\n{GLM}\n{GLM}", ["So.", F, F]),
    ("glm45", GLM.replace("\n", ""), [F]),
    ("glm45", "<tool_call>f</tool_call>", [NONE]),
    ("glm45", "<tool_call>hello there</tool_call>", ["<tool_call>hello there</tool_call>"]),
    ("glm45", "<tool_call>f there</tool_call>", [Call("f", "", False), "there</tool_call>"]),
    ("qwen3_coder", f"Ok.\n{QWEN}\n{QWEN}\n", ["Ok.", F, F]),
    ("qwen3_coder", "<tool_call>\n<function=f>\n</function>\n</tool_call>", [NONE]),
    ("qwen3_coder", f"<tool_call>\n<function f>{QWEN}", ["<tool_call>\n<function f>", F]),
    ("qwen3_coder", "<tool_call><function=f><parameter=text>\na\n", [Call("f", '{"text": "a', False)]),
    ("minimax_m2", f"<minimax:tool_call>\n{MINIMAX}\n{MINIMAX}\n</minimax:tool_call>\nDone", [F, F, "\nDone"]),
    ("minimax_m2", "<minimax:tool_call>text", ["<minimax:tool_call>text"]),
    (
        "pythonic",
        """[f(n=1), get_weather(a='\\'x\\n"\\u00e9\\x41\\q', b=[True, None,], c={"k": -1.5}), f()]""",
        [F, Call("get_weather", '{"a": "\'x\\n\\"\\u00e9\\u0041\\\\q", "b": [true, null], "c": {"k": -1.5}}'), NONE],
    ),
    ("pythonic", "[f(n=1)] and", [F, " and"]),
    ("pythonic", "[unknown(n=1)]", ["[unknown(n=1)]"]),
    ("pythonic", "[1, 2]", ["[1, 2]"]),
    ("pythonic", "[f(n=open)]", [Call("f", '{"n"', False), "open)]"]),
    (
        "qwen3_coder",
        "<tool_call>\n<function=f>\n"
        + "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in WRITTEN.items())
        + "</function>\n</tool_call>",
        [VALUES],
    ),
    (
        "glm45",
        "<tool_call>f\n"
        + "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in WRITTEN.items())
        + "</tool_call>",
        [VALUES],
    ),
    (
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="f">\n'
        + "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in WRITTEN.items())
        + "</invoke>\n</minimax:tool_call>",
        [VALUES],
    ),
    ("hermes", f"a{' ' * 300}{HERMES}{' ' * 300}b", [f"a{' ' * 44}", F, f"{' ' * 300}b"]),
]


@pytest.mark.parametrize("name", SYNTAXES)
def test_white_space_is_not_held_without_bound(name: str) -> None:
    reader = CallReader(SYNTAXES[name], TOOLS)
    returned = calls_of([part for _ in range(1000) for part in reader.feed(" \n")])
    assert isinstance(returned[0], str)
    assert len(returned[0]) >= 2000 - 256
    assert calls_of([returned[0], *reader.flush()]) == [" \n" * 1000]


@pytest.mark.parametrize(("name", "text", "right"), CASES)
def test_calls_are_separated_from_text_for_any_split(name: str, text: str, right: list[str | Call]) -> None:
    assert read(name, text) == right
    assert read(name, *text) == right
    for cut in range(1, len(text)):
        assert read(name, text[:cut], text[cut:]) == right, cut
    for seed in range(20):
        rng = Random(seed)
        cuts = sorted(rng.sample(range(len(text)), min(4, len(text))))
        pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert read(name, *pieces) == right, pieces


FRAGMENTS = st.sampled_from(
    (
        *(
            "<tool_call>",
            "</tool_call>",
            "<tool",
            "{",
            "}",
            "[",
            "]",
            '"',
            "\\",
            ", ",
            "\n",
            ";",
            "x",
            " ",
            "NaN",
            "1e999",
        ),
        *('"name": "f"', '"arguments": {}', '"parameters": {"a": "\\ud800"}', "f(", ")", "n=", "'", '<|"|>', "n:"),
        *(
            HERMES,
            HERMES_CITY,
            LLAMA,
            QWEN,
            GLM,
            GEMMA,
            KIMI,
            V3,
            V31,
            MINIMAX,
            KIMI_OPEN,
            KIMI_CLOSE,
            DS_OPEN,
            DS_CLOSE,
        ),
        *(
            "[TOOL_CALLS]",
            "f[ARGS]",
            "<function=f>",
            "<parameter=text>",
            "</parameter>",
            "</function>",
            "<minimax:tool_call>",
        ),
        *("<arg_key>text</arg_key>", "<arg_value>", "</arg_value>", "<|tool_call>call:f{", "[f(", " " * 250),
    )
)


@given(name=st.sampled_from(sorted(SYNTAXES)), fragments=st.lists(FRAGMENTS, max_size=12), data=st.data())
def test_any_text_is_parsed_the_same_in_any_pieces_without_losses(
    name: str, fragments: list[str], data: st.DataObject
) -> None:
    text = "".join(fragments)
    whole = read(name, text)
    assert read(name, *text) == whole
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(name, *pieces) == whole
    so_far = read(name, text, ends=False)
    assert read(name, *text, ends=False) == so_far, "what another router has passed on"
    assert read(name, *pieces, ends=False) == so_far
    calls = [part for part in whole if isinstance(part, Call)]
    for call in calls:
        assert not call.is_whole or isinstance(json.loads(call.arguments), dict)
        call.arguments.encode()
    if not calls:
        assert "".join(map(str, whole)) == text
    if not any(call.is_whole for call in calls):
        reader = CallReader(SYNTAXES[name], TOOLS)
        parts = reader.feed(text) + reader.flush()
        raw = [part if isinstance(part, str) else part.text for part in parts if isinstance(part, str | CallEnded)]
        assert "".join(raw) == text, "a call that is not whole keeps what the model wrote"


@pytest.mark.parametrize(
    ("name", "begin", "middle", "end"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"text": "', 'x\\"', '"}}'),
        ("hermes", '<tool_call>{"arguments": {"text": "', 'x\\"', '"}, "name": "f"}'),
        ("qwen3_coder", "<tool_call><function=f><parameter=text>", 'x\n"', "</parameter></function>"),
        ("qwen3_coder", "<tool_call><function=f><parameter=many>[", "0, ", "0]</parameter></function>"),
        ("pythonic", "[f(text='", 'x\\"', "')"),
        ("gemma4", "<|tool_call>call:f{many:[", "1,", "1]}"),
    ],
)
def test_a_long_call_takes_linear_time(name: str, begin: str, middle: str, end: str) -> None:
    reader = CallReader(SYNTAXES[name], TOOLS)
    parts = reader.feed(begin)
    for _ in range(50_000):
        parts += reader.feed(middle)
    (call,) = calls_of(parts + reader.feed(end))
    assert isinstance(call, Call)
    assert len(call.arguments) > 50_000
    assert [call] == read(name, begin + middle * 50_000 + end)
    nested = "<tool_call>{" * 50_000 + "}" * 50_000
    assert read("hermes", nested, HERMES) == [nested, F]


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ('<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>', "hermes"),
        ('Respond in the format {"name": function name, "parameters": dictionary of argument name}.', "llama3_json"),
        ("<tool_call>\n<function=example>\n<parameter=a>\n</tool_call>", "qwen3_coder"),
        ("<tool_call>{name}\n<arg_key>a</arg_key></tool_call>", "glm45"),
        (f"{DS_OPEN}{{{{ name }}}}\n```json", "deepseek_v3"),
        (f"{DS_OPEN}{{{{ name }}}}", "deepseek_v31"),
        ("[TOOL_CALLS][", "mistral"),
        ("[TOOL_CALLS]{{ name }}[ARGS]", "mistral_args"),
        (KIMI_OPEN, "kimi_k2"),
        ("<|tool_call>call:{{ name }}<tool_call|>", "gemma4"),
        ("<start_function_call>call:", "functiongemma"),
        ("<minimax:tool_call>", "minimax_m2"),
        ("as [func_name1(params_name1=params_value1), func_name2(params)]", "pythonic"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", None),
    ],
)
def test_the_syntax_is_found_in_the_template_s_own_text(template: str, name: str | None) -> None:
    assert find_syntax(template) is (None if name is None else SYNTAXES[name])


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ("{}", "tools"),
        ("[", "tools"),
        ("[" * 100_000, "tools"),
        ("[1]", "tools[0]"),
        ('[{"function": {"name": ""}}]', "tools[0]"),
        (
            '[{"function": {"name": "f"}}, {"function": {"name": "g", "parameters": []}}]',
            "tools[1].function.parameters",
        ),
    ],
)
def test_invalid_tools_are_named(tools: str, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_tools(tools)
    assert caught.value.param == param
