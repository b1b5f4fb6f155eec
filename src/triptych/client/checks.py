"""Validation of arguments before sending: a mistake raises InvalidRequest whose ``param`` is the argument."""

import os
import reprlib
from collections.abc import Iterable
from math import isfinite
from numbers import Real
from operator import index
from typing import Any, TypeVar

from triptych.errors import InvalidRequest

T = TypeVar("T")

MAX_UNSIGNED = 2**32 - 1
"""Largest count or token id of a message."""
MAX_TIMEOUT_S = 1e9
"""About thirty years; later deadlines overflow."""


def wrong(name: str, wanted: str, value: object) -> InvalidRequest:
    """The error for an invalid argument."""
    return InvalidRequest(f"{name} is {wanted}, not {reprlib.repr(value)}", param=name)


def of_type(name: str, value: Any, cls: type[T], wanted: str) -> T:
    """Return the argument if it is an instance of ``cls``."""
    if not isinstance(value, cls):
        raise wrong(name, wanted, value)
    return value


def text(name: str, value: Any, wanted: str = "text") -> str:
    """Return the argument if it is a string that UTF-8 can encode, i.e. without lone surrogates."""
    if not isinstance(value, str):
        raise wrong(name, wanted, value)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{name} has a lone surrogate at character {error.start}", param=name) from None
    return value


def integer(name: str, value: Any, low: int = 0, high: int = MAX_UNSIGNED) -> int:
    """An integer of any kind but bool, within its bounds."""
    try:
        number = index(value)
    except TypeError:
        raise wrong(name, "an integer", value) from None
    if isinstance(value, bool):
        raise wrong(name, "an integer", value)
    if not low <= number <= high:
        raise InvalidRequest(f"{name} is {reprlib.repr(number)}, must be from {low} to {high}", param=name)
    return number


def number(name: str, value: Any) -> float:
    """A number of any kind but bool; the router checks its bounds."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise wrong(name, "a number", value)
    try:
        return float(value)
    except OverflowError:
        raise wrong(name, "a number that a float can hold", value) from None


def duration_s(name: str, value: Any) -> float:
    """A duration in seconds."""
    seconds = number(name, value)
    if not (isfinite(seconds) and 0 < seconds <= MAX_TIMEOUT_S):
        raise InvalidRequest(f"{name} is {seconds}, must be above 0 and at most {MAX_TIMEOUT_S:.0f}", param=name)
    return seconds


def several(name: str, value: Any, wanted: str = "a list") -> tuple[Any, ...]:
    """The members of a list, tuple or other iterable; not of text, bytes or a path."""
    if isinstance(value, str | bytes | bytearray | memoryview | os.PathLike):
        raise InvalidRequest(f"{name} is {wanted}, not one of them", param=name)
    if not isinstance(value, Iterable):
        raise wrong(name, wanted, value)
    return tuple(value)
