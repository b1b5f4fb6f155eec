"""API keys: a file of hashes, limits per key, and a limit on failed attempts.

A key is 256 random bits, so a single SHA-256 is enough: it cannot be guessed, so no slow password hash is needed.
``python -m services.gateway.keys new NAME`` makes a key.
"""

import hashlib
import hmac
import re
import secrets
import sys
import tomllib
from collections import OrderedDict, deque
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from triptych.domain.tenant import NOBODY, WEIGHT, Tenant
from triptych.errors import RateLimited, Unauthenticated
from triptych.ports import Clock

KEY_PREFIX = "tt-"
MAX_KEYS = 10_000
MAX_FAILURES = 10
"""Failures of one source within ``WINDOW_S``; further ones are answered 429."""
WINDOW_S = 60.0
_MAX_SOURCES = 10_000
_MAX_KEY_CHARS = 512
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)
_BUSY_RETRY_S = 1.0


class KeyEntry(BaseModel):
    """An entry ``[keys.NAME]`` of the key file. A limit left out does not apply."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    weight: float = Field(default=1.0, ge=WEIGHT.low, le=WEIGHT.high)
    """Share of the service beside other keys, when all want more than there is."""
    requests_per_minute: int | None = Field(default=None, ge=1)
    tokens_per_minute: int | None = Field(default=None, ge=1)
    concurrent: int | None = Field(default=None, ge=1)


class _KeyFile(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    keys: dict[str, KeyEntry] = Field(min_length=1, max_length=MAX_KEYS)


class Bucket:
    """A token bucket of ``per_minute``, full at first. It may go into debt, which refilling pays back."""

    def __init__(self, per_minute: int, clock: Clock) -> None:
        self._per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._at_s = clock()

    def wait_s(self) -> float:
        """Seconds until one token is available; 0 if one is."""
        now_s = self._clock()
        self._level = min(self._per_minute, self._level + (now_s - self._at_s) * self._per_minute / 60)
        self._at_s = now_s
        return max(0.0, (1 - self._level) * 60 / self._per_minute)

    def take(self, count: int) -> None:
        self.wait_s()
        self._level -= count


class Caller:
    """The sender of a request, and what is left of its limits."""

    def __init__(self, name: str, entry: KeyEntry | None, clock: Clock) -> None:
        self.name = name
        """The key's name; empty without keys."""
        self.tenant = Tenant(name, entry.weight) if entry else NOBODY
        self._concurrent = entry.concurrent if entry else None
        self._requests = Bucket(entry.requests_per_minute, clock) if entry and entry.requests_per_minute else None
        self._tokens = Bucket(entry.tokens_per_minute, clock) if entry and entry.tokens_per_minute else None
        self._running = 0

    @contextmanager
    def request(self) -> Generator[None]:
        """Hold one request under this key's limits. Raises RateLimited."""
        if self._concurrent is not None and self._running >= self._concurrent:
            raise RateLimited(
                f"{self._running} requests of this key are running, the limit is {self._concurrent}",
                retry_after_s=_BUSY_RETRY_S,
            )
        for bucket, what in ((self._tokens, "tokens"), (self._requests, "requests")):
            if bucket is not None and (wait_s := bucket.wait_s()) > 0:
                raise RateLimited(f"this key has no {what} left in this minute", retry_after_s=wait_s)
        if self._requests is not None:
            self._requests.take(1)
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1

    @property
    def has_token_limit(self) -> bool:
        return self._tokens is not None

    def charge(self, tokens: int) -> None:
        """Charge tokens once they are spent; later requests wait for a debt to be refilled."""
        if self._tokens is not None:
            self._tokens.take(tokens)


class Failures:
    """Times of each source's recent failures. The source whose last failure is oldest is forgotten first."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._times: OrderedDict[str, deque[float]] = OrderedDict()

    def add(self, source: str) -> float:
        """Record a failure. Returns the seconds until this source may fail again, or 0 while it may."""
        now_s = self._clock()
        times = self._times.setdefault(source, deque(maxlen=MAX_FAILURES))
        self._times.move_to_end(source)
        if len(self._times) > _MAX_SOURCES:
            self._times.popitem(last=False)
        if len(times) == MAX_FAILURES and now_s - times[0] < WINDOW_S:
            return WINDOW_S - (now_s - times[0])
        times.append(now_s)
        return 0.0


class KeyRing:
    """All keys and their callers. Without entries every request comes from one caller without limits."""

    def __init__(self, entries: dict[str, KeyEntry], clock: Clock) -> None:
        self._callers = [(bytes.fromhex(entry.sha256), Caller(name, entry, clock)) for name, entry in entries.items()]
        self._anyone = None if entries else Caller("", None, clock)
        self._failures = Failures(clock)

    @classmethod
    def load(cls, path: Path | None, clock: Clock) -> Self:
        """Raises ValueError that says what is wrong with the file."""
        return cls({} if path is None else read_key_file(path), clock)

    def caller(self, authorizations: Iterable[str], source: str) -> Caller:
        """The caller, from the Authorization headers. Raises Unauthenticated, or RateLimited after many failures.

        A source that failed too often still gets in with a valid key: behind a proxy all clients share one source, and
        a 256-bit key cannot be found by trial.
        """
        if self._anyone is not None:
            return self._anyone
        caller = self._find(list(authorizations))
        if caller is not None:
            return caller
        if (wait_s := self._failures.add(source)) > 0:
            raise RateLimited("too many requests without a valid API key", retry_after_s=wait_s)
        raise Unauthenticated("a valid API key is needed: send it as 'Authorization: Bearer KEY'")

    def _find(self, authorizations: list[str]) -> Caller | None:
        if len(authorizations) != 1 or len(authorizations[0]) > _MAX_KEY_CHARS:
            return None
        scheme, _, key = authorizations[0].partition(" ")
        if scheme.lower() != "bearer":
            return None
        given = key_digest(key.strip())
        found = None
        for digest, caller in self._callers:  # compare all: the time must not depend on the position
            if hmac.compare_digest(digest, given):
                found = caller
        return found


def key_digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def read_key_file(path: Path) -> dict[str, KeyEntry]:
    """Raises ValueError that says what is wrong with the file."""
    try:
        with path.open("rb") as file:
            entries = _KeyFile.model_validate(tomllib.load(file)).keys
    except OSError as error:
        raise ValueError(f"cannot read the keys in {path}: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not TOML: {error}") from None
    except ValidationError as error:
        detail = error.errors(include_input=False)[0]
        raise ValueError(f"{path}: {'.'.join(map(str, detail['loc']))}: {detail['msg']}") from None
    if wrong := next((name for name in entries if not _NAME.fullmatch(name)), None):
        raise ValueError(f"{path}: a key's name has 1 to 64 of A-Z a-z 0-9 . _ -, not {wrong!r}")
    if len({entry.sha256 for entry in entries.values()}) < len(entries):
        raise ValueError(f"{path}: two names have the same key")
    return entries


def new_key(name: str) -> tuple[str, str]:
    """A new key, and the lines to add to the key file. Raises ValueError for an invalid name."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"a key's name has 1 to 64 of A-Z a-z 0-9 . _ -, not {name!r}")
    key = KEY_PREFIX + secrets.token_urlsafe(32)
    return key, f'[keys."{name}"]\nsha256 = "{key_digest(key).hex()}"\n'


def main(argv: list[str]) -> int:
    """``new NAME``: writes the key to stderr, and the lines for the file to stdout."""
    if len(argv) != 2 or argv[0] != "new":
        sys.stderr.write("usage: python -m services.gateway.keys new NAME >> KEYFILE\n")
        return 2
    try:
        key, lines = new_key(argv[1])
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stderr.write(f"{key}\n")
    sys.stdout.write(lines)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
