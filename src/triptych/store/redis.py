"""The store in Redis (6.2 or later): for several managers.

Each write is one Lua script, so that its conditions and its effects are atomic, and leases end by the clock of Redis.

Versions, record numbers and fencing tokens are one sequence: the next is the last plus one, or the microseconds since 1970
on the clock of Redis, if that is more. So they do not go back when Redis is emptied.
"""

import asyncio
import logging
import re
import ssl
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

from redis import exceptions
from redis.asyncio import BlockingConnectionPool, Connection, Redis, SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from triptych.domain.store import Changes, Entry, Fence, LogRecord
from triptych.errors import Conflict, Deposed, Overloaded, StoreCorrupt, StoreUnavailable
from triptych.files import BadFile, read_text
from triptych.runtime.tls import caller_of
from triptych.store import scripts
from triptych.store.limits import StoreLimits, check_key, check_name, check_ttl
from triptych.store.redis_settings import RedisSettings

logger = logging.getLogger(__name__)

SCHEMA = 1
"""Part of every key's name: a version of this program that stores something else uses another number."""

_MAX_PASSWORD_NBYTES = 4096
_STORED = re.compile(rb"(\d{1,16}) ", re.ASCII)
_ERROR_CODE = re.compile(r"[A-Z]{3,20}(?= |$)")


class RedisStore:
    """``ports.Store`` in Redis. Nothing is connected before the first call, and each call connects again if necessary.

    Not for Redis Cluster. After a failover to a replica that lags, writes may be missing; tokens still grow as long as the
    clocks of both agree.
    """

    def __init__(
        self, settings: RedisSettings, *, limits: StoreLimits | None = None, tls: ssl.SSLContext | None = None
    ) -> None:
        """``settings.redis`` must be set. ``tls`` is for connections under ``settings.redis_tls``. Raises ValueError when a
        file of TLS or with the password cannot be used.
        """
        self.fault = ""
        self._address = settings.redis
        self._limits = limits or StoreLimits()
        self._prefix = f"{settings.redis_prefix}:{SCHEMA}:"
        self._timeout_s = settings.redis_timeout_s
        self._poll_s = settings.redis_poll_s
        # Waiting for a connection is part of a call's time.
        self._pool = BlockingConnectionPool(
            max_connections=settings.redis_connections, timeout=None, **_connection(settings, tls)
        )
        self._redis = Redis(connection_pool=self._pool)
        self._scripts = {text: self._redis.register_script(text) for text in scripts.ALL}
        self._closed = False

    # --- tables ---

    async def get(self, table: str, key: str) -> Entry | None:
        check_name(table)
        check_key(key)
        raw = await self._run(scripts.GET, [self._key("table", table)], [key])
        return None if raw is None else self._entry(key.encode(), raw)

    async def entries(self, table: str) -> tuple[Entry, ...]:
        return (await self._listing(table))[1]

    async def put(
        self, table: str, key: str, value: bytes, *, expected: int | None = None, fence: Fence | None = None
    ) -> int:
        check_name(table)
        check_key(key)
        self._limits.check_value(value)
        arguments: list[str | bytes | int] = [key, _optional(expected), _token(fence), value, self._limits.max_entries]
        return int(await self._write(scripts.PUT, f"{key} in table {table}", self._keys(table, fence), arguments))

    async def delete(self, table: str, key: str, *, expected: int | None = None, fence: Fence | None = None) -> bool:
        check_name(table)
        check_key(key)
        arguments = [key, _optional(expected), _token(fence)]
        answer = await self._write(scripts.DELETE, f"{key} in table {table}", self._keys(table, fence), arguments)
        return int(answer) > 0

    async def watch(self, table: str) -> AsyncGenerator[Changes]:
        revision = b""
        known: dict[str, int] | None = None
        while True:
            try:
                if known is None or await self._run(scripts.REVISION, [self._key("changed", table)], []) != revision:
                    revision, entries = await self._listing(table)
                    versions = {entry.key: entry.version for entry in entries}
                    before = known or {}
                    changes = Changes(
                        tuple(entry for entry in entries if before.get(entry.key) != entry.version),
                        tuple(key for key in before if key not in versions),
                    )
                    if known is None or changes != Changes():
                        yield changes
                    known = versions
            except StoreUnavailable:
                if self._closed:
                    raise
            await asyncio.sleep(self._poll_s)

    # --- logs ---

    async def append(self, log: str, value: bytes, *, keep: int, fence: Fence | None = None) -> int:
        check_name(log)
        self._limits.check_value(value)
        self._limits.check_records(keep)
        keys = [self._key("log", log), self._key("revision"), self._lease_key(fence)]
        return int(await self._write(scripts.APPEND, f"log {log}", keys, [value, keep, _token(fence)]))

    async def tail(self, log: str, n: int) -> tuple[LogRecord, ...]:
        check_name(log)
        self._limits.check_records(n)
        entries = await self._run(scripts.TAIL, [self._key("log", log)], [n])
        return tuple(LogRecord(*self._parsed(raw, f"a record of log {log}")) for raw in entries)

    # --- leases ---

    async def acquire(self, lease: str, owner: str, ttl_s: float) -> Fence | None:
        check_name(lease)
        check_key(owner)
        check_ttl(ttl_s)
        token = await self._run(
            scripts.ACQUIRE, [self._key("lease", lease), self._key("revision")], [owner, _ms(ttl_s)]
        )
        return None if token is None else Fence(lease, int(token))

    async def renew(self, fence: Fence, ttl_s: float) -> bool:
        check_ttl(ttl_s)
        return bool(await self._run(scripts.RENEW, [self._lease_key(fence)], [fence.token, _ms(ttl_s)]))

    async def release(self, fence: Fence) -> bool:
        return bool(await self._run(scripts.RELEASE, [self._lease_key(fence)], [fence.token]))

    async def holder(self, lease: str) -> str | None:
        check_name(lease)
        raw = await self._run(scripts.HOLDER, [self._key("lease", lease)], [])
        return None if raw is None else self._parsed(raw, f"lease {lease}")[1].decode(errors="replace")

    async def close(self) -> None:
        self._closed = True
        await self._pool.aclose()

    # --- how ---

    def _key(self, *parts: str) -> str:
        return self._prefix + ":".join(parts)

    def _keys(self, table: str, fence: Fence | None) -> Sequence[str]:
        return [
            self._key("table", table),
            self._key("changed", table),
            self._key("revision"),
            self._lease_key(fence),
        ]

    def _lease_key(self, fence: Fence | None) -> str:
        if fence is None:
            return self._key("lease")
        check_name(fence.lease)
        return self._key("lease", fence.lease)

    async def _listing(self, table: str) -> tuple[bytes, tuple[Entry, ...]]:
        """The table's revision and its entries, from one moment."""
        check_name(table)
        revision, flat = await self._run(scripts.LIST, [self._key("table", table), self._key("changed", table)], [])
        entries = [self._entry(key, raw) for key, raw in zip(flat[::2], flat[1::2], strict=True)]
        return revision, tuple(sorted(entries, key=lambda entry: entry.key))

    def _entry(self, key: bytes, raw: bytes) -> Entry:
        version, value = self._parsed(raw, f"{key[:80]!r} in a table")
        try:
            return Entry(key.decode(), value, version)
        except UnicodeDecodeError:
            raise self._corrupt(f"key {key[:80]!r} in a table is not UTF-8") from None

    def _parsed(self, raw: bytes, what: str) -> tuple[int, bytes]:
        """A stored number and the bytes after it."""
        if (match := _STORED.match(raw)) is None or len(raw) - match.end() > self._limits.max_value_bytes:
            raise self._corrupt(f"{what} was not written by this program, or has more bytes than the limit")
        return int(match[1]), raw[match.end() :]

    def _corrupt(self, what: str) -> StoreCorrupt:
        reason = f"Redis has data that this program did not write: {what}"
        self._log(reason)
        return StoreCorrupt(reason)

    async def _write(
        self, script: str, what: str, keys: Sequence[str], arguments: Sequence[str | bytes | int]
    ) -> bytes:
        """Run a script that writes. Raises Conflict, Deposed, Overloaded as it says."""
        outcome, number = await self._run(script, keys, arguments)
        match outcome:
            case b"conflict":
                raise Conflict(f"{what} has version {number.decode()}, not the expected one")
            case b"deposed":
                raise Deposed("the lease is no longer held under the token of this write")
            case b"full":
                raise Overloaded(
                    f"no room for {what}: {number.decode()} entries, the limit is {self._limits.max_entries}"
                )
        answer: bytes = number
        return answer

    async def _run(self, script: str, keys: Sequence[str], arguments: Sequence[str | bytes | int]) -> Any:
        if self._closed:
            raise StoreUnavailable("the store is closed")
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await self._scripts[script](keys=keys, args=arguments)
        except (TimeoutError, exceptions.TimeoutError):
            raise self._away(f"Redis did not answer within {self._timeout_s:g} s") from None
        except exceptions.ResponseError as error:
            raise self._refused(error) from None
        except (exceptions.RedisError, OSError, UnicodeError) as error:
            raise self._away(_told(error)) from None
        if self.fault:
            logger.info("the store at %s answers again", self._address)
            self.fault = ""
        return answer

    def _away(self, reason: str) -> StoreUnavailable:
        self._log(reason)
        return StoreUnavailable(reason)

    def _log(self, fault: str) -> None:
        if fault != self.fault:
            logger.warning("the store at %s fails: %s", self._address, fault)
        self.fault = fault

    def _refused(self, error: exceptions.ResponseError) -> StoreUnavailable | StoreCorrupt:
        message = str(error)
        if message.startswith("WRONGTYPE"):
            return self._corrupt("a key has another type")
        if scripts.FOREIGN in message:
            return self._corrupt("a number is not one")
        code = _ERROR_CODE.match(message)
        return self._away(f"Redis refused the call: {code[0] if code else type(error).__name__}")


class _PasswordFile:
    """Credentials for each new connection (``redis.credentials.CredentialProvider``)."""

    def __init__(self, username: str, file: Path) -> None:
        self._username = username
        self._file = file

    async def get_credentials_async(self) -> tuple[str, ...]:
        password = await asyncio.to_thread(self._read)
        return (self._username, password) if self._username else (password,)

    def _read(self) -> str:
        try:
            return read_text(self._file, _MAX_PASSWORD_NBYTES).strip("\r\n")
        except BadFile as error:
            raise _NoPassword(f"the password file {error}") from None


class _NoPassword(exceptions.AuthenticationError):
    """No password to send. Apart from ``exceptions.AuthenticationError``, which is the answer of Redis."""


class _Encrypted(SSLConnection):
    """A connection under a given context, instead of one from files that are read once."""

    def __init__(self, *, context: ssl.SSLContext, **options: Any) -> None:
        super().__init__(**options)
        self.ssl_context.context = context


def _connection(settings: RedisSettings, tls: ssl.SSLContext | None) -> dict[str, Any]:
    host, _, port = settings.redis.rpartition(":")
    options: dict[str, Any] = {
        "connection_class": Connection,
        "host": host.strip("[]"),
        "port": int(port),
        "db": settings.redis_database,
        "socket_timeout": settings.redis_timeout_s,
        "socket_connect_timeout": settings.redis_timeout_s,
        # A write that is sent twice would report a conflict with itself: callers decide what to repeat.
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
    }
    if settings.redis_password_file is not None:
        if not settings.redis_password_file.is_file():
            raise ValueError(f"redis_password_file: {settings.redis_password_file} is not a file")
        options["credential_provider"] = _PasswordFile(settings.redis_username, settings.redis_password_file)
    elif settings.redis_username:
        options["username"] = settings.redis_username
    if settings.redis_tls_ca is not None:
        tls = caller_of(settings.redis_tls_ca, settings.redis_tls_cert, settings.redis_tls_key)
    elif not settings.redis_tls:
        return options
    elif tls is None:
        raise ValueError("redis_tls needs tls_cert, tls_key and tls_ca")
    return options | {"connection_class": _Encrypted, "context": tls}


def _told(error: Exception) -> str:
    """Text of an error, without the address."""
    match error:
        case _NoPassword():
            return str(error)
        case exceptions.AuthenticationError():
            return "Redis refused the credentials"
        case exceptions.BusyLoadingError():
            return "Redis is loading its data"
        case _:
            return "Redis cannot be reached"


def _optional(version: int | None) -> str:
    return "" if version is None else str(version)


def _token(fence: Fence | None) -> str:
    return "" if fence is None else str(fence.token)


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))
