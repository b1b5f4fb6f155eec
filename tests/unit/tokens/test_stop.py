import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.tokens.stop import StopStrings


def run(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    stop = StopStrings(stops)
    out = ""
    for piece in pieces:
        result = stop.feed(piece)
        out += result.text
        if result.stopped:
            assert stop.feed("more") == ("", True)
            assert stop.flush() == ""
            return out, True
    return out + stop.flush(), False


def by_hand(stops: list[str], text: str) -> tuple[str, bool]:
    """The definition: looks at every prefix of the text."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


letters = st.text("ab", max_size=12)


@given(stops=st.lists(st.text("ab", max_size=4), max_size=3), pieces=st.lists(letters, max_size=6))
def test_the_result_does_not_depend_on_the_pieces(stops: list[str], pieces: list[str]) -> None:
    assert run(stops, pieces) == by_hand(stops, "".join(pieces))


@given(stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), pieces=st.lists(letters, max_size=6))
def test_only_a_possible_prefix_of_a_stop_string_is_held_back(stops: list[str], pieces: list[str]) -> None:
    stop = StopStrings(stops)
    fed = sent = ""
    for piece in pieces:
        fed += piece
        result = stop.feed(piece)
        sent += result.text
        if result.stopped:
            return
        held = fed[len(sent) :]
        assert held == "" or any(len(held) < len(s) and s.startswith(held) for s in stops)


@pytest.mark.parametrize("pieces", [["He said sto", "p now"], ["He said ", "stop", " now"], [*"He said stop now"]])
def test_a_stop_string_over_several_pieces_is_found(pieces: list[str]) -> None:
    assert run(["stop"], pieces) == ("He said ", True)


def test_without_stop_strings_everything_is_emitted_at_once() -> None:
    assert StopStrings(()).feed("text") == ("text", False)


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    early=st.lists(letters, max_size=4),
    late=st.lists(letters, max_size=4),
)
def test_a_stop_string_before_min_tokens_is_ignored(stops: list[str], early: list[str], late: list[str]) -> None:
    stop = StopStrings(stops)
    out = "".join(stop.feed(piece, counts=False).text for piece in early)
    passed = len("".join(early))
    text = "".join(early) + "".join(late)
    ends = [end for end in range(passed + 1, len(text) + 1) if text[:end].endswith(tuple(stops))] if stops else []
    stopped = False
    for piece in late:
        result = stop.feed(piece)
        out += result.text
        stopped = result.stopped
    if ends:
        starts = [ends[0] - len(stop) for stop in stops if text[: ends[0]].endswith(stop)]
        # Text that was sent before cannot be retracted.
        assert stopped
        assert out == text[: min(starts)] or (
            min(starts) < passed and text[: min(starts)].startswith(out[: min(starts)])
        )
        assert len(out) < ends[0]
    else:
        assert not stopped
        assert out + stop.flush() == text
