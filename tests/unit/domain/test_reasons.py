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
        ("red\x1b[31m and\0more", "red [31m and more"),
        ("tokens/s and 3.14", "tokens/s and 3.14"),
    ],
)
def test_what_is_shown_is_printable_and_has_no_paths_and_addresses(text: str, plain: str) -> None:
    assert shown(text) == plain


def test_what_is_shown_is_short() -> None:
    assert len(shown("x" * 10_000)) == 200
