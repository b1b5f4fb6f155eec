from dataclasses import replace
from functools import partial

import pytest

from triptych.domain.continuation import ContinuedChoice
from triptych.domain.generation import (
    ChatFinished,
    ChoiceFinished,
    FieldsIgnored,
    Finished,
    FinishReason,
    Ready,
    TokenChunk,
    ToolCallMade,
    Usage,
)
from triptych.errors import EngineFailure, InternalError
from triptych.machine.router.attainment import Gaps
from triptych.services.router.answer import Answer
from triptych.services.router.answer_reader import Calling, Reading
from triptych.services.router.stream_buffer import StreamBuffer
from triptych.tokens.tool_calls import SYNTAXES

CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


def finished(choice: int = 0) -> Finished:
    return Finished(FinishReason.STOP, 2, 0.0, 0.0, choice)


async def test_events_that_arrive_together_are_forwarded_together_with_the_usage_last() -> None:
    buffer = StreamBuffer()
    answer = Answer(buffer, None, begun=dict.fromkeys(range(2), ()), usage=Usage(7, 0, 4), clock=lambda: 0.0)
    chunks = [TokenChunk((1, 2), CALL), TokenChunk((3,), "b", 1)]
    assert answer.take([Ready((), 0.0, 0.0), *chunks, finished()]) == [finished()]
    assert (answer.has_ended, answer.streamed_tokens, answer.finish_reason) == (False, 3, "stop")
    assert await buffer.get() == [*chunks, ChoiceFinished(FinishReason.STOP)]
    assert answer.take([finished(1)]) == [finished(1)]
    assert answer.has_ended
    assert await buffer.get() == [ChoiceFinished(FinishReason.STOP, 1), ChatFinished(Usage(7, 4, 4))]


async def test_tool_calls_are_parsed_when_the_request_has_tools() -> None:
    buffer = StreamBuffer()
    answer = Answer(
        buffer,
        Reading(Calling(SYNTAXES["hermes"], {"f": {}}, True)),
        begun=dict.fromkeys(range(1), ()),
        usage=Usage(7, 0),
        clock=lambda: 0.0,
    )
    answer.take([TokenChunk((1, 2), CALL), finished()])
    _, made, end, _ = await buffer.get()
    assert isinstance(made, ToolCallMade)
    assert made.call.call_id.startswith("call_")
    assert end == ChoiceFinished(FinishReason.TOOL_CALLS)


async def test_the_usage_has_the_tokens_that_a_prefix_cache_had_of_the_prompt() -> None:
    buffer = StreamBuffer()
    answer = Answer(buffer, None, begun={0: (), 1: ()}, usage=Usage(7, 0, 1, 2, 3), clock=lambda: 0.0)
    answer.take([replace(finished(), cached_tokens=4), finished(1)])
    assert (await buffer.get())[-1] == ChatFinished(Usage(7, 4, 1, 2, 3, cached_tokens=4))


async def test_fields_that_the_template_does_not_use_are_named_with_the_first_event() -> None:
    buffer, chunk = StreamBuffer(), TokenChunk((1,), "a")
    answer = Answer(buffer, None, begun={0: ()}, usage=Usage(7, 0), ignored=("x",), clock=lambda: 0.0)
    answer.take([Ready((), 0.0, 0.0)])
    answer.take([chunk])
    assert await buffer.get() == [FieldsIgnored(("x",)), chunk]
    answer.take([chunk])
    assert await buffer.get() == [chunk]


def test_gaps_count_from_when_tokens_were_ready_and_not_from_when_they_were_sent() -> None:
    gaps, now_s = Gaps(0.2), iter((1.0, 1.5))
    answer = Answer(StreamBuffer(), None, begun={0: ()}, usage=Usage(7, 0), gaps=gaps, clock=partial(next, now_s))
    answer.take([TokenChunk((1,), "a")])
    answer.take([TokenChunk((2, 3), "bc", waited_s=0.2)])
    assert (gaps.count, gaps.over_limit) == (2, 0)
    assert gaps.seconds == pytest.approx(0.3)


def test_a_choice_ends_once() -> None:
    answer = Answer(StreamBuffer(), None, begun=dict.fromkeys(range(2), ()), usage=Usage(7, 0), clock=lambda: 0.0)
    answer.take([finished()])
    with pytest.raises(InternalError, match="choice 0"):
        answer.take([finished()])


async def test_of_events_that_an_instance_may_not_send_nothing_is_passed_on() -> None:
    """Another one goes on from what the client has."""
    buffer = StreamBuffer()
    answer = Answer(buffer, None, begun={0: (), 1: (9,)}, usage=Usage(7, 0), most_tokens=4, clock=lambda: 0.0)
    good = TokenChunk((1, 2), "a")
    answer.take([good])
    assert await buffer.get() == [good]
    for bad in (TokenChunk((1,), "x", 2), finished(2), TokenChunk((1, 2, 3), "x"), TokenChunk((1, 2, 3, 4), "x", 1)):
        with pytest.raises(EngineFailure, match="the text instance sent"):
            answer.take([TokenChunk((5,), "b", 1), bad])
    with pytest.raises(EngineFailure):
        answer.take([finished(), finished()])
    assert answer.continued() == (ContinuedChoice(0, (1, 2)), ContinuedChoice(1, (9,)))
    last = TokenChunk((3, 4), "b")
    answer.take([last])
    assert await buffer.get() == [last], "as many as may be"


async def test_what_has_been_passed_on_is_known_per_choice_that_has_not_finished() -> None:
    answer = Answer(StreamBuffer(), None, begun=dict.fromkeys(range(3), ()), usage=Usage(7, 0), clock=lambda: 0.0)
    assert answer.continued() == tuple(ContinuedChoice(choice, ()) for choice in range(3))
    answer.take([TokenChunk((1, 2), "a"), TokenChunk((2**32 - 1,), "b", 2), TokenChunk((3,), "c")])
    answer.take([TokenChunk((4,), "", 1), finished(1), TokenChunk((5,), "d", 2)])
    assert answer.continued() == (ContinuedChoice(0, (1, 2, 3)), ContinuedChoice(2, (2**32 - 1, 5)))
    with pytest.raises(InternalError, match="choice 1"):
        answer.take([TokenChunk((6,), "e", 1)])


@pytest.mark.parametrize("cut", range(1, len(CALL) + 1))
async def test_a_tool_call_that_two_routers_read_is_one_call(cut: int) -> None:
    calling = Calling(SYNTAXES["hermes"], {"f": {}}, True)
    calls = []
    for begun, passed_on, text in (((), "", CALL[:cut]), ((1,), CALL[:cut], CALL[cut:])):
        buffer = StreamBuffer()
        reading = Reading(calling, passed_on={0: [passed_on] * len(begun)})
        answer = Answer(buffer, reading, begun={0: begun}, usage=Usage(7, 0), clock=lambda: 0.0)
        assert answer.streamed_tokens == len(begun)
        answer.take([TokenChunk((len(begun) + 1,), text)])
        calls += [event.call for event in await buffer.get() if isinstance(event, ToolCallMade)]
    assert answer.continued() == (ContinuedChoice(0, (1, 2)),)
    assert [(call.name, call.arguments) for call in calls] == [("f", "{}")]


@pytest.mark.parametrize("cut", range(len(CALL) + 1))
async def test_a_tool_call_that_two_text_instances_wrote_is_one_call(cut: int) -> None:
    buffer = StreamBuffer()
    answer = Answer(
        buffer,
        Reading(Calling(SYNTAXES["hermes"], {"f": {}}, True)),
        begun=dict.fromkeys(range(1), ()),
        usage=Usage(7, 0),
        clock=lambda: 0.0,
    )
    answer.take([TokenChunk((1,), CALL[:cut])])
    answer.take([TokenChunk((2,), CALL[cut:]), finished()])
    calls = [event.call for event in await buffer.get() if isinstance(event, ToolCallMade)]
    assert [(call.name, call.arguments) for call in calls] == [("f", "{}")]
