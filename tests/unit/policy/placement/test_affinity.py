import pytest

from triptych.policy.placement.affinity import Holding, counted, nothing_held, pays

HELD, PUBLISHED, ENCODING = Holding("a"), Holding("a", published=True), Holding("a", encoding=True, published=True)


@pytest.mark.parametrize(
    ("holding", "elsewhere", "most"),
    [
        (HELD, 0, 10),
        (HELD, 30, 40),
        (PUBLISHED, 0, 90),
        (PUBLISHED, 30, 390),
        (ENCODING, 0, 30),
        (ENCODING, 30, 90),
    ],
)
def test_how_much_an_encoder_with_the_embedding_may_have_to_do(holding: Holding, elsewhere: int, most: int) -> None:
    """For an item of 10."""
    assert pays(holding, most, elsewhere, 10)
    assert not pays(holding, most + 1, elsewhere, 10)


def test_only_what_may_have_to_be_encoded_counts_as_work() -> None:
    assert [counted(holding, 10) for holding in (HELD, PUBLISHED, ENCODING)] == [10, 0, 0]


def test_without_hints_nothing_is_held() -> None:
    assert nothing_held((b"cat", b"")) == ()
