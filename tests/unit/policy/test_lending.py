"""When encoders lend their time to text requests."""

import pytest

from triptych.policy.lending import Lender, LenderState, idle

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
