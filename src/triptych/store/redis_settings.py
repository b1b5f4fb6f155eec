"""Settings of the store in Redis, apart from it: they can be read without its client."""

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class RedisSettings:
    """Settings of the access to Redis."""

    redis: str = ""
    """HOST:PORT of Redis, which keeps the state of several managers; empty keeps it in this process."""
    redis_database: int = 0
    """Number of the database."""
    redis_prefix: str = "triptych"
    """Beginning of every key. Clusters that share a Redis need different ones."""
    redis_username: str = ""
    """User of Redis's access control list; empty for the default user."""
    redis_password_file: Path | None = None
    """File with the password, read at each new connection."""
    redis_tls: bool = False
    """Reach Redis by mutual TLS with tls_cert, tls_key and tls_ca. Under tls_name its certificate is for redis.DOMAIN."""
    redis_tls_ca: Path | None = None
    """CA certificates (PEM) of a Redis with an authority of its own. With it, the connection is encrypted and the host checked."""
    redis_tls_cert: Path | None = None
    """Certificate of this process (PEM), if Redis asks for one."""
    redis_tls_key: Path | None = None
    """Private key of the certificate (PEM)."""
    redis_timeout_s: float = 2.0
    """Longest time of a call, with connecting and waiting for a connection."""
    redis_connections: int = 8
    """Most connections. Further calls wait for one."""
    redis_poll_s: float = 0.25
    """Interval at which a watched table is checked for changes, seconds."""

    def __post_init__(self) -> None:
        host, _, port = self.redis.rpartition(":")
        if self.redis and not (host and port.isdecimal() and 0 < int(port) < 1 << 16):
            raise ValueError(f"redis {self.redis!r} is not HOST:PORT")
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", self.redis_prefix):
            raise ValueError(f"redis_prefix {self.redis_prefix!r} must be 1 to 64 of A-Z, a-z, 0-9, '.', '_' and '-'")
        if (self.redis_tls_cert is None) != (self.redis_tls_key is None):
            raise ValueError("redis_tls_cert and redis_tls_key need each other")
        if self.redis_tls_cert is not None and self.redis_tls_ca is None:
            raise ValueError("redis_tls_cert needs redis_tls_ca")
        if self.redis_tls and self.redis_tls_ca is not None:
            raise ValueError("redis_tls takes tls_ca: leave redis_tls_ca out")
        if not 0 <= self.redis_database < 1 << 16:
            raise ValueError(f"redis_database {self.redis_database} must be 0 to 65535")
        for name, low, value, high in (
            ("redis_timeout_s", 0.05, self.redis_timeout_s, 60.0),
            ("redis_connections", 1, self.redis_connections, 1024),
            ("redis_poll_s", 0.01, self.redis_poll_s, 60.0),
        ):
            if not low <= value <= high:
                raise ValueError(f"{name} {value:g} must be {low:g} to {high:g}")
