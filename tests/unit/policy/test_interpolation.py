"""Interpolation is exact at measured rows, monotone everywhere, and knows its error."""

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.unit.policy.profiles import DECODER, ENCODER
from triptych.domain.profile import DecodeRow, EncodeRow
from triptych.policy.interpolation import Line, Surface, held_out_errors

NUMBERS = st.floats(0.001, 1e6)
ROWS = st.lists(
    st.tuples(st.integers(1, 50), st.integers(1, 9), NUMBERS), min_size=1, max_size=30, unique_by=lambda row: row[:2]
)
PLACES = st.floats(0, 200)


def test_between_two_points_the_value_is_linear() -> None:
    line = Line([(10, 1.0), (20, 3.0)])
    assert [line.at(x) for x in (10, 15, 20)] == [1.0, 2.0, 3.0]
    surface = Surface([(10, 1, 1.0), (20, 1, 3.0), (10, 3, 2.0), (20, 3, 6.0)])
    assert surface.at(15, 2) == pytest.approx(3.0)


def test_outside_the_range_the_last_slope_continues_and_the_first_value_holds() -> None:
    line = Line([(10, 1.0), (20, 3.0)])
    assert (line.at(30), line.at(0)) == (5.0, 1.0)
    assert Line([(10, 1.0)]).at(30) == 3.0  # a single point: in proportion
    surface = Surface([(10, 1, 1.0), (10, 3, 2.0)])
    assert (surface.at(10, 5), surface.at(10, 0)) == (3.0, 1.0)
    assert [line.holds(x) for x in (9, 10, 20, 21)] == [False, True, True, False]
    assert Line([(0, 2.0)]).at(30) == 2.0, "in proportion to nothing"
    assert (Surface([(10, 2, 1.0)]).at(10, 6), Surface([(10, 0, 1.0)]).at(10, 6)) == (3.0, 1.0)


def test_a_place_is_in_range_if_both_lines_around_it_have_it() -> None:
    surface = Surface([(10, 1, 1.0), (90, 1, 2.0), (10, 2, 2.0), (20, 2, 3.0)])
    assert surface.holds(90, 1)
    assert surface.holds(20, 1.5)
    assert not surface.holds(21, 1.5)
    assert not surface.holds(10, 3)
    assert not surface.holds(10, 0)


def test_a_smaller_measured_value_after_a_larger_one_is_raised() -> None:
    assert Line([(1, 5.0), (2, 3.0), (3, 6.0)]).at(2) == 5.0
    assert Surface([(1, 1, 5.0), (1, 2, 3.0)]).at(1, 2) == 5.0


def test_where_lines_cross_the_larger_one_holds_from_there_on() -> None:
    surface = Surface([(0, 1, 0.0), (10, 1, 10.0), (20, 1, 30.0), (0, 2, 5.0), (20, 2, 5.0)])
    assert [surface.at(x, 2) for x in (2.5, 5, 7.5, 10, 30)] == pytest.approx([5.0, 5.0, 7.5, 10.0, 50.0])
    beyond = Surface([(0, 1, 0.0), (10, 1, 10.0), (0, 2, 6.0), (10, 2, 11.0)])
    assert [beyond.at(x, 2) for x in (11, 12, 20)] == pytest.approx([11.5, 12.0, 20.0]), "they cross at 12"


def test_nothing_measured_is_an_error() -> None:
    with pytest.raises(ValueError, match="without points"):
        Line([])
    with pytest.raises(ValueError, match="without rows"):
        Surface([])


@example(  # two lines cross between the points, and the third is the last
    rows=[(3, 5, 315876.0), (2, 4, 29007.0), (29, 1, 1.0), (33, 1, 459460.0)], x=34.0, y=16.0, dx=1.0, dy=0.0
)
@given(rows=ROWS, x=PLACES, y=PLACES, dx=st.floats(0, 50), dy=st.floats(0, 50))
def test_more_work_never_costs_less(
    rows: list[tuple[int, int, float]], x: float, y: float, dx: float, dy: float
) -> None:
    surface = Surface(rows)
    value = surface.at(x, y)
    assert value > 0
    assert surface.at(x + dx, y + dy) >= value * (1 - 1e-9)


@given(rows=ROWS, x=PLACES, y=PLACES)
def test_a_cut_along_y_has_the_values_of_the_surface(rows: list[tuple[int, int, float]], x: float, y: float) -> None:
    surface = Surface(rows)
    assert surface.along(x).at(y) == pytest.approx(surface.at(x, y))


@given(rows=ROWS)
def test_no_prediction_at_a_measured_row_is_below_it(rows: list[tuple[int, int, float]]) -> None:
    surface = Surface(rows)
    largest = max(seconds for _, _, seconds in rows)
    for x, y, seconds in rows:
        assert surface.holds(x, y)
        assert seconds * (1 - 1e-9) <= surface.at(x, y)
        if len(surface.ys) == 1:
            assert surface.at(x, y) <= largest


def test_held_out_rows_of_a_linear_cost_have_no_error() -> None:
    errors = {row.table: row for row in held_out_errors(ENCODER)} | {row.table: row for row in held_out_errors(DECODER)}
    assert sorted(errors) == ["decode", "encode", "prefill"]  # prepare has two rows on each line: none can be held out
    assert all(row.points >= 1 and row.worst < 1e-9 for row in errors.values())


def test_where_lines_have_one_row_each_a_row_between_lines_is_held_out() -> None:
    rows = tuple(EncodeRow(16, items, seconds) for items, seconds in ((1, 1.0), (2, 1.6), (3, 3.0)))
    (error,) = held_out_errors(replace(ENCODER, encode=rows, prepare=(), transfer=()))
    assert error.points == 1
    assert error.worst == pytest.approx(0.25)


def test_the_error_is_relative_to_the_row_that_was_held_out() -> None:
    rows = tuple(EncodeRow(tokens, 1, seconds) for tokens, seconds in ((1, 1.0), (2, 4.0), (3, 3.0)))
    (error,) = held_out_errors(replace(ENCODER, encode=rows, prepare=(), transfer=()))
    assert (error.table, error.points, error.median, error.worst) == ("encode", 1, 0.5, 0.5)


def test_every_fourth_inner_row_is_held_out() -> None:
    rows = tuple(DecodeRow(1, context, 0.1) for context in range(1, 13))
    (error,) = held_out_errors(replace(DECODER, prefill=(), decode=rows))
    assert error.points == 2


@pytest.mark.parametrize("y", [0.5, 1.0, 3.0, 8.0, 20.0])
@pytest.mark.parametrize("x", [0.0, 0.5, 90.0, 395.0])
def test_a_run_has_the_value_at_each_place(x: float, y: float) -> None:
    surface = Surface([(0, 1, 1.0), (100, 1, 2.0), (400, 1, 9.0), (50, 8, 3.0), (130, 8, 30.0)])
    run = surface.run(x, y, 60)
    assert run == pytest.approx([surface.at(x + number, y) for number in range(60)])
