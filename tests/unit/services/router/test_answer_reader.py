import re
from itertools import count

from triptych.domain.chat import ToolCall
from triptych.domain.generation import (
    Alternative,
    ChoiceFinished,
    Finished,
    FinishReason,
    Reasoned,
    TokenChunk,
    TokenLogprobs,
    ToolArguments,
    ToolCallMade,
)
from triptych.services.router.answer_reader import AnswerReader, Calling, Hidden, Reading, Reasoning
from triptych.tokens.reasoning import SYNTAXES
from triptych.tokens.tool_calls import SYNTAXES as CALL_SYNTAXES

CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
SURE = (TokenLogprobs(Alternative(1, b"x", 0.0), ()),)
STOP = Finished(FinishReason.STOP, 1, 0.0, 0.0)


CLOSING = 99


def calls(*, parallel: bool = True, choices: int = 1, thinks: bool = False, streams: bool = False) -> AnswerReader:
    ids = count()
    calling = Calling(CALL_SYNTAXES["hermes"], {"f": {}}, parallel, streams)
    reasoning = Reasoning(SYNTAXES["think"], "<think>\n", CLOSING) if thinks else None
    begun = dict.fromkeys(range(choices), ())
    return AnswerReader(Reading(calling, reasoning), begun, lambda: f"call_{next(ids)}")


def made(number: int, index: int = 0, choice: int = 0) -> ToolCallMade:
    return ToolCallMade(ToolCall(f"call_{number}", "f", "{}"), index, choice)


def test_tokens_and_logprobs_are_forwarded_whether_text_or_call() -> None:
    answer = calls()
    assert answer.chunk(TokenChunk((1,), "Hi <tool", logprobs=SURE)) == [TokenChunk((1,), "Hi", logprobs=SURE)]
    assert answer.chunk(TokenChunk((2, 3), CALL[5:] + "\nand " + CALL)) == [
        TokenChunk((2, 3), ""),
        made(0),
        TokenChunk((), "\nand"),
        made(1, 1),
    ]
    assert answer.finished(STOP) == [ChoiceFinished(FinishReason.TOOL_CALLS)]


def test_an_incomplete_call_of_a_truncated_answer_is_text() -> None:
    answer = calls()
    answer.chunk(TokenChunk((1,), CALL + CALL[:20]))
    assert answer.finished(Finished(FinishReason.LENGTH, 9, 0.0, 0.0)) == [
        TokenChunk((), CALL[:20]),
        ChoiceFinished(FinishReason.LENGTH),
    ]


def test_choices_are_parsed_separately_with_their_own_finish_reason() -> None:
    answer = calls(choices=2)
    assert answer.chunk(TokenChunk((1,), CALL[:20], 0)) == [TokenChunk((1,), "", 0)]
    assert answer.chunk(TokenChunk((2,), CALL[20:], 1)) == [TokenChunk((2,), CALL[20:], 1)]
    assert answer.chunk(TokenChunk((3,), CALL[20:], 0)) == [TokenChunk((3,), "", 0), made(0)]
    assert answer.finished(Finished(FinishReason.STOP, 1, 0.0, 0.0, 1)) == [ChoiceFinished(FinishReason.STOP, 1)]
    assert answer.finished(STOP) == [ChoiceFinished(FinishReason.TOOL_CALLS)]


def test_without_parallel_tool_calls_only_the_first_call_counts() -> None:
    answer = calls(parallel=False)
    assert answer.chunk(TokenChunk((1,), CALL + CALL)) == [TokenChunk((1,), ""), made(0)]


def test_arguments_are_streamed_in_pieces_to_a_caller_that_asks_for_it() -> None:
    answer = calls(streams=True)
    begun = ToolCallMade(ToolCall("call_0", "f", ""), 0)
    assert answer.chunk(TokenChunk((1,), CALL[:20])) == [TokenChunk((1,), "")]
    given = '<tool_call>{"name": "f", "arguments": {"a": "'
    assert answer.chunk(TokenChunk((2,), given[20:])) == [TokenChunk((2,), ""), begun, ToolArguments('{"a": "', 0)]
    assert answer.chunk(TokenChunk((3,), 'x"}}</tool_call> ' + CALL)) == [
        TokenChunk((3,), ""),
        ToolArguments('x"}', 0),
        ToolCallMade(ToolCall("call_1", "f", ""), 1),
        ToolArguments("{}", 1),
    ]
    assert answer.finished(STOP) == [ChoiceFinished(FinishReason.TOOL_CALLS)]


def test_a_streamed_call_goes_on_where_another_router_has_left_it() -> None:
    calling = Calling(CALL_SYNTAXES["hermes"], {"f": {}}, True, True)
    reading = Reading(calling, passed_on={0: ['<tool_call>{"name": "f", "arguments": {"a": "']})
    answer = AnswerReader(reading, {0: (1,)}, str)
    assert answer.chunk(TokenChunk((2,), 'x"}}</tool_call>')) == [TokenChunk((2,), ""), ToolArguments('x"}', 0)]


def test_a_streamed_call_that_is_cut_off_ends_as_the_model_left_it_and_others_are_dropped() -> None:
    answer = calls(streams=True, parallel=False)
    answer.chunk(TokenChunk((1,), CALL))
    assert answer.chunk(TokenChunk((2,), '<tool_call>{"name": "f", "arguments": {"a')) == [TokenChunk((2,), "")]
    assert answer.finished(Finished(FinishReason.LENGTH, 9, 0.0, 0.0)) == [ChoiceFinished(FinishReason.LENGTH)]


def test_calls_after_reasoning_are_calls_and_those_within_it_are_thoughts() -> None:
    answer = calls(thinks=True)
    assert answer.chunk(TokenChunk((1, 2), f"Use {CALL}?")) == [TokenChunk((1, 2), ""), Reasoned(f"Use {CALL}?")]
    assert answer.chunk(TokenChunk((3, CLOSING, 4), f"\n</think>\n\nYes. {CALL}")) == [
        TokenChunk((3, CLOSING, 4), "Yes."),
        made(0),
    ]
    assert answer.finished(STOP) == [ChoiceFinished(FinishReason.TOOL_CALLS)]
    assert answer.reasoning_tokens == 4


def test_tokens_of_an_answer_that_is_cut_off_while_it_thinks_are_all_of_reasoning() -> None:
    answer = calls(thinks=True)
    answer.chunk(TokenChunk((1, 2), "Hm </thi"))
    assert answer.finished(Finished(FinishReason.LENGTH, 2, 0.0, 0.0)) == [
        Reasoned(" </thi"),
        ChoiceFinished(FinishReason.LENGTH),
    ]
    assert answer.reasoning_tokens == 2


def test_reasoning_that_another_router_has_passed_on_is_not_sent_again_and_is_counted() -> None:
    reasoning = Reasoning(SYNTAXES["think"], "<think>\n", CLOSING)
    answer = AnswerReader(Reading(None, reasoning, {0: ["One", "", ""]}), {0: (1, 2, 3)}, str)
    assert answer.chunk(TokenChunk((4, CLOSING), " two</think>")) == [TokenChunk((4, CLOSING), ""), Reasoned(" two")]
    assert answer.chunk(TokenChunk((5,), "Three")) == [TokenChunk((5,), "Three")]
    assert answer.reasoning_tokens == 5


def test_special_tokens_that_are_no_marks_are_left_out_of_the_text() -> None:
    reasoning = Reasoning(SYNTAXES["mistral"], "", CLOSING)
    hidden = Hidden(re.compile(re.escape("[CALL]")), frozenset({1}))
    answer = AnswerReader(Reading(None, reasoning, hidden=hidden), {0: ()}, str)
    assert answer.chunk(TokenChunk((1,), "[THINK]a[CALL]b[/THINK]c[CALL]")) == [
        TokenChunk((1,), ""),
        Reasoned("ab"),
        TokenChunk((), "c"),
    ]
    assert answer.chunk(TokenChunk((2,), "spelled [CALL]")) == [TokenChunk((2,), "spelled [CALL]")]
