"""When encoders lend their time to text requests."""

import pytest

from triptych.policy.backlog import Alone, TextBacklog, Work
from triptych.policy.lending import Lender, LenderState, ends_earlier, idle
from triptych.policy.routing import Candidate

ENCODE_ONLY, LENDING, FULL = LenderState.ENCODE_ONLY, LenderState.LENDING, LenderState.FULL


@pytest.mark.parametrize(
    ("state", "items", "requests", "waiting", "then"),
    [
        (ENCODE_ONLY, 0, 0, 16, ENCODE_ONLY),
        (ENCODE_ONLY, 0, 0, 17, LENDING),
        (ENCODE_ONLY, 1, 0, 99, ENCODE_ONLY),
        (ENCODE_ONLY, 0, 8, 17, FULL),
        (LENDING, 0, 7, 8, LENDING),
        (LENDING, 0, 8, 8, FULL),
        (LENDING, 0, 7, 7, ENCODE_ONLY),
        (LENDING, 1, 7, 99, ENCODE_ONLY),
        (FULL, 0, 7, 16, LENDING),
        (FULL, 0, 8, 7, ENCODE_ONLY),
        (FULL, 1, 8, 99, ENCODE_ONLY),
    ],
)
def test_it_lends_without_items_from_one_number_of_waiting_requests_to_half_of_it(
    state: LenderState, items: int, requests: int, waiting: int, then: LenderState
) -> None:
    assert idle(Lender(state, items, requests, most=8), waiting=waiting, above=16) is then


def text(tokens: int, backlog: TextBacklog | None = None) -> Candidate:
    return Candidate("t", True, tokens, 1, backlog=backlog)


def test_the_load_where_a_request_waits_includes_its_own() -> None:
    work = Work(50, answer_tokens=10)
    assert not ends_earlier(text(160), text(100), work)
    assert ends_earlier(text(161), text(100), work)


class Steady:
    """A second for each token of a prompt, and a step for each of an answer."""

    def alone(self, work: Work) -> Alone:
        return Alone(work.tokens, work.tokens, work.answer_tokens)

    def pull_s(self, near_nbytes: int, far_nbytes: int) -> float:
        return float(near_nbytes + far_nbytes)


@pytest.mark.parametrize(("step_s", "earlier"), [(1.0, True), (1.9, True), (2.1, False)])
def test_where_seconds_are_known_they_count(step_s: float, earlier: bool) -> None:
    work, speed = Work(50, answer_tokens=10), Steady()
    here = text(0, TextBacklog(speed, wait_s=60.0, step_s=1.0))
    assert ends_earlier(here, text(1000, TextBacklog(speed, step_s=step_s)), work) is earlier
