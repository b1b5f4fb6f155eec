"""API keys: a file of hashes, limits per key, and a limit on failed attempts.

A key is 256 random bits, so a single SHA-256 is enough: it cannot be guessed, so no slow password hash is needed.
``python -m triptych.services.gateway.keys new NAME`` makes a key.
"""

import hashlib
import hmac
import re
import secrets
import sys
from collections import OrderedDict, deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from triptych.domain.chat import PRIORITY
from triptych.domain.tenant import NOBODY, WEIGHT, Tenant
from triptych.errors import InvalidRequest, RateLimited, Unauthenticated
from triptych.files import BadFile, read_toml
from triptych.ports import Clock

KEY_PREFIX = "tt-"
MAX_KEYS = 10_000
MAX_FAILURES = 10
"""Failures of one source within ``WINDOW_S``; further ones are answered 429."""
WINDOW_S = 60.0
_MAX_SOURCES = 10_000
_MAX_KEY_CHARS = 512
_MAX_FILE_NBYTES = 16 << 20
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)
_BUSY_RETRY_S = 1.0
"""Least Retry-After when too many requests of a key run."""
_NEWEST = 0.1
"""Weight of the newest request in the mean time of a key's requests."""


_Limit = Annotated[int, Field(ge=1, le=2**53)]
"""Buckets count in floats."""


class KeyEntry(BaseModel):
    """An entry ``[keys.NAME]`` of the key file. A limit left out does not apply."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    weight: float = Field(default=1.0, ge=WEIGHT.low, le=WEIGHT.high)
    """Share of the service beside other keys, when all want more than there is."""
    requests_per_minute: _Limit | None = None
    tokens_per_minute: _Limit | None = None
    items_per_minute: _Limit | None = None
    """Images, videos and audio clips."""
    concurrent: _Limit | None = None
    least_priority: int | None = Field(default=None, ge=int(PRIORITY.low), le=int(PRIORITY.high))
    """The lowest ``priority`` that its requests may have, as lower ones go first."""
    operator: bool = False
    """Whether it may change what is served: load and unload LoRA adapters."""


class _KeyFile(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    keys: dict[str, KeyEntry] = Field(min_length=1, max_length=MAX_KEYS)


class Bucket:
    """A token bucket of ``per_minute``, full at first. It may go into debt, which refilling pays back."""

    def __init__(self, per_minute: int, clock: Clock) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._at_s = clock()
        self._told_s = 0.0
        """Time that the last refused request was given to come back."""

    @property
    def left(self) -> int:
        """Whole tokens that are available; 0 in debt."""
        self._refill()
        return max(0, int(self._level))

    @property
    def full_in_s(self) -> float:
        self._refill()
        return (self.per_minute - self._level) * 60 / self.per_minute

    def wait_s(self, count: int = 1) -> float:
        """Seconds until ``count`` tokens are available; 0 if they are."""
        self._refill()
        return max(0.0, (count - self._level) * 60 / self.per_minute)

    def refuse_s(self, count: int = 1) -> float:
        """Wait for ``count`` tokens, seconds. A request that was refused before comes back first, within a minute."""
        now_s, takes_s = self._clock(), count * 60 / self.per_minute
        wait_s = self.wait_s(count)
        self._told_s = max(now_s + wait_s, min(self._told_s + takes_s, now_s + wait_s + 60.0))
        return self._told_s - now_s

    def take(self, count: int) -> None:
        self._refill()
        self._level -= count

    def _refill(self) -> None:
        now_s = self._clock()
        self._level = min(self.per_minute, self._level + (now_s - self._at_s) * self.per_minute / 60)
        self._at_s = now_s


class Caller:
    """The sender of a request, and what is left of its limits."""

    def __init__(self, name: str, entry: KeyEntry | None, clock: Clock) -> None:
        self.name = name
        """The key's name; empty without keys."""
        self.is_operator = entry is not None and entry.operator
        """Whether the key may change what is served."""
        self.tenant = Tenant(name, entry.weight) if entry else NOBODY
        self._clock = clock
        self._concurrent = entry.concurrent if entry else None
        self._least_priority = entry.least_priority if entry else None
        self._buckets: dict[str, Bucket] = {}
        """Buckets by the unit that they limit."""
        if entry is not None:
            limits = {
                "tokens": entry.tokens_per_minute,
                "requests": entry.requests_per_minute,
                "items": entry.items_per_minute,
            }
            self._buckets = {unit: Bucket(limit, clock) for unit, limit in limits.items() if limit is not None}
        self.is_limited = bool(self._buckets)
        """Whether it has a limit per minute."""
        self._running = 0
        self._mean_s = 0.0
        """Mean time that its requests take, seconds."""

    @contextmanager
    def request(self) -> Generator[None]:
        """Hold one request under this key's limits. Raises RateLimited."""
        if self._concurrent is not None and self._running >= self._concurrent:
            raise RateLimited(
                f"{self._running} requests of this key are running, the limit is {self._concurrent}",
                retry_after_s=max(_BUSY_RETRY_S, self._mean_s / self._running),
            )
        for unit in ("tokens", "requests") if self.is_limited else ():
            self._check(unit, 1)
        if (requests := self._buckets.get("requests")) is not None:
            requests.take(1)
        self._running += 1
        began_s = self._clock()
        try:
            yield
        finally:
            self._running -= 1
            self._mean_s += _NEWEST * (self._clock() - began_s - self._mean_s)

    def _check(self, unit: str, count: int) -> None:
        bucket = self._buckets.get(unit)
        if bucket is not None and bucket.wait_s(count) > 0:
            raise RateLimited(f"this key has no {unit} left in this minute", retry_after_s=bucket.refuse_s(count))

    def take_items(self, count: int) -> None:
        """Charge a request's images, videos and audio. Raises RateLimited, or InvalidRequest if it can never be allowed."""
        bucket = self._buckets.get("items")
        if bucket is None or not count:
            return
        if count > bucket.per_minute:
            raise InvalidRequest(
                f"the request has {count} images, videos and audio clips, this key may send {bucket.per_minute} per minute",
                param="messages",
            )
        self._check("items", count)
        bucket.take(count)

    def check_priority(self, priority: int) -> None:
        """Raises InvalidRequest if this key may not go first by as much."""
        if self._least_priority is not None and priority < self._least_priority:
            raise InvalidRequest(
                f"priority is {priority}, this key may use {self._least_priority} or more", param="priority"
            )

    def allowed_priority(self, wanted: int) -> int:
        """The priority that is nearest to the wanted one and allowed."""
        return wanted if self._least_priority is None else max(wanted, self._least_priority)

    @property
    def has_token_limit(self) -> bool:
        return "tokens" in self._buckets

    def charge(self, tokens: int) -> None:
        """Charge tokens once they are spent; later requests wait for a debt to be refilled."""
        if (bucket := self._buckets.get("tokens")) is not None:
            bucket.take(tokens)

    def headers(self) -> Iterator[tuple[str, str]]:
        """Headers on what is left of its limits per minute, as OpenAI names them."""
        for unit, bucket in self._buckets.items():
            yield f"x-ratelimit-limit-{unit}", str(bucket.per_minute)
            yield f"x-ratelimit-remaining-{unit}", str(bucket.left)
            yield f"x-ratelimit-reset-{unit}", f"{bucket.full_in_s:.3f}s"


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
    """Keys and their callers. Without entries every request comes from one caller without limits."""

    def __init__(self, entries: dict[str, KeyEntry], clock: Clock) -> None:
        self._callers = [(bytes.fromhex(entry.sha256), Caller(name, entry, clock)) for name, entry in entries.items()]
        self._anyone = None if entries else Caller("", None, clock)
        self._failures = Failures(clock)

    @property
    def count(self) -> int:
        return len(self._callers)

    @classmethod
    def load(cls, path: Path | None, clock: Clock) -> Self:
        """Raises ValueError that says what is wrong with the file."""
        return cls({} if path is None else read_key_file(path), clock)

    def caller(self, authorizations: Iterable[str], source: str) -> Caller:
        """The caller, from the Authorization headers. Raises Unauthenticated, or RateLimited after many failures.

        A source that failed too often still gets in with a valid key: behind a proxy all clients share one source, and
        a 256-bit key cannot be found by trial.
        """
        caller = self.find(list(authorizations))
        if caller is not None:
            return caller
        if (wait_s := self._failures.add(source)) > 0:
            raise RateLimited("too many requests without a valid API key", retry_after_s=wait_s)
        raise Unauthenticated("a valid API key is needed: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'")

    def find(self, authorizations: Sequence[str]) -> Caller | None:
        """The caller; None without a valid key, which is not counted as a failure."""
        if self._anyone is not None:
            return self._anyone
        if len(authorizations) != 1 or len(authorizations[0]) > _MAX_KEY_CHARS:
            return None
        scheme, _, key = authorizations[0].partition(" ")
        if scheme.lower() != "bearer":
            return None
        given = key_digest(key.strip())
        caller_found = None
        for digest, caller in self._callers:  # compare all: the time must not depend on the position
            if hmac.compare_digest(digest, given):
                caller_found = caller
        return caller_found


def key_digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def read_key_file(path: Path) -> dict[str, KeyEntry]:
    """Raises ValueError that says what is wrong with the file."""
    try:
        entries = _KeyFile.model_validate(read_toml(path, _MAX_FILE_NBYTES)).keys
    except BadFile as error:
        raise ValueError(f"the file of keys {path} {error}") from None
    except ValidationError as error:
        detail = error.errors(include_input=False)[0]
        raise ValueError(f"{path}: {'.'.join(map(str, detail['loc']))}: {detail['msg']}") from None
    if (wrong := next((name for name in entries if not _NAME.fullmatch(name)), None)) is not None:
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
        sys.stderr.write("usage: python -m triptych.services.gateway.keys new NAME >> KEYFILE\n")
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
