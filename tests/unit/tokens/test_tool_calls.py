"""Tool calls are recognized however an answer is split; other text is unchanged."""

import json
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher

from triptych.errors import InvalidRequest
from triptych.tokens.tool_calls import Call, CallReader, CallSyntax, Tool, call_grammar, find_syntax, read_tools

TAGGED, BARE = CallSyntax.TAGGED, CallSyntax.BARE
NAMES = frozenset({"f", "get_weather"})
F = Call("f", '{"a": 1}')
WEATHER = Call("get_weather", '{"city": "Zürich }</tool_call>{ \\" \\\\", "days": [{"n": 2}]}')


def merged(told: list[str | Call]) -> list[str | Call]:
    """The same with adjacent texts joined."""
    out: list[str | Call] = []
    for part in told:
        if isinstance(part, str) and out and isinstance(out[-1], str):
            out[-1] += part
        else:
            out.append(part)
    return out


def read(syntax: CallSyntax, *pieces: str, ends: bool = True) -> list[str | Call]:
    reader = CallReader(syntax, NAMES)
    told = [part for piece in pieces for part in reader.feed(piece)]
    assert "" not in told
    return merged(told + reader.flush() if ends else told)


def tagged(call: Call) -> str:
    return f'<tool_call>\n{{"name": "{call.name}", "arguments": {call.arguments}}}\n</tool_call>'


def bare(call: Call) -> str:
    return f'{{"name": "{call.name}", "parameters": {call.arguments}}}'


CASES: list[tuple[CallSyntax, str, list[str | Call]]] = [
    (TAGGED, "Hello, < world", ["Hello, < world"]),
    (TAGGED, " spaces \n", [" spaces \n"]),
    (TAGGED, tagged(F), [F]),
    (TAGGED, f"Let me see.\n\n{tagged(F)}\n{tagged(WEATHER)}\n", ["Let me see.", F, WEATHER]),
    (TAGGED, f"{tagged(F)} and then", [F, " and then"]),
    (TAGGED, '<tool_call>{"name": "f", "arguments": {"a": 1}}', [F]),
    (TAGGED, '<tool_call>{"name": "f"}</tool_call>', [Call("f", "{}")]),
    (TAGGED, tagged(Call("unknown", "{}")), [Call("unknown", "{}")]),
    (TAGGED, " <tool_call>no", [" <tool_call>no"]),
    (TAGGED, f'<tool_call>{{"name": f}}</tool_call>{tagged(F)}', ['<tool_call>{"name": f}</tool_call>', F]),
    (TAGGED, '<tool_call>{"name": "f", "argum', ['<tool_call>{"name": "f", "argum']),
    (TAGGED, '<tool_call>{"name": "f", "arguments": "x"}', ['<tool_call>{"name": "f", "arguments": "x"}']),
    (
        TAGGED,
        '<tool_call>{"name": "f", "arguments": {"a": NaN}}',
        ['<tool_call>{"name": "f", "arguments": {"a": NaN}}'],
    ),
    (TAGGED, "<tool_call><tool_call>", ["<tool_call><tool_call>"]),
    (TAGGED, f"<tool_call>{tagged(F)}", ["<tool_call>", F]),
    (TAGGED, '{"name": "f", "parameters": {}}', ['{"name": "f", "parameters": {}}']),
    (BARE, bare(F), [F]),
    (BARE, f" {bare(F)}; {bare(WEATHER)} ;\n", [F, WEATHER]),
    (BARE, '{"name": "f", "parameters": {}} done', [Call("f", "{}"), " done"]),
    (BARE, bare(Call("unknown", "{}")), [bare(Call("unknown", "{}"))]),
    (BARE, f"I call {bare(F)}", [f"I call {bare(F)}"]),
    (BARE, '\n{"answer": 42}', ['\n{"answer": 42}']),
    (BARE, "{curly} " + bare(F), ["{curly} " + bare(F)]),
    (BARE, '{"name": "f", "param', ['{"name": "f", "param']),
    (BARE, " ; text", [" ; text"]),
]


@pytest.mark.parametrize(("syntax", "text", "right"), CASES)
def test_calls_are_separated_from_text_for_any_split(syntax: CallSyntax, text: str, right: list[str | Call]) -> None:
    assert read(syntax, text) == right
    assert read(syntax, *text) == right
    for cut in range(1, len(text)):
        assert read(syntax, text[:cut], text[cut:]) == right, cut
    for seed in range(20):
        rng = Random(seed)
        cuts = sorted(rng.sample(range(len(text)), min(4, len(text))))
        pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert read(syntax, *pieces) == right, pieces


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
        *('"name": "f"', '"arguments": {}', '"parameters": {"a": "\\ud800"}', tagged(F), bare(F), tagged(WEATHER)),
    )
)


@given(syntax=st.sampled_from(CallSyntax), fragments=st.lists(FRAGMENTS, max_size=12), data=st.data())
def test_any_text_is_parsed_the_same_in_any_pieces_without_losses(
    syntax: CallSyntax, fragments: list[str], data: st.DataObject
) -> None:
    text = "".join(fragments)
    whole = read(syntax, text)
    assert read(syntax, *text) == whole
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(syntax, *pieces) == whole
    so_far = read(syntax, text, ends=False)
    assert read(syntax, *text, ends=False) == so_far, "what another router has passed on"
    assert read(syntax, *pieces, ends=False) == so_far
    calls = [part for part in whole if isinstance(part, Call)]
    for call in calls:
        assert isinstance(json.loads(call.arguments), dict)
        call.arguments.encode()
    if not calls:
        assert "".join(map(str, whole)) == text


def test_a_long_call_takes_linear_time() -> None:
    reader = CallReader(TAGGED, NAMES)
    told = reader.feed('<tool_call>{"name": "f", "arguments": {"a": "')
    for _ in range(100_000):
        told += reader.feed('x\\"')
    assert told == []
    assert isinstance(reader.feed('"}}')[0], Call)
    nested = "<tool_call>{" * 50_000 + "}" * 50_000
    assert read(TAGGED, nested, tagged(F)) == [nested, F]


@pytest.mark.parametrize(
    ("template", "syntax"),
    [
        ('<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>', TAGGED),
        ('Respond in the format {"name": function name, "parameters": dictionary of argument name}.', BARE),
        ("<tool_call>\n<function=example>\n<parameter=a>\n</tool_call>", None),
        ("<tool_call>{name}\n<arg_key>a</arg_key></tool_call>", None),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", None),
    ],
)
def test_the_syntax_is_found_in_the_template_s_own_text(template: str, syntax: CallSyntax | None) -> None:
    assert find_syntax(template) is syntax


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


@pytest.mark.parametrize("syntax", CallSyntax)
@pytest.mark.parametrize("parallel", [False, True])
def test_the_grammar_is_accepted_by_llguidance(syntax: CallSyntax, parallel: bool) -> None:
    """``test_grammar`` shows with a tokenizer that constrained answers are calls."""
    tools = [Tool('f"\n\u6570', {"type": "object", "x-guidance": {"lenient": True}}), Tool("g", {"$ref": "#/$defs/a"})]
    tools[1] = Tool("g", {**tools[1].parameters, "$defs": {"a": {"type": "object"}}})
    assert not LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(call_grammar(syntax, tools, parallel=parallel)))
