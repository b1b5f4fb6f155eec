"""Fetches an item from an untrusted URL, with limits on everything and never from private networks.

Each redirect is parsed, checked and resolved anew, and the connection goes to the very address that was checked: no
second name lookup (DNS rebinding). TLS still verifies the name. Nothing is taken from the environment, no cookies or
credentials are sent, and no content coding is accepted.
"""

import asyncio
import re
import ssl
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from socket import SOCK_STREAM
from typing import Annotated
from urllib.parse import quote

from httpcore2 import (
    SOCKET_OPTION,
    URL,
    AnyIOBackend,
    AsyncConnectionPool,
    AsyncNetworkBackend,
    AsyncNetworkStream,
    ConnectError,
    NetworkError,
    ProtocolError,
    Response,
    TimeoutException,
    UnsupportedProtocol,
)

from triptych import __version__
from triptych.domain.bounds import Between
from triptych.domain.limits import Positive, PositiveSeconds, check_limits
from triptych.errors import InvalidMedia
from triptych.media.remote_url import HostRules, RemoteUrl, is_public, parse_remote_url

Resolver = Callable[[str, int], Awaitable[Sequence[str]]]
"""(host, port) -> the host's IP addresses; raises OSError."""

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_MAX_ADDRESSES = 3
"""Most addresses of a host that are tried."""
_MAX_LENGTH_DIGITS = 18
_URL_CHARACTERS = "".join(map(chr, range(0x21, 0x7F)))
_USER_AGENT = re.compile(r"(?! )[\x20-\x7e]{0,256}(?<! )")
_PLAIN_CODINGS = frozenset({"", "identity", "aws-chunked"})
"""Content codings that change nothing. ``aws-chunked`` is of an upload to S3, which undoes it but keeps the header."""
_CODING = re.compile(r"[a-z0-9!#$&'*+.^_|~-]{1,32}")


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """Bounds on fetching items."""

    fetch_timeout_s: Annotated[float, Between(0, 600, above=True)] = 10.0
    """Longest time to fetch one item, redirects included."""
    fetch_stall_s: PositiveSeconds = 5.0
    """Longest time without data from a host."""
    fetch_redirects: Annotated[int, Between(0, 20)] = 3
    """Most redirects to follow."""
    fetch_concurrency: Positive = 64
    """Most fetches at the same time; others wait until their timeout."""
    fetch_user_agent: str = f"triptych/{__version__} (media fetcher)"
    """The User-Agent header of fetches, without which some hosts refuse; they may want a contact in it. Empty sends none."""

    def __post_init__(self) -> None:
        check_limits(self)
        if not _USER_AGENT.fullmatch(self.fetch_user_agent):
            raise ValueError("fetch_user_agent has more than 256 characters, or others than printable ASCII")


async def system_resolver(host: str, port: int) -> Sequence[str]:
    """Resolve a name by the operating system."""
    addresses = await asyncio.get_running_loop().getaddrinfo(host, port, type=SOCK_STREAM)
    return list(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in addresses))


@cache
def _trusting_the_system() -> ssl.SSLContext:
    """Reading the system's certificates takes longer than making everything else of a gateway."""
    return ssl.create_default_context()


class Fetcher:
    """Fetches for any number of callers; at most ``limits.max_concurrent`` transfers run, others wait in order."""

    def __init__(
        self,
        rules: HostRules,
        limits: FetchLimits,
        *,
        max_bytes: int,
        resolver: Resolver = system_resolver,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        self._rules = rules
        self._limits = limits
        self._max_bytes = max_bytes
        self._backend = _PinnedBackend(rules, resolver)
        self._ssl_context = ssl_context or _trusting_the_system()
        self._slots = asyncio.Semaphore(limits.fetch_concurrency)

    async def fetch(self, url: str, took: Callable[[int], None] = lambda _: None) -> bytes:
        """Return the bytes at ``url``. ``took`` is called with the size of each piece before it is kept, and may raise.

        Raises InvalidMedia for every failure: a bad URL is its sender's fault.
        """
        try:
            async with asyncio.timeout(self._limits.fetch_timeout_s), self._slots:
                return await self._follow(parse_remote_url(url), took)
        except TimeoutError:
            raise InvalidMedia(f"the URL was not fetched within {self._limits.fetch_timeout_s:g} s") from None
        except TimeoutException:
            raise InvalidMedia(f"the URL's host kept silent for {self._limits.fetch_stall_s:g} s") from None
        except ConnectError:
            raise InvalidMedia("the URL's host cannot be connected to") from None
        except (NetworkError, ProtocolError, UnsupportedProtocol):
            raise InvalidMedia("the URL's host broke off its answer, or does not speak HTTP") from None

    async def _follow(self, url: RemoteUrl, took: Callable[[int], None]) -> bytes:
        for _ in range(self._limits.fetch_redirects + 1):
            hop = await self._hop(url, took)
            if isinstance(hop, bytes):
                return hop
            if url.scheme == "https" and hop.scheme != "https":
                raise InvalidMedia("the URL redirects from https to http")
            url = hop
        raise InvalidMedia(f"the URL redirects more than {self._limits.fetch_redirects} times")

    async def _hop(self, url: RemoteUrl, took: Callable[[int], None]) -> bytes | RemoteUrl:
        """One request: the bytes, or the URL of a redirect."""
        self._rules.check(url)
        timeouts = dict.fromkeys(("connect", "read", "write", "pool"), self._limits.fetch_stall_s)
        headers = [("Host", url.authority), ("Accept", "*/*"), ("Accept-Encoding", "identity"), ("Connection", "close")]
        if self._limits.fetch_user_agent:
            headers.append(("User-Agent", self._limits.fetch_user_agent))
        # One connection per hop, so that none outlives the check of its address.
        async with (
            AsyncConnectionPool(self._ssl_context, max_connections=1, network_backend=self._backend) as pool,
            pool.stream(
                "GET",
                URL(scheme=url.scheme, host=url.host, port=url.port, target=url.target),
                headers=headers,
                extensions={"timeout": timeouts},
            ) as response,
        ):
            if response.status in _REDIRECTS:
                # Hosts write other characters than ASCII as they are, mostly in UTF-8; browsers encode them.
                location = quote(_header(response, b"location").encode("latin-1"), safe=_URL_CHARACTERS)
                return parse_remote_url(url.join(location))
            if response.status != 200:
                raise InvalidMedia(f"the URL's host answers with status {response.status}")
            return await self._body(response, took)

    async def _body(self, response: Response, took: Callable[[int], None]) -> bytes:
        for coding in _codings(response):
            if coding not in _PLAIN_CODINGS:
                name = coding if _CODING.fullmatch(coding) else "of an odd name"
                raise InvalidMedia(f"the URL's host answers in the content coding {name}, which was not asked for")
        limit = self._max_bytes
        announced = _header(response, b"content-length")
        if announced.isdigit() and (len(announced) > _MAX_LENGTH_DIGITS or int(announced) > limit):
            raise InvalidMedia(f"what is at the URL is larger than {limit} bytes, which is the limit")
        data = bytearray()
        async for piece in response.aiter_stream():
            if len(data) + len(piece) > limit:
                raise InvalidMedia(f"what is at the URL is larger than {limit} bytes, which is the limit")
            took(len(piece))
            data += piece
        if not data:
            raise InvalidMedia("there is nothing at the URL")
        return bytes(data)


def _codings(response: Response) -> list[str]:
    """The content codings of an answer, in lower case."""
    values = [value.decode("latin-1").lower() for key, value in response.headers if key.lower() == b"content-encoding"]
    return [coding.strip() for coding in ",".join(values).split(",")]


def _header(response: Response, name: bytes) -> str:
    """The header's only value, or ""."""
    return next((value.decode("latin-1") for key, value in response.headers if key.lower() == name), "")


class _PinnedBackend(AsyncNetworkBackend):
    """Resolves a name, checks all its addresses, and connects to one of them; TLS still verifies the name."""

    def __init__(self, rules: HostRules, resolver: Resolver) -> None:
        self._rules = rules
        self._resolver = resolver
        self._network = AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109  the base class has it so
        local_address: str | None = None,
        socket_options: Iterable[SOCKET_OPTION] | None = None,
    ) -> AsyncNetworkStream:
        """Raises InvalidMedia unless all addresses are allowed, ConnectError when none accepts."""
        try:
            addresses = await self._resolver(host, port)
        except (OSError, UnicodeError):
            addresses = ()
        # Unresolvable and private names get the same answer, which reveals nothing of the network.
        allowed = self._rules.may_be_private(host) or all(is_public(address) for address in addresses)
        if not addresses or not allowed:
            raise InvalidMedia("the URL's host does not resolve to a public address")
        for address in addresses[:_MAX_ADDRESSES]:
            try:
                return await self._network.connect_tcp(address, port, timeout, local_address, socket_options)
            except (ConnectError, TimeoutException):
                continue
        raise ConnectError("no address of the host takes connections")
