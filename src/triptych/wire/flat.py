"""Conversion between a dataclass and a message with the same fields, derived from both and compiled once.

The field's type in the dataclass determines the conversion:


    int, float, str, bytes, bool      unchanged; with ``| None`` the field is ``optional``
    an Enum                           the wire enum's value of the same name
    a dataclass                       its own pair; with ``| None`` it may be unset
    a tuple of any of these           a repeated field
    anything else                     functions given as ``special``
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import partial
from types import NoneType, UnionType
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar, cast, get_args, get_origin, get_type_hints

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


class _FieldPair(NamedTuple):
    """A field of both, as two functions from the name of a variable to an expression."""

    name: str
    to_wire: Callable[[str], str]
    from_wire: Callable[[str], str]
    is_rare: bool = False
    """A repeated field of messages, which is usually empty."""


class Pair(Generic[DomainT, MessageT]):
    """A dataclass and its message, with the conversion both ways, each one expression with those of nested pairs.

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
        self._nested = {pair.domain: pair for pair in nested}
        self._special = special or {}
        self._check = check
        self._of = domain.__name__
        """Begins the names that its expressions use, as nested ones share the names of the whole."""
        self.names: dict[str, Any] = {f"D_{self._of}": domain, f"M_{self._of}": message, f"check_{self._of}": check}
        """What ``written`` and ``read`` refer to."""
        for pair in nested:
            self._use(pair.names)
        kinds = get_type_hints(domain)
        names = [field.name for field in fields(cast(Any, domain))]
        if differ := set(names) ^ {*given, *message.DESCRIPTOR.fields_by_name}:
            raise TypeError(f"{domain.__name__} and its message differ in {sorted(differ)}")
        self._fields: dict[str, _FieldPair] = {}
        for name in names:
            if name not in given:
                field = self._special_field if name in self._special else self._field
                self._fields[name] = field(name, kinds[name])
        self._in_order = names
        self.to_wire: Callable[[DomainT], MessageT] = compiled(f"lambda v: {self.written('v')}", self.names)
        self.from_wire: Callable[..., DomainT] = compiled(
            f"lambda {', '.join(('m', *given))}: {self.read('m')}", self.names
        )

    def written(self, value: str) -> str:
        """An expression: the message of the dataclass in this variable."""
        made = [f"{field.name}={field.to_wire(value)}" for field in self._fields.values()]
        rare = [field for field in self._fields.values() if field.is_rare]
        if len(rare) != 1:
            return f"M_{self._of}({', '.join(made)})"
        # It is cheaper not to pass it.
        without = [f"{field.name}={field.to_wire(value)}" for field in self._fields.values() if not field.is_rare]
        whole, usual = (f"M_{self._of}({', '.join(arguments)})" for arguments in (made, without))
        return f"({whole} if {value}.{rare[0].name} else {usual})"

    def read(self, message: str) -> str:
        """An expression: the dataclass of the message in this variable."""
        made = [self._fields[name].from_wire(message) if name in self._fields else name for name in self._in_order]
        checked = "" if self._check is None else f"check_{self._of}({message}) or "
        return f"({checked}D_{self._of}({', '.join(made)}))"

    def _use(self, names: Mapping[str, Any]) -> None:
        """Make names known to the expressions. Raises TypeError if one has another meaning already."""
        for name, value in names.items():
            if self.names.setdefault(name, value) is not value:
                raise TypeError(f"{self._of}: two different {name} are nested")

    def _special_field(self, name: str, kind: Any) -> _FieldPair:
        to, back = f"to_{self._of}_{name}", f"from_{self._of}_{name}"
        self._use(dict(zip((to, back), self._special[name], strict=True)))
        if get_origin(kind) is tuple:  # usually empty
            return _FieldPair(
                name, lambda v: f"{to}({v}) if {v}.{name} else None", lambda m: f"{back}({m}) if {m}.{name} else ()"
            )
        return _FieldPair(name, lambda v: f"{to}({v})", lambda m: f"{back}({m})")

    def _field(self, name: str, kind: Any) -> _FieldPair:
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
        to_wire, from_wire = self._value(name, kind)
        each = f"{self._of}_{name}"
        if repeated and kind not in _SCALARS:
            return _FieldPair(
                name,
                lambda v: f"{v}.{name} and [{to_wire(each)} for {each} in {v}.{name}]",
                lambda m: f"tuple([{from_wire(each)} for {each} in {m}.{name}]) if {m}.{name} else ()",
                is_rare=True,
            )
        has = f"HasField({name!r})"
        if field.message_type is not None:  # the variable is bound where it is tested
            known = f"{{m}}.{has} and " if optional else ""
            return _FieldPair(
                name,
                lambda v: f"({to_wire(each)} if ({each} := {v}.{name}) is not None else None)",
                lambda m: f"({from_wire(each)} if {known.format(m=m)}({each} := {m}.{name}) is not None else None)",
            )
        if repeated:
            return _FieldPair(name, lambda v: f"{v}.{name}", lambda m: f"tuple({m}.{name})")
        if not optional:
            return _FieldPair(name, lambda v: to_wire(f"{v}.{name}"), lambda m: from_wire(f"{m}.{name}"))
        none = "" if kind in _SCALARS else "None if {v}.{name} is None else "
        return _FieldPair(
            name,
            lambda v: none.format(v=v, name=name) + to_wire(f"{v}.{name}"),
            lambda m: f"{from_wire(f'{m}.{name}')} if {m}.{has} else None",
        )

    def _value(self, name: str, kind: Any) -> tuple[Callable[[str], str], Callable[[str], str]]:
        """Conversions of one value each way: functions from the name of a variable to an expression."""
        field = self.message.DESCRIPTOR.fields_by_name[name]
        if kind in _SCALARS:
            if _scalar(field.cpp_type, field.type) is not kind:
                raise TypeError(f"{self.domain.__name__}.{name} has another type on the wire")
            return (lambda read: read), (lambda read: read)
        if isinstance(kind, type) and issubclass(kind, Enum) and field.enum_type is not None:
            pair = EnumPair.of(kind.__members__, field.enum_type)
            to, back = f"to_{self._of}_{name}", f"from_{self._of}_{name}"
            self._use({to: pair.to_wire, back: pair.from_wire})
            return (lambda read: f"{to}[{read}]"), (lambda read: f"{back}[{read}]")
        if is_dataclass(kind) and kind in self._nested:
            nested = self._nested[cast(type, kind)]
            if field.message_type is not nested.message.DESCRIPTOR:
                raise TypeError(f"{self.domain.__name__}.{name} has another message type on the wire")
            return nested.written, nested.read
        raise TypeError(f"{self.domain.__name__}.{name}: no conversion for {kind}")


class Variants:
    """A ``oneof``: each of its fields maps to a dataclass. Each way is one expression, which tries one after the other."""

    def __init__(self, message: type[Message], oneof: str, variants: Mapping[str, Pair[Any, Any]]) -> None:
        names: dict[str, Any] = {"M": message, "none": partial(_none, oneof), "unknown": partial(_unknown, oneof)}
        to_wire, from_wire = "none(v)", "unknown(v)"
        for name, pair in reversed(list(variants.items())):
            names |= pair.names
            to_wire = f"M({name}={pair.written('v')}) if kind is D_{pair.domain.__name__} else {to_wire}"
            from_wire = f"{pair.read('m')} if case == {name!r} and (m := v.{name}) is not None else {from_wire}"
        self._names = names
        # Each binds what its expression tests.
        self._to_wire = f"({to_wire}) if (kind := type(v)) is not None else none(v)"
        self._from_wire = f"({from_wire}) if (case := v.WhichOneof({oneof!r})) is not None else unknown(v)"
        self.to_wire: Callable[[object], Any] = compiled(f"lambda v: {self._to_wire}", names)
        self.from_wire: Callable[[Any], Any] = compiled(f"lambda v: {self._from_wire}", names)
        """Raises InternalError for an unknown variant."""

    def several(
        self, message: type[MessageT], field: str
    ) -> tuple[Callable[[Iterable[Any]], MessageT], Callable[[MessageT], tuple[Any, ...]]]:
        """The conversions between several variants and a message with this repeated field of them."""
        names = self._names | {"C": message}
        to_wire = compiled(f"lambda several: C({field}=[{self._to_wire} for v in several])", names)
        return to_wire, compiled(f"lambda whole: tuple([{self._from_wire} for v in whole.{field}])", names)


def _none(oneof: str, value: object) -> NoReturn:
    raise TypeError(f"{type(value).__name__} is no {oneof}")


def _unknown(oneof: str, message: Message) -> NoReturn:
    raise errors.InternalError(f"a peer sent an unknown {oneof} in {type(message).__name__}")


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
