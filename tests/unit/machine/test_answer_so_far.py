from collections.abc import Sequence

import pytest

from triptych.domain.chat import ChatRequest
from triptych.domain.continuation import ContinuedChoice
from triptych.domain.generation import ChatEvent, ChatFinished, ChoiceFinished, FinishReason, TokenChunk, Usage
from triptych.domain.sampling import SamplingParams
from triptych.errors import InternalError
from triptych.machine.answer_so_far import AnswerSoFar

STOP = FinishReason.STOP


def request(choices: int = 3) -> ChatRequest:
    return ChatRequest("r", "demo", (), SamplingParams(n=choices, seed=1), 60.0)


def begin(choices: int = 3) -> AnswerSoFar:
    asked = request(choices)
    return AnswerSoFar(asked, asked.sampling)


def after(*events: ChatEvent, choices: int = 3) -> AnswerSoFar:
    answer = begin(choices)
    assert answer.take(events) == events
    return answer


def test_a_request_of_which_nothing_has_come_is_sent_as_it_was() -> None:
    answer = begin()
    assert not answer.begun
    sent = answer.rest(4.0)
    assert (sent.continued, sent.timeout_s, sent.sampling) == ((), 4.0, request().sampling)


@pytest.mark.parametrize(
    ("events", "continued"),
    [
        ([TokenChunk((7,), "a", 1)], {0: (), 1: (7,), 2: ()}),
        ([TokenChunk((7, 2**32 - 1), "a"), TokenChunk((8,), "", 2), TokenChunk((9,), "b")], {0: (7, 2**32 - 1, 9), 1: (), 2: (8,)}),
        ([TokenChunk((7,), "a", 1), ChoiceFinished(STOP, 1), TokenChunk((8,), "b", 2)], {0: (), 2: (8,)}),
        ([ChoiceFinished(STOP, 0)], {1: (), 2: ()}),
    ],
)  # fmt: skip
def test_what_is_missing_is_asked_for(events: Sequence[ChatEvent], continued: dict[int, tuple[int, ...]]) -> None:
    answer = after(*events)
    assert (answer.begun, answer.may_go_on, answer.is_complete) == (True, True, False)
    assert answer.rest(4.0).continued == tuple(ContinuedChoice(*pair) for pair in continued.items())


def test_the_usage_is_that_of_the_whole_answer() -> None:
    """A router counts all tokens of the choices that it was told of."""
    answer = after(TokenChunk((1, 2), "a", 1), ChoiceFinished(STOP, 1), TokenChunk((3,), "b"))
    answer.rest(4.0)
    answer.take((TokenChunk((4,), "c"), ChoiceFinished(STOP)))
    answer.rest(3.0)
    end: list[ChatEvent] = [TokenChunk((5,), "d", 2), ChoiceFinished(STOP, 2), ChatFinished(Usage(9, 1, 4))]
    assert answer.take(end) == [*end[:2], ChatFinished(Usage(9, 5, 4))]
    assert (answer.is_complete, answer.may_go_on) == (True, False)


@pytest.mark.parametrize(
    "events",
    [
        (TokenChunk((1,), "a", 3),),
        (ChoiceFinished(STOP), TokenChunk((1,), "a")),
        (ChoiceFinished(STOP), ChoiceFinished(STOP)),
    ],
)
def test_a_choice_that_is_not_running_is_an_error(events: Sequence[ChatEvent]) -> None:
    with pytest.raises(InternalError, match="not running"):
        begin().take(events)


def test_the_usage_of_an_answer_from_one_router_is_that_routers() -> None:
    end: list[ChatEvent] = [TokenChunk((5,), "d"), ChoiceFinished(STOP), ChatFinished(Usage(9, 1, 4))]
    assert begin().take(end) == end
