import pytest

from triptych.machine.router.relative_times import RelativeTimes


def learned(times: RelativeTimes, *, rounds: int = 20) -> RelativeTimes:
    """Instance ``a`` takes a millisecond per pending token, ``b`` three."""
    for _ in range(rounds):
        for pending in (100, 400, 1600):
            times.took("a", pending, 0.001 * pending)
            times.took("b", pending, 0.003 * pending)
    return times


def test_the_line_is_the_time_over_the_pending_tokens_but_for_how_slow_an_instance_is() -> None:
    times = RelativeTimes()
    assert times.line() is None
    for _ in range(7):
        times.took("a", 100, 0.1)
    assert times.line() is None, "too few"
    line = learned(times).line()
    assert line is not None
    for name, token_s in (("a", 0.001), ("b", 0.003)):
        took_s = [times.slowness(name) * line.at(pending) for pending in (400, 1000, 1600)]
        assert took_s == pytest.approx([400 * token_s, 1000 * token_s, 1600 * token_s], rel=0.05)
    assert line.at(3200) == pytest.approx(2 * line.at(1600), rel=0.05)


def test_what_is_said_of_an_instance_does_not_depend_on_what_others_get() -> None:
    times = learned(RelativeTimes())
    before_s = times.slowness("b")
    for _ in range(300):
        times.took("a", 400, 0.4)
    line = times.line()
    assert line is not None
    assert times.slowness("b") == before_s
    assert before_s * line.at(400) == pytest.approx(1.2, rel=0.1)


def test_an_instance_is_as_slow_as_its_times_beside_those_of_all() -> None:
    times = learned(RelativeTimes())
    assert times.slowness("b") == pytest.approx(3 * times.slowness("a"), rel=0.05)
    assert times.slowness("c") == 1.0
    times.forget("b")
    assert times.slowness("b") == 1.0


def test_a_time_says_how_it_compares_once_eight_with_as_many_pending_tokens_are_known() -> None:
    times = RelativeTimes()
    assert times.relative(100, 0.1) is None
    assert [times.took("a", 100, 0.1) for _ in range(8)] == [None] * 8
    assert times.relative(100, 0.3) == pytest.approx(3.0)
    assert times.took("a", 100, 0.3) == pytest.approx(3.0)
    assert times.relative(100, 0.3) == pytest.approx(3.0, rel=0.3), "one more does not change the mean much"
    assert times.relative(1000, 0.3) is None


def test_an_instance_is_slow_beside_the_median_of_others_of_which_enough_is_known() -> None:
    times = RelativeTimes()
    for _ in range(8):
        times.took("a", 100, 0.1)
    for _ in range(8):
        times.took("b", 100, 0.9)
    assert times.slowness("b") > 2.0
    assert not times.is_slow("b", ["a"], 2.0), "nothing was comparable yet of the other"
    for _ in range(8):
        times.took("a", 100, 0.1)
    assert times.is_slow("b", ["a"], 2.0)
    assert not times.is_slow("a", ["b"], 2.0)
    for _ in range(7):
        times.took("d", 100, 0.9)
    assert times.slowness("d") == 1.0
    assert not times.is_slow("d", ["a"], 2.0), "too little is known of it"
    assert not times.is_slow("c", ["a"], 2.0)
    assert not times.is_slow("b", ["c"], 2.0), "nothing is known of the others"
    assert times.was_slow(9.0, ["a", "c"], 2.0)
    assert not times.was_slow(0.3, ["a", "c"], 2.0)
