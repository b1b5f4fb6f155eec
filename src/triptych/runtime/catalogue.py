"""The catalogue of devices: the one that is shipped, and the user's additions."""

from pathlib import Path

from triptych.domain.device import BadCatalogue, Catalogue, Device, read_catalogue
from triptych.files import BadFile, read_toml
from triptych.runtime.host import cpu_name, memory_nbytes

_SHIPPED = Path(__file__).with_name("catalogue.toml")
_MAX_BYTES = 1 << 20


def load_catalogue(more: Path | None = None) -> Catalogue:
    """The shipped catalogue with the entries of a file. Raises BadCatalogue, naming the file."""
    shipped = read_toml(_SHIPPED, _MAX_BYTES)
    if more is None:
        return read_catalogue(shipped)
    try:
        return read_catalogue(shipped, read_toml(more, _MAX_BYTES))
    except BadFile as error:
        raise BadCatalogue(f"{more.name} {error}") from None
    except BadCatalogue as error:
        raise BadCatalogue(f"{more.name}: {error}") from None


def at_hand(device: Device, cores: int) -> Device:
    """The device, or if it is a core, so many of this machine."""
    return device.of_cores(cores, hardware=cpu_name(), memory_nbytes=memory_nbytes()) if device.per_core else device
