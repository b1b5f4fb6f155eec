"""Conversion between a dataclass and a message with the same fields, derived from both and compiled once.

The field's type in the dataclass determines the conversion:


    int, float, str, bytes, bool      unchanged; with ``| None`` the field is ``optional``
    an Enum                           the wire enum's value of the same name
    a dataclass                       its own pair; with ``| None`` it may be unset
    a tuple of any of these           a repeated field
    anything else                     functions given as ``special``
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import partial
from types import NoneType, UnionType
from typing import Any, Generic, TypeVar, cast, get_args, get_origin, get_type_hints

from google.protobuf.descriptor import FieldDescriptor as Field
from google.protobuf.message import Message

from triptych import errors

DomainT = TypeVar("DomainT")
MessageT = TypeVar("MessageT", bound=Message)

_SCALARS = (int, float, str, bytes, bool)


class _FromWire(dict[int, Any]):
    """Enum members by wire value."""

    def __init__(self, name: str, members: Mapping[int, Any]) -> None:
        super().__init__(members)
        self._name = name

    def __missing__(self, value: int) -> Any:
        raise errors.InvalidRequest(f"{self._name} is not set to a known value (got {value})", param=self._name)


@dataclass(frozen=True, slots=True)
class EnumPair:
    """Mapping between an enum's members and wire values: ``DType.F32`` and ``DTYPE_F32``."""

    to_wire: Mapping[Any, Any]
    from_wire: Mapping[int, Any]
    """Raises InvalidRequest for an unknown value."""

    @classmethod
    def of(cls, members: Mapping[str, Any], wire: Any) -> "EnumPair":
        """``members`` by name; ``wire`` is the enum's descriptor. Raises ValueError if the names differ."""
        unset = wire.values_by_number[0].name
        prefix = unset.removesuffix("UNSPECIFIED")
        numbers = {value.name.removeprefix(prefix): value.number for value in wire.values if value.number}
        if numbers.keys() != members.keys():
            raise ValueError(f"{wire.name} has {sorted(numbers)}, not {sorted(members)}")
        to_wire = {member: numbers[name] for name, member in members.items()}
        shown = prefix.removesuffix("_").lower()
        return cls(to_wire, _FromWire(shown, {number: member for member, number in to_wire.items()}))


class Pair(Generic[DomainT, MessageT]):
    """A dataclass and its message, with the conversion both ways.

    ``special`` maps a field to two functions: from the dataclass to the message field's value, and from the message to
    the dataclass field's value; those of a tuple are not called when it is empty. ``given`` names fields that are not
    in the message: ``from_wire`` takes them as arguments. ``check`` raises for a message out of bounds; answers need it, as only
    requests are checked when they are decoded.
    """

    def __init__(
        self,
        domain: type[DomainT],
        message: type[MessageT],
        *,
        nested: tuple["Pair[Any, Any]", ...] = (),
        special: Mapping[str, tuple[Callable[[DomainT], Any], Callable[[MessageT], Any]]] | None = None,
        given: tuple[str, ...] = (),
        check: Callable[[MessageT], None] | None = None,
    ) -> None:
        """Raises TypeError if the two differ in fields or their types."""
        self.domain, self.message = domain, message
        self._names: dict[str, Any] = {"D": domain, "M": message}
        self._nested = {pair.domain: pair for pair in nested}
        self._special = special or {}
        kinds = get_type_hints(domain)
        names = [field.name for field in fields(cast(Any, domain))]
        if differ := set(names) ^ {*given, *message.DESCRIPTOR.fields_by_name}:
            raise TypeError(f"{domain.__name__} and its message differ in {sorted(differ)}")
        wire, back_fields = [], []
        for name in names:
            if name in given:
                back_fields.append(name)
                continue
            to, back = self._field(name, kinds[name])
            wire.append(f"{name}={to}")
            back_fields.append(back)
        self.to_wire: Callable[[DomainT], MessageT] = compiled(f"lambda v: {_made(wire)}", self._names)
        self.from_wire: Callable[..., DomainT] = compiled(
            f"lambda {', '.join(('m', *given))}: D({', '.join(back_fields)})", self._names
        )
        if check is not None:
            self.from_wire = partial(_checked, check, self.from_wire)

    def _field(self, name: str, kind: Any) -> tuple[str, str]:
        """Two expressions: the message field from ``v``, and the dataclass field from ``m``."""
        if name in self._special:
            self._names[f"to_{name}"], self._names[f"from_{name}"] = self._special[name]
            if get_origin(kind) is tuple:  # usually empty
                return f"to_{name}(v) if v.{name} else None", f"from_{name}(m) if m.{name} else ()"
            return f"to_{name}(v)", f"from_{name}(m)"
        field = self.message.DESCRIPTOR.fields_by_name[name]
        optional = False
        if isinstance(kind, UnionType) and NoneType in get_args(kind):
            kind, optional = next(member for member in get_args(kind) if member is not NoneType), True
        repeated = get_origin(kind) is tuple
        if repeated:
            kind = get_args(kind)[0]
        may_lack = field.has_presence and (optional or field.message_type is None)
        if field.is_repeated != repeated or optional != may_lack:
            raise TypeError(f"{self.domain.__name__}.{name} is repeated or optional on one side only")
        to, back = self._value(name, kind)
        if repeated:
            if kind in _SCALARS:
                return f"v.{name}", f"tuple(m.{name})"
            to_wire, from_wire = f"[{to('x')} for x in v.{name}]", f"tuple([{back('x')} for x in m.{name}])"
            return f"v.{name} and {to_wire}", f"{from_wire} if m.{name} else ()"
        to_wire, from_wire = to(f"v.{name}"), back(f"m.{name}")
        if optional:
            to_wire = to_wire if kind in _SCALARS else f"None if v.{name} is None else {to_wire}"
            from_wire = f"{from_wire} if m.HasField({name!r}) else None"
        return to_wire, from_wire

    def _value(self, name: str, kind: Any) -> tuple[Callable[[str], str], Callable[[str], str]]:
        """Conversions of one value each way: functions from an expression to an expression."""
        field = self.message.DESCRIPTOR.fields_by_name[name]
        if kind in _SCALARS:
            if _scalar(field.cpp_type, field.type) is not kind:
                raise TypeError(f"{self.domain.__name__}.{name} has another type on the wire")
            return (lambda read: read), (lambda read: read)
        if isinstance(kind, type) and issubclass(kind, Enum) and field.enum_type is not None:
            pair = EnumPair.of(kind.__members__, field.enum_type)
            self._names |= {f"to_{name}": pair.to_wire, f"from_{name}": pair.from_wire}
            return (lambda read: f"to_{name}[{read}]"), (lambda read: f"from_{name}[{read}]")
        if is_dataclass(kind) and kind in self._nested:
            nested = self._nested[cast(type, kind)]
            if field.message_type is not nested.message.DESCRIPTOR:
                raise TypeError(f"{self.domain.__name__}.{name} has another message type on the wire")
            self._names |= {f"to_{name}": nested.to_wire, f"from_{name}": nested.from_wire}
            return (lambda read: f"to_{name}({read})"), (lambda read: f"from_{name}({read})")
        raise TypeError(f"{self.domain.__name__}.{name}: no conversion for {kind}")


class Variants:
    """A ``oneof``: each of its fields maps to a dataclass."""

    def __init__(self, message: type[Message], oneof: str, variants: Mapping[str, Pair[Any, Any]]) -> None:
        readers = {name: pair.from_wire for name, pair in variants.items()}
        writers = {
            pair.domain: compiled(f"lambda v: M({name}=to_wire(v))", {"M": message, "to_wire": pair.to_wire})
            for name, pair in variants.items()
        }

        def to_wire(value: object) -> Any:
            return writers[type(value)](value)

        def from_wire(message: Message) -> Any:
            case = message.WhichOneof(oneof)
            if case is None:
                raise errors.InternalError(f"a peer sent an unknown {oneof}")
            return readers[case](getattr(message, case))

        self.to_wire = to_wire
        self.from_wire = from_wire
        """Raises InternalError for an unknown variant."""


def _checked(
    check: Callable[[MessageT], None], read: Callable[..., DomainT], message: MessageT, *given: Any
) -> DomainT:
    check(message)
    return read(message, *given)


def _made(arguments: list[str]) -> str:
    """A call of ``M``. A repeated field that is usually empty is cheaper when not passed."""
    rare = [argument for argument in arguments if " and [" in argument]
    if len(rare) != 1:
        return f"M({', '.join(arguments)})"
    without = [argument for argument in arguments if argument not in rare]
    name = rare[0].partition("=")[0]
    return f"M({', '.join(arguments)}) if v.{name} else M({', '.join(without)})"


def _scalar(cpp_type: int, wire_type: int) -> type:

    match cpp_type:
        case Field.CPPTYPE_BOOL:
            return bool
        case Field.CPPTYPE_DOUBLE | Field.CPPTYPE_FLOAT:
            return float
        case Field.CPPTYPE_STRING:
            return bytes if wire_type == Field.TYPE_BYTES else str
        case _:
            return int


def compiled(source: str, names: dict[str, Any]) -> Any:
    """Compile generated source, as ``dataclasses`` does. It contains only field names of this repository."""
    return eval(source, names)  # noqa: S307
