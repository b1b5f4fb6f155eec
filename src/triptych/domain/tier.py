"""Tiers of hardware: instances of one role on several kinds of devices are pools of their own."""

import math
import re
from dataclasses import dataclass
from typing import Self

MAX_TIER = 24
"""Characters in the name of a tier: with those of its model and role it must be a key of the store."""
_NAME = re.compile(f"[a-z0-9][a-z0-9.-]{{0,{MAX_TIER - 1}}}")
_NO_NAME = re.compile(r"[^a-z0-9.-]+")
MAX_DEVICE = 64
_MOST_USD = 1e6
_FASTEST = 1e3


@dataclass(frozen=True, slots=True)
class Tier:
    """A kind of device that instances of a role have, and what an instance costs there."""

    name: str
    device: str = ""
    """For people; empty if nobody said."""
    usd_per_hour: float | None = None
    """Price of an instance. None if it is unknown."""
    speed: float = 1.0
    """Multiple of the speed of an instance in another tier, as people compare them."""

    @property
    def fault(self) -> str:
        """What is wrong with it; empty if nothing is."""
        if not is_tier_name(self.name):
            return f"{self.name!r} is no name of a tier: it has up to {MAX_TIER} small letters, digits, dots and dashes"
        if len(self.device) > MAX_DEVICE or not self.device.isprintable() or "," in self.device:
            return f"the device of tier {self.name} has up to {MAX_DEVICE} printable characters, and no comma"
        if self.usd_per_hour is not None and not 0 <= self.usd_per_hour <= _MOST_USD:
            return f"the price of tier {self.name} is {self.usd_per_hour:g}, must be from 0 to {_MOST_USD:g}"
        if not 1 / _FASTEST <= self.speed <= _FASTEST:
            return f"the speed of tier {self.name} is {self.speed:g}, must be from {1 / _FASTEST:g} to {_FASTEST:g}"
        return ""

    @classmethod
    def parse(cls, text: str) -> Self:
        """A tier of ``NAME[:device=TEXT,price=NUMBER,speed=NUMBER]``. Raises ValueError."""
        name, _, rest = text.partition(":")
        given: dict[str, str] = {}
        for part in rest.split(",") if rest else ():
            key, equals, value = part.partition("=")
            if not equals or key not in ("device", "price", "speed") or key in given:
                raise ValueError(
                    f"{part!r} of tier {name!r} is not one of device=TEXT, price=NUMBER, speed=NUMBER, each once"
                )
            given[key] = value
        price = None if "price" not in given else _number(f"the price of tier {name}", given["price"])
        speed = 1.0 if "speed" not in given else _number(f"the speed of tier {name}", given["speed"])
        tier = cls(name, given.get("device", ""), price, speed)
        if fault := tier.fault:
            raise ValueError(fault)
        return tier

    def __str__(self) -> str:
        """As ``parse`` reads it."""
        parts = [f"device={self.device}"] if self.device else []
        parts += [] if self.usd_per_hour is None else [f"price={self.usd_per_hour:.12g}"]
        parts += [] if self.speed == 1.0 else [f"speed={self.speed:.12g}"]
        return f"{self.name}:{','.join(parts)}" if parts else self.name


def tier_name(device: str, degree: int = 1) -> str:
    """A tier for a kind of device: ``h100``, or ``2xh100`` where an instance has two."""
    text = device.lower() if degree == 1 else f"{degree}x{device.lower()}"
    return _NO_NAME.sub("-", text).strip("-.")[:MAX_TIER].rstrip("-.") or "devices"


def is_tier_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def _number(what: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{what} is {text!r}, which is no number")
    return number
