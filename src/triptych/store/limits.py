"""Names, sizes and numbers that a store accepts, the same in every backend."""

import re
from dataclasses import dataclass

from triptych.errors import InvalidRequest

MAX_KEY_LENGTH = 256
MAX_TTL_S = 3600.0
_NAME = re.compile(r"[a-z][a-z0-9-]{0,63}")


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Bounds of what is written. The methods raise InvalidRequest."""

    max_value_bytes: int = 256 << 10
    """Largest value of an entry or of a log's record."""
    max_entries: int = 4096
    """Most entries of a table."""
    max_log_records: int = 10_000
    """Most records that a log keeps."""

    def check_value(self, value: bytes) -> None:
        if len(value) > self.max_value_bytes:
            raise InvalidRequest(f"the value has {len(value)} bytes, the limit is {self.max_value_bytes}")

    def check_records(self, number: int) -> None:
        if not 1 <= number <= self.max_log_records:
            raise InvalidRequest(f"the number of log records is {number}, it must be 1 to {self.max_log_records}")


def check_name(name: str) -> None:
    """The name of a table, log or lease. Raises InvalidRequest."""
    if _NAME.fullmatch(name) is None:
        raise InvalidRequest(f"{name[:80]!r} is not a name: up to 64 of a-z, 0-9 and '-', a letter first")


def check_key(key: str) -> None:
    """The key of an entry, or the owner of a lease. Raises InvalidRequest."""
    if not 0 < len(key) <= MAX_KEY_LENGTH or not key.isprintable():
        raise InvalidRequest(f"{key[:80]!r} is not a key: 1 to {MAX_KEY_LENGTH} printable characters")


def check_ttl(ttl_s: float) -> None:
    """Raises InvalidRequest."""
    if not 0.001 <= ttl_s <= MAX_TTL_S:
        raise InvalidRequest(f"the time to live is {ttl_s:g} s, it must be 0.001 to {MAX_TTL_S:g} s")
