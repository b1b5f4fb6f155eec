import asyncio

import pytest

from triptych.domain.generation import ChatEvent, ChatFinished, ChoiceFinished, FinishReason, TokenChunk, Usage
from triptych.errors import EngineFailure
from triptych.services.router.stream_buffer import MERGE_TOKENS, MOST_EVENTS, StreamBuffer

END = (ChoiceFinished(FinishReason.STOP), ChatFinished(Usage(1, 2)))


async def test_buffered_events_are_delivered_together_with_the_end() -> None:
    buffer = StreamBuffer()
    for event in (TokenChunk((1,), "a"), TokenChunk((2,), "b"), *END):
        buffer.put([event])
    buffer.close(None)
    assert await buffer.get() == [TokenChunk((1, 2), "ab"), *END]
    assert not await buffer.get()


async def test_chunks_of_one_choice_alone_are_merged_and_only_up_to_a_bound() -> None:
    buffer = StreamBuffer()
    for number in range(MERGE_TOKENS // 2):
        buffer.put([TokenChunk((number, number), "xx")])
    buffer.put([TokenChunk((0,), "x")])
    buffer.put([TokenChunk((0,), "y", choice=1)])
    events = await buffer.get()
    assert [(len(event.token_ids), event.choice) for event in events if isinstance(event, TokenChunk)] == [
        (MERGE_TOKENS, 0),
        (1, 0),
        (1, 1),
    ]


async def test_what_was_put_together_is_delivered_together_however_slow_the_reader_is() -> None:
    """A caller that has a choice's last token has its end, and what was made of its text."""
    buffer = StreamBuffer()
    groups: list[list[ChatEvent]] = [
        [TokenChunk((number,), "x", number % 2), TokenChunk((), "y", number % 2), ChoiceFinished(FinishReason.STOP)]
        for number in range(MOST_EVENTS)
    ]
    for group in groups:
        buffer.put(group)
    large = [TokenChunk((number,), "x", number) for number in range(2 * MOST_EVENTS)]
    buffer.put(large)
    buffer.close(None)
    got = []
    while batch := await buffer.get():
        got.append(batch)
    merged = [[TokenChunk((number,), "xy", number % 2), group[-1]] for number, group in enumerate(groups)]
    assert got.pop() == large
    assert [event for batch in got for event in batch] == [event for group in merged for event in group]
    assert all(isinstance(batch[-1], ChoiceFinished) and len(batch) <= MOST_EVENTS for batch in got)
    assert len(got) <= 4


async def test_events_wait_for_others_until_the_end_where_the_answer_is_read_as_a_whole() -> None:
    buffer = StreamBuffer(collect_s=60.0)
    reading = asyncio.get_running_loop().create_task(buffer.get())
    for event in (TokenChunk((1,), "a"), TokenChunk((2,), "b")):
        buffer.put([event])
        for _ in range(3):
            await asyncio.sleep(0)
        assert not reading.done()
    buffer.put(END)
    buffer.close(None)
    assert await reading == [TokenChunk((1, 2), "ab"), *END]
    assert not await buffer.get()


async def test_events_that_wait_for_others_are_delivered_after_the_time_given() -> None:
    buffer = StreamBuffer(collect_s=0.01)
    for number in range(2):
        buffer.put([TokenChunk((number,), "a")])
    assert await buffer.get() == [TokenChunk((0, 1), "aa")]
    buffer.put([TokenChunk((2,), "a")])
    assert await buffer.get() == [TokenChunk((2,), "a")]


async def test_a_slow_reader_of_many_choices_gets_bounded_batches_and_loses_none() -> None:
    buffer = StreamBuffer()
    sent = [TokenChunk((number,), "x", number % 2) for number in range(3 * MOST_EVENTS // 2)]
    for event in sent:
        buffer.put([event])
    buffer.close(EngineFailure("it failed"))
    first, rest = await buffer.get(), await buffer.get()
    assert (len(first), [*first, *rest]) == (MOST_EVENTS, sent)
    with pytest.raises(EngineFailure):
        await buffer.get()
