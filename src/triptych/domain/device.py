"""Devices that compute a model's parts: peak rates, memory, links and prices, and how much of them engines reach.

Rates are per second and in one direction; sizes are in bytes, times in seconds.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from datetime import date
from math import isfinite, log2
from typing import Any, Self

from triptych.domain.embedding import DType

_GIGA = 1e9
_TERA = 1e12
_MEGA = 1e6
_MAX_TEXT = 1024
_MAX_DEVICES = 256
_DTYPES = {"float32": DType.F32, "float16": DType.F16, "bfloat16": DType.BF16}
_KINDS = ("gpu", "cpu")
_USABLE = 0.9
"""Share of a device's memory that engines use."""


class BadCatalogue(ValueError):
    """A catalogue of devices that cannot be used. The message says where and what is wrong."""


@dataclass(frozen=True, slots=True)
class Efficiency:
    """How much of a device's peak rates engines reach, and what a pass costs beside them."""

    compute: float
    """Share of the peak that products with weights reach."""
    attention: float
    """Share of the peak that attention reaches."""
    bandwidth: float
    """Share of the memory's bandwidth."""
    tensor_parallel: float
    """Share of the speed that is kept at each doubling of the degree."""
    pass_s: float
    sequence_s: float
    """Time for each sequence of a step, or item of a batch."""
    layer_s: float
    """Least time of a decoder's layer in a pass that is not replayed as a graph: to start its kernels one by one."""
    encode_layer_s: float
    """The same of an encoder's layer."""
    reduce_s: float
    """Least time of one all-reduce."""
    source: str


@dataclass(frozen=True, slots=True)
class Price:
    usd_per_hour: float
    date: str
    source: str


@dataclass(frozen=True, slots=True)
class Host:
    """Speeds of loading, preparing and pulling, whatever the device."""

    disk_nbytes_per_s: float
    process_s: float
    """From the start of a process until it loads its model."""
    prepare_s: float
    prepare_s_per_pixel: float
    prepare_s_per_byte: float
    transfer_s: float
    """Fixed time of a pull."""
    shm_nbytes_per_s: float
    nixl_nbytes_per_s: float
    tcp_nbytes_per_s: float
    source: str


@dataclass(frozen=True, slots=True)
class Device:
    """One device, or with ``per_core`` one core."""

    name: str
    title: str
    kind: str
    hardware: tuple[str, ...]
    """Names that profiles give it."""
    flops_per_s: Mapping[DType, float]
    memory_nbytes: int
    memory_nbytes_per_s: float
    host_nbytes_per_s: float
    device_nbytes_per_s: float
    """Between two devices of one host."""
    network_nbytes_per_s: float
    source: str
    efficiency: Efficiency
    per_core: bool = False
    power_w: float | None = None
    price: Price | None = None

    @property
    def usable_nbytes(self) -> int:
        """Memory for weights, activations and keys and values."""
        return int(_USABLE * self.memory_nbytes)

    def of_cores(self, cores: int, *, hardware: str, memory_nbytes: int | None) -> Self:
        """``cores`` cores of a machine. ``memory_nbytes``: None if it is not known."""
        return replace(
            self,
            hardware=(hardware,),
            flops_per_s={dtype: rate * cores for dtype, rate in self.flops_per_s.items()},
            memory_nbytes_per_s=self.memory_nbytes_per_s * cores,
            memory_nbytes=self.memory_nbytes if memory_nbytes is None else memory_nbytes,
            per_core=False,
        )

    def speedup(self, degree: int) -> float:
        """Of ``degree`` devices over one, without the all-reduces."""
        return degree * float(self.efficiency.tensor_parallel ** log2(degree))


@dataclass(frozen=True, slots=True)
class Link:
    """A way between two devices or hosts."""

    name: str
    title: str
    nbytes_per_s: float
    """What transfers reach of its rate, in one direction."""
    transfer_s: float
    """Fixed time of a transfer."""
    source: str


@dataclass(frozen=True, slots=True)
class Catalogue:
    devices: Mapping[str, Device]
    host: Host
    links: Mapping[str, Link]
    """In the order of the catalogue."""

    def device(self, name: str) -> Device:
        """Raises BadCatalogue, naming the devices that there are."""
        if name not in self.devices:
            raise BadCatalogue(f"there is no device {name!r}; there are {', '.join(sorted(self.devices))}")
        return self.devices[name]


def read_catalogue(document: Mapping[str, Any], more: Mapping[str, Any] | None = None) -> Catalogue:
    """The catalogue of a document, with the entries of ``more`` in addition or in place of those of the same name.

    Raises BadCatalogue for anything that is missing, unknown or out of range.
    """
    more = {} if more is None else more
    for part in (document, more):
        _known("the catalogue", part, {"device", "efficiency", "host", "link"})
    kinds = _table("efficiency", document) | _table("efficiency", more)
    efficiencies = {kind: _efficiency(f"efficiency.{kind}", table) for kind, table in kinds.items()}
    _known("efficiency", efficiencies, set(_KINDS))
    given = _table("device", document) | _table("device", more)
    if len(given) > _MAX_DEVICES:
        raise BadCatalogue(f"there are {len(given)} devices, at most {_MAX_DEVICES} are read")
    entries = {name: _inherited(name, given, ()) for name in given}
    devices = {name: _device(name, entry, efficiencies) for name, entry in entries.items()}
    links = {name: _link(name, entry) for name, entry in (_table("link", document) | _table("link", more)).items()}
    return Catalogue(devices, _host(_table("host", document) | _table("host", more)), links)


def _inherited(name: str, given: Mapping[str, Any], below: tuple[str, ...]) -> Mapping[str, Any]:
    """An entry with what it takes from the device that it is ``like``."""
    entry = given.get(name)
    if not isinstance(entry, dict):
        raise BadCatalogue(
            f"device.{below[-1]}.like is {name!r}, which is not there" if below else f"device.{name} is not a table"
        )
    if "like" not in entry:
        return entry
    if name in below:
        raise BadCatalogue(f"device.{below[0]} is like itself: {' -> '.join((*below, name))}")
    of_other = _inherited(_text(f"device.{name}.like", entry["like"]), given, (*below, name))
    own = {key: value for key, value in entry.items() if key != "like"}
    return {key: value for key, value in of_other.items() if key != "price"} | own


def _device(name: str, entry: Mapping[str, Any], efficiencies: Mapping[str, Efficiency]) -> Device:
    where = f"device.{name}"
    required = {
        "title", "kind", "hardware", "source", "tflops", "memory_gb", "memory_gb_per_s", "host_gb_per_s", "device_gb_per_s",
        "network_gb_per_s",
    }  # fmt: skip
    _known(where, entry, required | {"efficiency", "per_core", "power_w", "price"})
    _required(where, entry, required)
    kind = _text(f"{where}.kind", entry["kind"])
    if kind not in efficiencies:
        raise BadCatalogue(f"{where}.kind is {kind!r}, must be one of {', '.join(efficiencies)}")
    hardware = entry["hardware"]
    if not isinstance(hardware, list) or not hardware:
        raise BadCatalogue(f"{where}.hardware is not a list of names")
    tflops = _of_dtypes(f"{where}.tflops", entry["tflops"])
    per_core = entry.get("per_core", False)
    if not isinstance(per_core, bool):
        raise BadCatalogue(f"{where}.per_core is not true or false")
    rates = {key: _number(f"{where}.{key}", entry[key]) * _GIGA for key in required if key.endswith("_gb_per_s")}
    return Device(
        name=name,
        title=_text(f"{where}.title", entry["title"]),
        kind=kind,
        hardware=tuple(_text(f"{where}.hardware", each) for each in hardware),
        flops_per_s=tflops,
        memory_nbytes=int(_number(f"{where}.memory_gb", entry["memory_gb"]) * _GIGA),
        memory_nbytes_per_s=rates["memory_gb_per_s"],
        host_nbytes_per_s=rates["host_gb_per_s"],
        device_nbytes_per_s=rates["device_gb_per_s"],
        network_nbytes_per_s=rates["network_gb_per_s"],
        source=_text(f"{where}.source", entry["source"]),
        efficiency=_efficiency(f"{where}.efficiency", entry.get("efficiency", {}), efficiencies[kind]),
        per_core=per_core,
        power_w=_number(f"{where}.power_w", entry["power_w"]) if "power_w" in entry else None,
        price=_price(f"{where}.price", entry["price"]) if "price" in entry else None,
    )


def _of_dtypes(where: str, value: object) -> Mapping[DType, float]:
    if not isinstance(value, dict) or not value:
        raise BadCatalogue(f"{where} is not a table of rates by dtype")
    _known(where, value, set(_DTYPES))
    return {_DTYPES[name]: _number(f"{where}.{name}", rate) * _TERA for name, rate in value.items()}


def _efficiency(where: str, value: object, default: Efficiency | None = None) -> Efficiency:
    if not isinstance(value, dict):
        raise BadCatalogue(f"{where} is not a table")
    names = [field.name for field in fields(Efficiency)]
    _known(where, value, set(names))
    if default is None:
        _required(where, value, set(names))
    read: dict[str, Any] = {}
    for name, entry in value.items():
        if name == "source":
            read[name] = _text(f"{where}.{name}", entry)
        elif name.endswith("_s"):
            read[name] = _number(f"{where}.{name}", entry, zero=True)
        else:
            read[name] = _number(f"{where}.{name}", entry, most=1.0)
    return Efficiency(**read) if default is None else replace(default, **read)


def _host(entry: Mapping[str, Any]) -> Host:
    times = {"process_s", "prepare_s", "prepare_s_per_megapixel", "prepare_s_per_megabyte", "transfer_s"}
    rates = {"disk_gb_per_s", "shm_gb_per_s", "nixl_gb_per_s", "tcp_gb_per_s"}
    _known("host", entry, times | rates | {"source"})
    _required("host", entry, times | rates | {"source"})
    seconds = {name: _number(f"host.{name}", entry[name], zero=True) for name in times}
    return Host(
        process_s=seconds["process_s"],
        prepare_s=seconds["prepare_s"],
        prepare_s_per_pixel=seconds["prepare_s_per_megapixel"] / _MEGA,
        prepare_s_per_byte=seconds["prepare_s_per_megabyte"] / _MEGA,
        transfer_s=seconds["transfer_s"],
        source=_text("host.source", entry["source"]),
        **{name.replace("gb", "nbytes"): _number(f"host.{name}", entry[name]) * _GIGA for name in rates},
    )


def _link(name: str, entry: object) -> Link:
    where, names = f"link.{name}", {"title", "gb_per_s", "reached", "transfer_s", "source"}
    if not isinstance(entry, dict):
        raise BadCatalogue(f"{where} is not a table")
    _known(where, entry, names)
    _required(where, entry, names)
    rate = _number(f"{where}.gb_per_s", entry["gb_per_s"]) * _number(f"{where}.reached", entry["reached"], most=1.0)
    return Link(
        name,
        _text(f"{where}.title", entry["title"]),
        rate * _GIGA,
        _number(f"{where}.transfer_s", entry["transfer_s"], zero=True),
        _text(f"{where}.source", entry["source"]),
    )


def _price(where: str, value: object) -> Price:
    if not isinstance(value, dict):
        raise BadCatalogue(f"{where} is not a table with usd_per_hour, date and source")
    _known(where, value, {"usd_per_hour", "date", "source"})
    _required(where, value, {"usd_per_hour", "date", "source"})
    day = _text(f"{where}.date", value["date"])
    try:
        date.fromisoformat(day)
    except ValueError:
        raise BadCatalogue(f"{where}.date is {day!r}, not a date as 2026-11-28") from None
    return Price(
        _number(f"{where}.usd_per_hour", value["usd_per_hour"], zero=True),
        day,
        _text(f"{where}.source", value["source"]),
    )


def _table(name: str, document: Mapping[str, Any]) -> dict[str, Any]:
    value = document.get(name, {})
    if not isinstance(value, dict):
        raise BadCatalogue(f"{name} is not a table")
    return value


def _known(where: str, entries: Mapping[str, Any], known: set[str]) -> None:
    if unknown := sorted(entries.keys() - known):
        raise BadCatalogue(
            f"{where} has an unknown entry {unknown[0][:_MAX_TEXT]!r}; known are {', '.join(sorted(known))}"
        )


def _required(where: str, entries: Mapping[str, Any], required: set[str]) -> None:
    if missing := sorted(required - entries.keys()):
        raise BadCatalogue(f"{where} has no {missing[0]}")


def _text(where: str, value: object) -> str:
    if not isinstance(value, str) or not value or len(value) > _MAX_TEXT or not value.isprintable():
        raise BadCatalogue(f"{where} is not a text of at most {_MAX_TEXT} printable characters")
    return value


def _number(where: str, value: object, *, zero: bool = False, most: float = 1e12) -> float:
    """A positive number, or with ``zero`` 0."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    if not good or not (0 <= value <= most if zero else 0 < value <= most):  # type: ignore[operator]  # a number
        raise BadCatalogue(
            f"{where} is {str(value)[:_MAX_TEXT]!r}, not a number above 0"
            + (f" and at most {most:g}" if most < 1e12 else "")
        )
    return float(value)  # type: ignore[arg-type]  # a number
