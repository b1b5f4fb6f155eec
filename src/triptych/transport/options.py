"""Options of the access to an instance's memory, and of the time that a pull may take."""

from dataclasses import dataclass
from typing import Literal

from triptych.domain.limits import PositiveSeconds, check_limits
from triptych.policy.transport import usual


@dataclass(frozen=True, slots=True)
class TransferOptions:
    """Transports of embeddings."""

    transports: tuple[str, ...] = ()
    """Transports for pulling embeddings; those that are not installed are skipped. Readers probe which ones work. Empty means shm,
    nixl and tcp, and under TLS, which does not cover nixl, shm and tcp."""
    arena: Literal["host", "device"] = "host"
    """Memory that keeps embeddings: the host's, or that of ``device``, which is reached over nixl or tcp only."""
    advertise_host: str = ""
    """Address at which peers reach this instance's memory over TCP; empty means ``host``, which must then be reachable."""
    max_pull_s: PositiveSeconds = 10.0
    """Longest time to connect to an encoder, pull an embedding and verify it, seconds. An encoder keeps a slot this
    much longer than its expired lease. So the value of a text instance must not exceed that of the encoders.
    """

    def __post_init__(self) -> None:
        check_limits(self)

    def allowed(self, *, under_tls: bool) -> tuple[str, ...]:
        """The transports to start."""
        return self.transports or usual(under_tls=under_tls)
