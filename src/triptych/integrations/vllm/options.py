"""Options of the connector in a vLLM that runs by itself: ``ec_connector_extra_config`` of its command line."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

from pydantic import TypeAdapter, ValidationError

from triptych.domain.bounds import Between
from triptych.domain.limits import PositiveSeconds, check_limits
from triptych.machine.text.pull_queue import PullLimits
from triptych.machine.text.tensor_cache import CacheLimits
from triptych.policy.addresses import why_not_called
from triptych.runtime.tls import TlsSettings
from triptych.transport.options import TransferOptions

_MIB = 1 << 20
_GROUPS: Mapping[str, type] = {
    "transfers": TransferOptions,
    "tensor_cache": CacheLimits,
    "pulls": PullLimits,
    "tls": TlsSettings,
}


@dataclass(frozen=True, slots=True)
class PullOptions:
    """Names, meanings and defaults are those of a text instance's settings, unless said here."""

    routers: str
    """HOST:PORT of routers of the model, separated by commas."""
    model: str = ""
    """The model's name at the routers; empty: the only one that they serve."""
    timeout_s: PositiveSeconds = 30.0
    """Time that a request waits for its items before it fails, seconds."""
    image_cache_bytes: Annotated[int, Between(_MIB)] = 256 * _MIB
    allow_network: bool = False
    """Whether embeddings may be pulled from other addresses than loopback. Under TLS they may."""
    host: str = "127.0.0.1"
    """IP address on which transports listen."""
    prefer_transport: str = ""
    connect_timeout_s: PositiveSeconds = 5.0
    release_timeout_s: PositiveSeconds = 2.0
    transfers: TransferOptions = field(default_factory=TransferOptions)
    tensor_cache: CacheLimits = field(default_factory=CacheLimits)
    pulls: PullLimits = field(default_factory=PullLimits)
    tls: TlsSettings = field(default_factory=TlsSettings)

    def __post_init__(self) -> None:
        check_limits(self)
        for address in self.addresses:
            if (reason := why_not_called(address, beyond_loopback=True)) is not None:
                raise ValueError(f"routers: {address!r}: {reason}")
        if self.transfers.arena != "host":
            raise ValueError("arena: embeddings are pulled into host memory, from where vLLM's workers get them")

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(address.strip() for address in self.routers.split(",")))


def parse(given: Mapping[str, Any]) -> PullOptions:
    """Parse flat keys, those of groups included. Raises ValueError, naming the key."""
    left = dict(given)
    nested: dict[str, Any] = {name: _taken(cls, left) for name, cls in _GROUPS.items()}
    nested |= _taken(PullOptions, left)
    if left:
        raise ValueError(f"ec_connector_extra_config has no key {', '.join(sorted(left))}")
    try:
        return TypeAdapter(PullOptions).validate_python(nested)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"ec_connector_extra_config: {name}: {first['msg']}") from None


def _taken(cls: Any, left: dict[str, Any]) -> dict[str, Any]:
    return {
        field.name: left.pop(field.name) for field in fields(cls) if field.name in left and field.name not in _GROUPS
    }
