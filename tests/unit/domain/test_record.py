"""Records: compared, hashed and shown by their fields; without room for others."""

from dataclasses import FrozenInstanceError, dataclass, field, fields, replace

import pytest

from triptych.domain.record import record


@record
class Sent:
    item: int
    encoder: str = ""
    tags: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Frozen:
    item: int
    encoder: str = ""
    tags: tuple[str, ...] = field(default=(), compare=False)


@pytest.mark.parametrize("cls", [Sent, Frozen], ids=["record", "frozen dataclass"])
def test_a_record_has_what_a_frozen_dataclass_has(cls: type[Sent] | type[Frozen]) -> None:
    made = cls(3, encoder="encoder-1", tags=("a",))
    assert made == cls(3, "encoder-1")
    assert made != cls(4, "encoder-1")
    assert len({made, cls(3, "encoder-1"), cls(4, "encoder-1")}) == 2
    assert repr(made) == f"{cls.__name__}(item=3, encoder='encoder-1', tags=('a',))"
    assert [field.name for field in fields(cls)] == ["item", "encoder", "tags"]
    assert replace(made, item=4) == cls(4, "encoder-1")
    assert not hasattr(made, "__dict__")
    match made:
        case Sent(item, encoder) | Frozen(item, encoder):
            assert (item, encoder) == (3, "encoder-1")


def test_only_the_type_checker_prevents_assignments() -> None:
    sent, frozen = Sent(3), Frozen(3)
    sent.item = 4  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        frozen.item = 4  # type: ignore[misc]
    with pytest.raises(AttributeError):
        sent.other = 4  # type: ignore[attr-defined]
    assert sent.item == 4
