"""The conversion derived from a dataclass and its message detects differences between them."""

from dataclasses import dataclass, make_dataclass
from enum import Enum
from typing import Any

import pytest

from triptych import errors
from triptych.domain.embedding import Ticket
from triptych.domain.generation import TokenChunk
from triptych.domain.media import Shard
from triptych.domain.sampling import SamplingParams
from triptych.domain.stage import Role
from triptych.v1 import common_pb2, instance_pb2, text_pb2
from triptych.wire.common import CHUNK, SHARD
from triptych.wire.flat import EnumPair, Pair, Variants
from triptych.wire.instance import INSTANCE


def shard_with(**kinds: Any) -> type:
    """A dataclass like ``Shard``, with other fields."""
    return make_dataclass("Other", list({"first": int, "count": int, "of": int, **kinds}.items()))


@pytest.mark.parametrize(
    ("kinds", "told"),
    [
        ({"more": int}, "differ in .*more"),
        ({"first": float}, "another type"),
        ({"first": str}, "another type"),
        ({"first": bool}, "another type"),
        ({"first": int | None}, "repeated or optional"),
        ({"first": tuple[int, ...]}, "repeated or optional"),
        ({"first": list[int]}, "no conversion"),
        ({"first": Role}, "no conversion"),
    ],
    ids=str,
)
def test_fields_that_differ_are_an_error(kinds: dict[str, Any], told: str) -> None:
    with pytest.raises(TypeError, match=told):
        Pair(shard_with(**kinds), common_pb2.Shard)


def test_a_field_that_only_the_message_has_is_an_error() -> None:
    @dataclass
    class Part:
        first: int
        count: int

    with pytest.raises(TypeError, match="of"):
        Pair(Part, common_pb2.Shard)


def test_an_optional_wire_field_must_be_optional_in_the_dataclass() -> None:
    params = make_dataclass("Params", _kinds(SamplingParams, seed=int))
    with pytest.raises(TypeError, match="seed is repeated or optional"):
        Pair(params, common_pb2.SamplingParams)


def test_a_nested_dataclass_needs_the_pair_of_its_message() -> None:
    with pytest.raises(TypeError, match="no conversion"):
        Pair(Ticket, common_pb2.Ticket)
    ticket = make_dataclass("Ticket", _kinds(Ticket, tensors=tuple[Shard, ...]))
    with pytest.raises(TypeError, match="another message"):
        Pair(ticket, common_pb2.Ticket, nested=(SHARD,))


def _kinds(domain: type, **changed: Any) -> list[tuple[str, Any]]:
    return [(name, changed.get(name, kind)) for name, kind in domain.__annotations__.items()]


class Short(Enum):
    E = 1


def test_an_enum_must_match_the_wire_enum() -> None:
    pair = EnumPair.of(Role.__members__, instance_pb2.Role.DESCRIPTOR)
    assert pair.to_wire[Role.EPD] == instance_pb2.ROLE_EPD
    assert {pair.from_wire[number] for number in pair.to_wire.values()} == set(Role)
    with pytest.raises(ValueError, match="Role has"):
        EnumPair.of(Short.__members__, instance_pb2.Role.DESCRIPTOR)
    for unknown in (0, 99):
        with pytest.raises(errors.InvalidRequest, match=f"role is not set to a known value .got {unknown}.") as caught:
            pair.from_wire[unknown]
        assert caught.value.param == "role"


def test_values_of_another_type_cannot_be_encoded() -> None:
    for wrong in ("1", 1.5, b"", 2**32, -1):
        with pytest.raises((TypeError, ValueError)):
            SHARD.to_wire(Shard(wrong, 1, 1))  # type: ignore[arg-type]


def test_an_instance_of_an_unknown_role_is_refused() -> None:
    message = instance_pb2.InstanceInfo(model=common_pb2.ModelInfo(dtype=common_pb2.DTYPE_F32))
    with pytest.raises(errors.InvalidRequest, match="role"):
        INSTANCE.from_wire(message)


def test_variants_are_selected_by_class() -> None:
    variants = Variants(text_pb2.TextEvent, "event", {"chunk": CHUNK})
    chunk = TokenChunk((1, 2), "text", 3)
    assert variants.from_wire(variants.to_wire(chunk)) == chunk
    with pytest.raises(TypeError):
        variants.to_wire(Shard(0, 1, 1))
    with pytest.raises(errors.InternalError):
        variants.from_wire(text_pb2.TextEvent())


def test_fields_that_are_not_on_the_wire_are_passed_in() -> None:
    kinds = [*_kinds(Shard), ("heard_s", float)]
    pair: Pair[Any, Any] = Pair(make_dataclass("Heard", kinds), common_pb2.Shard, given=("heard_s",))
    heard = pair.from_wire(common_pb2.Shard(count=3), 7.0)
    assert (heard.count, heard.heard_s) == (3, 7.0)
    assert pair.to_wire(heard) == common_pb2.Shard(count=3)
