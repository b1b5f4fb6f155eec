"""What every message is held to: known values, lengths, durations. Raises InvalidRequest, naming the field."""

import math
from collections.abc import Mapping
from typing import TypeVar

from triptych import errors
from triptych.domain.embedding import LEASE_ID_NBYTES
from triptych.domain.media import DIGEST_NBYTES

MAX_TENANT_SALT_NBYTES = 256
MAX_ADDRESS_CHARS = 262
"""A DNS name of 253 characters, brackets, a colon and a port."""

K = TypeVar("K")
V = TypeVar("V")


def from_enum(table: Mapping[K, V], value: V, name: str) -> K:
    for domain, wire in table.items():
        if wire == value:
            return domain
    raise errors.InvalidRequest(f"{name} is not set to a known value (got {value})", param=name)


def checked_digest(value: bytes, name: str) -> bytes:
    if len(value) != DIGEST_NBYTES:
        raise errors.InvalidRequest(f"{name} has {len(value)} bytes, not {DIGEST_NBYTES}", param=name)
    return value


def checked_lease_id(value: bytes, name: str = "lease_id") -> bytes:
    if len(value) != LEASE_ID_NBYTES:
        raise errors.InvalidRequest(f"{name} has {len(value)} bytes, not {LEASE_ID_NBYTES}", param=name)
    return value


def checked_duration(value: float, name: str) -> float:
    if not (math.isfinite(value) and value >= 0):
        raise errors.InvalidRequest(f"{name} is {value}, not a duration in seconds", param=name)
    return value


def checked_address(value: str, name: str) -> str:
    """Its length only: whether it is one, and may be called, is asked where it is called."""
    if len(value) > MAX_ADDRESS_CHARS:
        raise errors.InvalidRequest(
            f"{name} has {len(value)} characters, at most {MAX_ADDRESS_CHARS} are taken", param=name
        )
    return value


def checked_salt(value: bytes) -> bytes:
    if len(value) > MAX_TENANT_SALT_NBYTES:
        raise errors.InvalidRequest(
            f"tenant_salt has {len(value)} bytes, at most {MAX_TENANT_SALT_NBYTES} are taken", param="tenant_salt"
        )
    return value
