"""Prices of what devices answer."""

import pytest

from triptych.workload.prices import Prices


def test_prices_are_those_of_the_time_that_answers_took() -> None:
    prices = Prices.of(7.2, 500.0, 250, 50_000)
    assert prices is not None
    assert prices.usd_per_thousand_requests == pytest.approx(4.0), "a dollar for 250 requests"
    assert prices.usd_per_million_tokens == pytest.approx(20.0)
    assert str(prices) == "$7.20 per hour, $4.00 per thousand requests, $20.00 per million tokens"


def test_without_answers_there_are_none() -> None:
    assert Prices.of(7.2, 500.0, 0, 0) is None
