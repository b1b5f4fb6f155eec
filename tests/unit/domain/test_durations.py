import pytest

from triptych.domain.durations import in_words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.4, "0 s"),
        (60.0, "1 min"),
        (90.0, "90 s"),
        (1700.0, "28 min"),
        (3591.0, "60 min"),
        (3600.0, "1 h"),
        (5400.0, "90 min"),
        (7300.0, "2 h"),
        (86_400.0, "1 d"),
        (90_000.0, "25 h"),
        (30 * 86_400.0, "30 d"),
    ],
)
def test_a_duration_is_in_its_largest_unit(seconds: float, words: str) -> None:
    assert in_words(seconds) == words
