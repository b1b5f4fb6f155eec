"""Answers of a peer on their way to the caller."""

from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from triptych.errors import InternalError, InvalidRequest
from triptych.rpc.calls import stream


class _Answers:
    """A streaming call that yields what it is given."""

    def __init__(self, *messages: int) -> None:
        self._messages = messages
        self.cancelled = False

    async def __aiter__(self) -> AsyncIterator[int]:
        for message in self._messages:
            yield message

    def cancel(self) -> bool:
        self.cancelled = True
        return True


async def test_an_invalid_answer_in_a_stream_is_not_the_fault_of_the_caller() -> None:
    def convert(message: int) -> int:
        if message > 1:
            raise InvalidRequest("reason is not set to a known value")
        return message

    call = _Answers(1, 2)
    async with aclosing(stream(call, convert)) as answers:  # type: ignore[arg-type]
        assert await anext(answers) == 1
        with pytest.raises(InternalError, match="a peer sent an invalid answer: reason"):
            await anext(answers)
    assert call.cancelled
