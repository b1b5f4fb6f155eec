from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from triptych.errors import InternalError, InvalidRequest
from triptych.rpc.calls import stream


class FakeCall:
    """A streaming call that yields the given responses."""

    def __init__(self, *messages: int) -> None:
        self._messages = messages
        self.cancelled = False

    async def __aiter__(self) -> AsyncIterator[int]:
        for message in self._messages:
            yield message

    def cancel(self) -> bool:
        self.cancelled = True
        return True


async def test_an_invalid_response_in_a_stream_is_not_the_callers_error() -> None:
    def convert(message: int) -> int:
        if message > 1:
            raise InvalidRequest("reason is not set to a known value")
        return message

    call = FakeCall(1, 2)
    async with aclosing(stream(call, convert)) as answers:  # type: ignore[arg-type]
        assert await anext(answers) == 1
        with pytest.raises(InternalError, match="a peer sent an invalid answer: reason"):
            await anext(answers)
    assert call.cancelled
