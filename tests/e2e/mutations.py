"""Mutated requests: each field of a message in turn gets unexpected values, and malformed bytes are added.

The fields come from the message's descriptor, so that new ones are covered without being listed here.
"""

import random
import struct
from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import FieldDescriptor as Field
from google.protobuf.message import Message

MANY = 20_000
LARGE = 1 << 20
HUGE = 8 << 20
_INTEGERS = {
    Field.CPPTYPE_INT32: (-(2**31), -1, 0, 2**31 - 1),
    Field.CPPTYPE_UINT32: (0, 20_000_000, 2**31, 2**32 - 1),
    Field.CPPTYPE_INT64: (-(2**63), -1, 0, 2**63 - 1),
    Field.CPPTYPE_UINT64: (0, 2**32, 2**63, 2**64 - 1),
}
_FLOATS = (float("nan"), float("inf"), -float("inf"), -1.0, 0.0, 1e308)


def mutations(message: Message, seed: int) -> Iterator[tuple[str, bytes]]:
    """A description of the mutation, and the resulting bytes."""
    yield from _fields(message, message, "")
    yield from _bytes(message, seed)


def _fields(root: Message, message: Message, path: str) -> Iterator[tuple[str, bytes]]:
    """Changes ``message``, a part of ``root``, and restores it after each change."""
    original = type(message).FromString(message.SerializeToString())
    for field in message.DESCRIPTOR.fields:
        name = f"{path}{field.name}"
        for number, value in enumerate(_values(field)):
            _set(message, field, value)
            yield f"{name} #{number}", root.SerializeToString()
            message.CopyFrom(original)
        message.ClearField(field.name)
        yield f"{name} left out", root.SerializeToString()
        message.CopyFrom(original)
        if _is_map(field) or field.message_type is None:
            continue
        if field.is_repeated:
            parts = getattr(message, field.name)
            if not parts:
                parts.add()
            for _ in range(MANY):
                parts.append(parts[0])
            yield f"{name} x {MANY}", root.SerializeToString()
            message.CopyFrom(original)
            parts = getattr(message, field.name)
            yield from _fields(root, parts[0] if parts else parts.add(), f"{name}[0].")
        else:
            inner = getattr(message, field.name)
            inner.SetInParent()
            yield from _fields(root, inner, f"{name}.")
        message.CopyFrom(original)


def _values(field: Any) -> tuple[Any, ...]:
    if _is_map(field):
        return ({str(number): "x" for number in range(MANY)}, {"": ""}, {"x" * LARGE: "x" * LARGE})
    match field.cpp_type:
        case Field.CPPTYPE_MESSAGE:
            return ()
        case Field.CPPTYPE_BOOL:
            values: tuple[Any, ...] = (True, False)
        case Field.CPPTYPE_ENUM:
            values = (0, 1, 2, 99, -1)
        case Field.CPPTYPE_STRING if field.type == Field.TYPE_BYTES:
            values = (b"", b"\x00", bytes(17), bytes(LARGE))
        case Field.CPPTYPE_STRING:
            values = ("", "\x00", "\U0001f600" * 600, "[" * LARGE, "x" * LARGE)
        case Field.CPPTYPE_DOUBLE | Field.CPPTYPE_FLOAT:
            values = _FLOATS
        case _:
            values = _INTEGERS[field.cpp_type]
    if field.is_repeated:
        return (*([value] for value in values), [values[0]] * MANY, [values[-1]] * 8)
    return values


def _set(message: Message, field: Any, value: Any) -> None:
    if field.is_repeated:
        message.ClearField(field.name)
        there = getattr(message, field.name)
        if _is_map(field):
            there.update(value)
        else:
            there.extend(value)
    else:
        setattr(message, field.name, value)


def _is_map(field: Any) -> bool:
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


def _bytes(message: Message, seed: int) -> Iterator[tuple[str, bytes]]:
    rng, whole = random.Random(seed), message.SerializeToString()
    for at in sorted({rng.randrange(len(whole)) for _ in range(10)} if whole else ()):
        yield f"cut after {at} bytes", whole[:at]
        yield f"byte {at} changed", whole[:at] + rng.randbytes(1) + whole[at + 1 :]
    for nbytes in (1, 10, 1000, LARGE):
        yield f"{nbytes} random bytes", rng.randbytes(nbytes)
    yield "unknown fields", whole + b"\xf8\x7f\x01" * MANY
    yield "more unknown fields", whole + b"\xf8\x7f\x01" * HUGE
    yield "a large unknown field", whole + b"\xfa\x7f" + _varint(HUGE) + bytes(HUGE)
    yield "nested groups", whole + b"\x7b" * 100_000
    yield "a number without end", whole + b"\xff" * 1000
    for field in message.DESCRIPTOR.fields:
        tag = _varint(field.number << 3 | 2)
        yield f"{field.name} is not UTF-8", whole + tag + b"\x02\xff\xfe"
        yield f"{field.name} claims to be long", whole + tag + _varint(2**31 - 1)
        yield f"{field.name} claims to be endless", whole + tag + _varint(2**63)
        yield f"{field.name} is packed ones", whole + tag + _varint(HUGE) + b"\x01" * HUGE
        yield f"{field.name} empty, often", whole + (tag + b"\x00") * HUGE
        yield f"{field.name} nests empty ones", whole + tag + _varint(2 * HUGE) + b"\x12\x00" * HUGE
        yield f"{field.name} of another type", whole + _varint(field.number << 3 | 1) + struct.pack("<d", 1e300)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*out, value))
