import pytest

from triptych.policy.ejection import ejection_s, is_outlier, may_eject


@pytest.mark.parametrize(
    ("usable", "ejected", "share", "may"),
    [
        (1, 0, 1.0, False),  # never the last one
        (2, 0, 0.0, True),  # always one of two or more
        (2, 1, 1.0, False),
        (4, 1, 0.5, True),
        (4, 2, 0.5, False),
        (5, 2, 0.5, False),
        (6, 2, 0.5, True),
        (8, 6, 1.0, True),
        (8, 7, 1.0, False),
        (0, 0, 0.5, False),
    ],
)
def test_at_most_a_share_of_a_pool_is_ejected_and_never_the_last(
    usable: int, ejected: int, share: float, may: bool
) -> None:
    assert may_eject(usable, ejected, share) is may


def test_ejections_in_a_row_take_longer_up_to_a_limit() -> None:
    assert [ejection_s(before, first_s=1.5, longest_s=10.0) for before in (0, 1, 2, 3, 4, 5000)] == [
        1.5,
        3.0,
        6.0,
        10.0,
        10.0,
        10.0,
    ]


def test_an_outlier_exceeds_a_multiple_of_the_median_of_the_others() -> None:
    assert is_outlier(5.1, [1.0, 0.9, 70.0], 5.0)
    assert not is_outlier(5.0, [1.0, 0.9, 70.0], 5.0)
    assert not is_outlier(100.0, [], 5.0)
