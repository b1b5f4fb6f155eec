import pytest

from triptych.domain.reasons import reason_of, shown


def test_the_reason_is_the_first_cause_in_one_line() -> None:
    failure = RuntimeError("the engine has failed")
    failure.__cause__ = ValueError("head size 20 is not supported\nsee the list")
    assert reason_of(failure) == "ValueError: head size 20 is not supported"
    assert reason_of(KeyError()) == "KeyError"
    assert reason_of(RuntimeError("\n\nat last")) == "RuntimeError: at last"


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("cannot open /root/models/secret/config.json", "cannot open ..."),
        ("a fault at 0x7f34a0b1c2d3, by 10.0.0.7:5101", "a fault at ..., by ..."),
        ("red\x1b[31m and\0more", r"red\x1b[31m and\x00more"),
        ("tokens/s and 3.14", "tokens/s and 3.14"),
    ],
)
def test_what_is_shown_is_printable_and_has_no_paths_and_addresses(text: str, plain: str) -> None:
    assert shown(text) == plain


@pytest.mark.parametrize("text", ["x" * 1_000_000, "1." * 500_000, "/root/" * 100_000 + "x" * 1_000_000])
@pytest.mark.timeout(30)  # minutes, if all of it were searched for paths
def test_what_is_shown_is_short_however_long_a_text_is(text: str) -> None:
    assert len(shown(text)) <= 200
    assert len(reason_of(RuntimeError(text))) <= 200


def test_an_error_that_is_its_own_cause_has_a_reason() -> None:
    failure = RuntimeError("again")
    failure.__cause__ = failure
    assert reason_of(failure) == "RuntimeError: again"
