import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.workload.requests import WorkloadError
from triptych.workload.search import PRECISION, Bracket, RateSearch


def searched(bracket: Bracket, limit: float) -> tuple[RateSearch, list[float]]:
    search, tried = RateSearch(bracket), []
    while (rate := search.next_rate) is not None:
        tried.append(rate)
        search.tried(rate, is_good=rate <= limit)
    return search, tried


@given(st.floats(0.01, 100), st.floats(1.1, 1e4), st.floats(0, 1))
def test_the_limit_is_found_with_few_tries_none_of_them_far_above(least: float, factor: float, share: float) -> None:
    bracket = Bracket(least, least * factor)
    limit = least * factor**share * 0.999_999
    search, tried = searched(bracket, limit)
    if limit < least:
        assert (search.good, tried) == (None, [least])
        return
    assert search.good is not None
    assert search.good <= limit
    if limit < bracket.highest:
        assert limit < search.good * (1 + PRECISION) * (1 + 1e-9)
    assert max(tried) <= max(least, 2 * limit)
    assert len(tried) <= 2 + math.ceil(math.log2(factor)) + 6


def test_where_the_highest_rate_is_good_there_is_no_limit() -> None:
    search, tried = searched(Bracket(1, 12), math.inf)
    assert (search.good, search.too_high) == (12, None)
    assert tried == [1, 2, 4, 8, 12]


@pytest.mark.parametrize("text", ["", "4", "4..", "..4", "4..2", "2..2", "0..4", "a..b", "1..inf", "nan..4", "1..2..3"])
def test_a_bracket_is_two_rates(text: str) -> None:
    with pytest.raises(WorkloadError, match=r"LEAST\.\.HIGHEST"):
        Bracket.parse(text)
