from itertools import count

from triptych.domain.chat import ToolCall
from triptych.domain.generation import (
    Alternative,
    ChoiceFinished,
    Finished,
    FinishReason,
    TokenChunk,
    TokenLogprobs,
    ToolCallMade,
)
from triptych.services.router.tool_calls import Calling, ToolCallStream
from triptych.tokens.tool_calls import CallSyntax

CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
SURE = (TokenLogprobs(Alternative(1, b"x", 0.0), ()),)
STOP = Finished(FinishReason.STOP, 1, 0.0, 0.0)


def calls(*, parallel: bool = True, choices: int = 1) -> ToolCallStream:
    ids = count()
    return ToolCallStream(
        Calling(CallSyntax.TAGGED, frozenset({"f"}), parallel), range(choices), lambda: f"call_{next(ids)}"
    )


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
