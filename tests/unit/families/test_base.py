import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.errors import InvalidRequest
from triptych.families.base import Span, filled_positions

PLACEHOLDERS = frozenset({1, 2})


@given(before=st.lists(st.integers(3, 9), max_size=5), item=st.lists(st.integers(1, 5), max_size=20), data=st.data())
def test_an_item_fills_its_placeholders_and_skips_tokens_between_them(
    before: list[int], item: list[int], data: st.DataObject
) -> None:
    prompt = [*before, 1, *item, 2]
    places = [at for at, token in enumerate(prompt) if token in PLACEHOLDERS]
    tokens = data.draw(st.integers(1, len(places)))
    assert filled_positions(prompt, Span(len(before), tokens), PLACEHOLDERS) == tuple(places[:tokens])


@pytest.mark.parametrize("run", [Span(-1, 1), Span(0, 1), Span(1, 0), Span(9, 1), Span(1, 4)])
def test_a_run_that_is_not_in_the_prompt_is_refused(run: Span) -> None:
    with pytest.raises(InvalidRequest):
        filled_positions([5, 1, 2, 6, 1, 7], run, PLACEHOLDERS)
