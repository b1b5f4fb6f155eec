"""Decodes untrusted requests: nothing large is allocated before its size is checked.

Protobuf allocates while it parses: two bytes on the wire become an empty nested message of a hundred bytes. So the
fields and lengths of larger requests are counted first. A decoded request satisfies ``wire.bounds``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor as Field
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from triptych.domain.bounds import Bound, Many, Size
from triptych.errors import InvalidRequest
from triptych.v1 import calls_pb2, encoder_pb2, instance_pb2, pool_manager_pb2, router_pb2, scaler_pb2, text_pb2
from triptych.wire.bounds import bound_of, checker

COUNTED_FROM_NBYTES = 64 << 10
MAX_FIELDS = 1 << 17
"""Fields of one request, including nested messages."""
_VARINT_NBYTES = 10
_CHAR_NBYTES = 4

OWN_SERVICES = "/triptych."

MessageT = TypeVar("MessageT", bound=Message)
Decode = Callable[[bytes], Any]


@dataclass(frozen=True, slots=True)
class _Layout:
    """Limits of a message's fields, by field number."""

    nested: dict[int, "_Layout"] = field(default_factory=dict)
    max_nbytes: dict[int, tuple[str, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, descriptor: Any) -> "_Layout":
        layout = cls()
        for field_descriptor in descriptor.fields:
            if field_descriptor.message_type is not None:
                if not field_descriptor.message_type.GetOptions().map_entry:
                    layout.nested[field_descriptor.number] = cls.of(field_descriptor.message_type)
            elif (limit := _max_nbytes(field_descriptor, bound_of(field_descriptor))) is not None:
                layout.max_nbytes[field_descriptor.number] = (field_descriptor.name, limit)
        return layout


def _max_nbytes(field: Field, bound: Bound | None) -> int | None:
    """Limit of a length-delimited field (text, bytes, packed numbers); None if there is none."""
    match bound:
        case Size(high=high):
            return high if field.type == Field.TYPE_BYTES else high * _CHAR_NBYTES
        case Many(high=high) if field.cpp_type != Field.CPPTYPE_STRING:
            return high * _VARINT_NBYTES
        case Many(each=Size(high=high)):
            return high * _CHAR_NBYTES
    return None


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while at < end and shift < 7 * _VARINT_NBYTES:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise InvalidRequest("the message is truncated")


def _count(data: bytes, at: int, end: int, layout: _Layout, left: int) -> int:
    """Count the fields from ``at`` to ``end``. Returns how many of ``left`` remain. Raises InvalidRequest."""
    while at < end:
        left -= 1
        if left < 0:
            raise InvalidRequest(f"the message has more than {MAX_FIELDS} fields")
        tag, at = _varint(data, at, end)
        number, kind = tag >> 3, tag & 7
        if kind == 0:
            _, at = _varint(data, at, end)
        elif kind == 1:
            at += 8
        elif kind == 5:
            at += 4
        elif kind == 2:
            nbytes, at = _varint(data, at, end)
            if nbytes > end - at:
                raise InvalidRequest("the message is truncated")
            if (nested := layout.nested.get(number)) is not None:
                left = _count(data, at, at + nbytes, nested, left)
            elif nbytes > (known := layout.max_nbytes.get(number, ("", nbytes)))[1]:
                raise InvalidRequest(f"{known[0]} has {nbytes} bytes, the limit is {known[1]}")
            at += nbytes
        elif kind > 4:
            raise InvalidRequest("the message has a field of an unknown wire type")
    return left


def decoder(message: type[MessageT]) -> Callable[[bytes], MessageT]:
    """A function from bytes to a message within its bounds, which raises InvalidRequest.

    Raises TypeError if a field of the message has no bound.
    """
    descriptor = message.DESCRIPTOR
    layout, check, parse = _Layout.of(descriptor), checker(descriptor), message.FromString

    def decode(data: bytes) -> MessageT:
        if len(data) > COUNTED_FROM_NBYTES:
            _count(data, 0, len(data), layout, MAX_FIELDS)
        try:
            message = parse(data)
        except DecodeError:
            raise InvalidRequest(f"the message is not a valid {descriptor.name}") from None
        check(message)
        return message

    return decode


REQUESTS: Mapping[str, Decode] = {
    f"/{service.full_name}/{method.name}": decoder(GetMessageClass(method.input_type))
    for module in (calls_pb2, encoder_pb2, instance_pb2, pool_manager_pb2, router_pb2, scaler_pb2, text_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
"""Decoders of requests by rpc path."""
