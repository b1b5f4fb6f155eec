"""Limits of a router's cluster are checked where they are made."""

from typing import Any

import pytest

from triptych.machine.router.cluster_limits import ClusterLimits


@pytest.mark.parametrize(
    ("limits", "named"),
    [
        ({"first_backoff_s": 40.0}, "first_backoff_s"),
        ({"first_backoff_s": 0.0}, "first_backoff_s"),
        ({"max_failures_in_row": 0}, "max_failures_in_row"),
        ({"max_backoff_share": 1.5}, "max_backoff_share"),
        ({"outlier_factor": 11.0}, "outlier_factor"),
        ({"retry_share": -0.1}, "retry_share"),
        ({"hedge_share": 2.0}, "hedge_share"),
        ({"max_lent": 0}, "max_lent"),
        ({"pool_grace_s": -1.0}, "pool_grace_s"),
    ],
)
def test_a_limit_out_of_bounds_is_named(limits: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        ClusterLimits(**limits)


def test_the_smallest_limits_are_taken() -> None:
    limits = ClusterLimits(max_waiting_requests=0, hedge_share=0.0, outlier_factor=0.0, retry_share=0.0, retry_burst=0)
    assert limits.hedge_share == 0.0
