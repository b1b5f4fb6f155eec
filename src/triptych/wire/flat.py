"""Conversion between a dataclass and a message with the same fields, derived from both and compiled once.

The type of a field in the dataclass decides how it is converted:

    int, float, str, bytes, bool      as it is; with ``| None`` the field is ``optional``
    an Enum                           the value of the wire's enum with the member's name
    a dataclass                       its own pair; with ``| None`` it may be left out
    a tuple of any of these           a repeated field
    anything else                     ``special``: expressions that the pair brings itself
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Generic, TypeVar, cast, get_args, get_origin, get_type_hints

from google.protobuf.descriptor import FieldDescriptor as Field
from google.protobuf.message import Message

from triptych import errors

DomainT = TypeVar("DomainT")
MessageT = TypeVar("MessageT", bound=Message)

_SCALARS = (int, float, str, bytes, bool)


class _FromWire(dict[int, Any]):
    """The members of an enum by what they are on the wire."""

    def __init__(self, name: str, members: Mapping[int, Any]) -> None:
        super().__init__(members)
        self._name = name

    def __missing__(self, value: int) -> Any:
        raise errors.InvalidRequest(f"{self._name} is not set to a known value (got {value})", param=self._name)


@dataclass(frozen=True, slots=True)
class EnumPair:
    """An enum's members and their values on the wire: ``DType.F32`` and ``DTYPE_F32``."""

    to_wire: Mapping[Any, Any]
    from_wire: Mapping[int, Any]
    """Raises InvalidRequest for a value that stands for no member."""

    @classmethod
    def of(cls, members: Mapping[str, Any], wire: Any) -> "EnumPair":
        """``members`` by name, ``wire`` an enum's descriptor. Raises ValueError where the two have other names."""
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

    ``special`` has, for a field without a rule, a function from the dataclass to the field's value in the message and one from
    the message to the field's value in the dataclass. ``given`` are fields that are not in the message: further arguments of
    ``from_wire``.
    """

    def __init__(
        self,
        domain: type[DomainT],
        message: type[MessageT],
        *,
        nested: tuple["Pair[Any, Any]", ...] = (),
        special: Mapping[str, tuple[Callable[[DomainT], Any], Callable[[MessageT], Any]]] | None = None,
        given: tuple[str, ...] = (),
    ) -> None:
        """Raises TypeError where the two have other fields, or fields of other types."""
        self.domain, self.message = domain, message
        self._names: dict[str, Any] = {"D": domain, "M": message}
        self._nested = {pair.domain: pair for pair in nested}
        self._special = special or {}
        kinds = get_type_hints(domain)
        names = [field.name for field in fields(cast(Any, domain))]
        if differ := set(names) ^ {*given, *message.DESCRIPTOR.fields_by_name}:
            raise TypeError(f"{domain.__name__} and its message differ in {sorted(differ)}")
        wire, here = [], []
        for name in names:
            if name in given:
                here.append(name)
                continue
            to, back = self._field(name, kinds[name])
            wire.append(f"{name}={to}")
            here.append(back)
        self.to_wire: Callable[[DomainT], MessageT] = compiled(f"lambda v: {_made(wire)}", self._names)
        self.from_wire: Callable[..., DomainT] = compiled(
            f"lambda {', '.join(('m', *given))}: D({', '.join(here)})", self._names
        )

    def _field(self, name: str, kind: Any) -> tuple[str, str]:
        """Expressions: on the wire, from ``v``; and here, from ``m``."""
        if name in self._special:
            self._names[f"to_{name}"], self._names[f"from_{name}"] = self._special[name]
            return f"to_{name}(v)", f"from_{name}(m)"
        field = self.message.DESCRIPTOR.fields_by_name[name]
        optional = False
        if isinstance(kind, UnionType) and NoneType in get_args(kind):
            kind, optional = next(one for one in get_args(kind) if one is not NoneType), True
        repeated = get_origin(kind) is tuple
        if repeated:
            kind = get_args(kind)[0]
        may_lack = field.has_presence and (optional or field.message_type is None)
        if field.is_repeated != repeated or optional != may_lack:
            raise TypeError(f"{self.domain.__name__}.{name} is not as often on the wire as here")
        to, back = self._value(name, kind)
        if repeated:
            if kind in _SCALARS:
                return f"v.{name}", f"tuple(m.{name})"
            there, here = f"[{to('x')} for x in v.{name}]", f"tuple([{back('x')} for x in m.{name}])"
            return f"v.{name} and {there}", f"{here} if m.{name} else ()"
        there, here = to(f"v.{name}"), back(f"m.{name}")
        if optional:
            there = there if kind in _SCALARS else f"None if v.{name} is None else {there}"
            here = f"{here} if m.HasField({name!r}) else None"
        return there, here

    def _value(self, name: str, kind: Any) -> tuple[Callable[[str], str], Callable[[str], str]]:
        """What is done with one value: an expression each way around the expression that reads it."""
        field = self.message.DESCRIPTOR.fields_by_name[name]
        if kind in _SCALARS:
            if _scalar(field.cpp_type, field.type) is not kind:
                raise TypeError(f"{self.domain.__name__}.{name} is of another type on the wire than here")
            return (lambda read: read), (lambda read: read)
        if isinstance(kind, type) and issubclass(kind, Enum) and field.enum_type is not None:
            pair = EnumPair.of(kind.__members__, field.enum_type)
            self._names |= {f"to_{name}": pair.to_wire, f"from_{name}": pair.from_wire}
            return (lambda read: f"to_{name}[{read}]"), (lambda read: f"from_{name}[{read}]")
        if is_dataclass(kind) and kind in self._nested:
            nested = self._nested[cast(type, kind)]
            if field.message_type is not nested.message.DESCRIPTOR:
                raise TypeError(f"{self.domain.__name__}.{name} is another message on the wire than here")
            self._names |= {f"to_{name}": nested.to_wire, f"from_{name}": nested.from_wire}
            return (lambda read: f"to_{name}({read})"), (lambda read: f"from_{name}({read})")
        raise TypeError(f"{self.domain.__name__}.{name}: there is no rule for {kind}")


class Variants:
    """A ``oneof``: each of its fields has a dataclass of its own."""

    def __init__(self, message: type[Message], oneof: str, variants: Mapping[str, Pair[Any, Any]]) -> None:
        readers = {name: pair.from_wire for name, pair in variants.items()}
        writers = {
            pair.domain: compiled(f"lambda v: M({name}=to_wire(v))", {"M": message, "to_wire": pair.to_wire})
            for name, pair in variants.items()
        }

        def to_wire(value: object) -> Any:
            return writers[type(value)](value)

        def from_wire(message: Message) -> Any:
            which = message.WhichOneof(oneof)
            if which is None:
                raise errors.InternalError(f"a peer sent an {oneof} of an unknown kind")
            return readers[which](getattr(message, which))

        self.to_wire = to_wire
        self.from_wire = from_wire
        """Raises InternalError for a variant that is not known."""


def _made(arguments: list[str]) -> str:
    """A call of ``M``. A repeated field that is mostly empty costs less when it is not passed."""
    rare = [one for one in arguments if " and [" in one]
    if len(rare) != 1:
        return f"M({', '.join(arguments)})"
    without = [one for one in arguments if one not in rare]
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
    """A function from generated source, as ``dataclasses`` does: it holds names of fields of this repository only."""
    return eval(source, names)  # noqa: S307
