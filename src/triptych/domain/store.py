"""Contents of the control plane's store (``ports.Store``): entries in tables, logs, and leases."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Entry:
    """A value in a table. Each write gives it a higher ``version``, also after it was deleted and written again."""

    key: str
    value: bytes
    version: int


@dataclass(frozen=True, slots=True)
class Changes:
    """Changes of a table since the previous ``Changes``: entries written, and keys that are gone."""

    written: tuple[Entry, ...] = ()
    deleted: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LogRecord:
    """A value in a log. Later records have higher numbers."""

    number: int
    value: bytes


@dataclass(frozen=True, slots=True)
class Fence:
    """Proof that a lease was acquired. A later holder of the lease has a higher ``token``.

    Whoever is given orders by holders of the lease must refuse a token below the highest one it has seen.
    """

    lease: str
    token: int
