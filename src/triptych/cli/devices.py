"""The catalogue of devices, as tables and as JSON."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from triptych.cli.outcome import CliError
from triptych.domain.device import BadCatalogue, Catalogue, Device
from triptych.domain.embedding import DType
from triptych.runtime.catalogue import at_hand, load_catalogue
from triptych.runtime.cores import usable_cores

_GIGA = 1e9
_TERA = 1e12


def show(name: str | None, catalogue: Path | None, console: Console, *, as_json: bool) -> None:
    """All devices, or everything about one. Raises CliError."""
    try:
        known = load_catalogue(catalogue)
        devices = [known.device(name)] if name is not None else list(known.devices.values())
    except BadCatalogue as error:
        raise CliError(str(error), caller=True) from None
    devices = [at_hand(device, len(usable_cores())) for device in devices]
    if as_json:
        print(json.dumps({device.name: _plain(asdict(device)) for device in devices}, indent=2))
    elif name is not None:
        console.print(_one(devices[0], known))
    else:
        console.print(_all(devices))


def _all(devices: list[Device]) -> Table:
    table = Table()
    table.add_column("device")
    for heading in ("TFLOP/s bf16", "memory GB", "GB/s", "host GB/s", "device GB/s", "network GB/s", "W", "$/h"):
        table.add_column(heading, justify="right")
    for device in devices:
        price = "-" if device.price is None else f"{device.price.usd_per_hour:.2f}"
        rates = (
            device.memory_nbytes_per_s,
            device.host_nbytes_per_s,
            device.device_nbytes_per_s,
            device.network_nbytes_per_s,
        )
        table.add_row(
            device.name,
            f"{device.flops_per_s.get(DType.BF16, 0.0) / _TERA:.4g}",
            f"{device.memory_nbytes / _GIGA:.3g}",
            *(f"{rate / _GIGA:.4g}" for rate in rates),
            "-" if device.power_w is None else f"{device.power_w:.0f}",
            price,
        )
    return table


def _one(device: Device, catalogue: Catalogue) -> Table:
    """A row for each figure; those that are not of the device itself name their source."""
    table = Table(title=device.title, title_justify="left", show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    for dtype, rate in device.flops_per_s.items():
        table.add_row(f"TFLOP/s {dtype.value}", f"{rate / _TERA:.4g}")
    table.add_row("memory", f"{device.memory_nbytes / _GIGA:.3g} GB, {device.memory_nbytes_per_s / _GIGA:.4g} GB/s")
    table.add_row("to the host", f"{device.host_nbytes_per_s / _GIGA:.4g} GB/s")
    table.add_row("to other devices", f"{device.device_nbytes_per_s / _GIGA:.4g} GB/s")
    table.add_row("network", f"{device.network_nbytes_per_s / _GIGA:.4g} GB/s")
    if device.power_w is not None:
        table.add_row("power", f"{device.power_w:.0f} W")
    price = device.price
    table.add_row(
        "price",
        "no public one is known" if price is None else f"{price.usd_per_hour:.2f} $/h ({price.source}, {price.date})",
    )
    table.add_row("names in profiles", ", ".join(device.hardware))
    table.add_row("source", device.source)
    for name, value in asdict(device.efficiency).items():
        table.add_row(f"efficiency: {name}", value if isinstance(value, str) else f"{value:g}")
    table.add_row("host", catalogue.host.source)
    return table


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name.value if isinstance(name, DType) else name: _plain(entry) for name, entry in value.items()}
    return value
