"""Rules on the URLs that a server may fetch for an untrusted caller, without any network.

A URL's host may be anything: this machine, its neighbours, the cloud's metadata service. So a host must be a plain name
or a plain address, and every address it resolves to must be public.
"""

import re
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from urllib.parse import urljoin, urlsplit

from triptych.errors import InvalidMedia

MAX_URL_CHARS = 8192
DEFAULT_PORTS = {"http": 80, "https": 443}
_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME = re.compile(rf"(?=.{{1,253}}$){_LABEL}(?:\.{_LABEL})*")
# Forms that inet_aton reads as an address (``0x7f.1``, ``0177.0.0.1``, ``2130706433``): names do not end in a number.
_ENDS_IN_NUMBER = re.compile(r"(?:.*\.)?(?:0x[0-9a-f]*|[0-9]+)")
_UNSAFE = re.compile(r"[^\x21-\x7e]|\\")
# Public by registration (all or part of it), but answered by the cloud's host itself.
_METADATA = (IPv4Network("168.63.129.16/32"), IPv4Network("192.0.0.0/24"))
_NAT64 = (IPv6Network("64:ff9b::/96"), IPv6Network("64:ff9b:1::/48"))
_COMPATIBLE = IPv6Network("::/96")


@dataclass(frozen=True, slots=True)
class RemoteUrl:
    """A parsed URL; the connection is made from these parts, so that no second parser can disagree."""

    scheme: str
    host: str
    port: int
    target: str

    @property
    def authority(self) -> str:
        """The value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"

    def join(self, location: str) -> str:
        """The target of a redirect, not checked yet."""
        return urljoin(f"{self.scheme}://{self.authority}{self.target}", location)


@dataclass(frozen=True, slots=True)
class HostRules:
    """Rules on hosts that are fetched from; those that are denied go first."""

    fetch_hosts: tuple[str, ...] = ()
    """The only hosts to fetch from (NAME, or .NAME for its subdomains); empty allows all public hosts."""
    fetch_hosts_denied: tuple[str, ...] = ()
    """Hosts never to fetch from."""
    fetch_hosts_private: tuple[str, ...] = ()
    """Hosts that may have private addresses. All others must be on the public internet."""
    fetch_ports: tuple[int, ...] = (80, 443)
    """Ports to fetch from."""

    def check(self, url: RemoteUrl) -> None:
        """Raises InvalidMedia for a host or port that is not allowed."""
        listed = not self.fetch_hosts or _matches(url.host, (*self.fetch_hosts, *self.fetch_hosts_private))
        if _matches(url.host, self.fetch_hosts_denied) or not listed:
            raise InvalidMedia("the URL's host is not one that is fetched from here")
        if url.port not in self.fetch_ports:
            raise InvalidMedia(f"port {url.port} is not one of {', '.join(map(str, self.fetch_ports))}")

    def may_be_private(self, host: str) -> bool:
        return _matches(host, self.fetch_hosts_private)


def parse_remote_url(url: str) -> RemoteUrl:
    """Parse a URL strictly. Raises InvalidMedia, without repeating the URL, which may contain a secret."""
    if len(url) > MAX_URL_CHARS:
        raise InvalidMedia(f"the URL has {len(url)} characters, the limit is {MAX_URL_CHARS}")
    if _UNSAFE.search(url):
        raise InvalidMedia("the URL has characters that must be percent-encoded")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        raise InvalidMedia("the URL is malformed") from None
    if parts.scheme not in DEFAULT_PORTS:
        raise InvalidMedia("only https:, http: and data: URLs are taken")
    if "@" in parts.netloc:
        raise InvalidMedia("a URL with user name or password is not allowed")
    if port == 0:
        raise InvalidMedia("port 0 is not a port")
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return RemoteUrl(parts.scheme, _host(host, parts.netloc), port or DEFAULT_PORTS[parts.scheme], target)


def _host(host: str, netloc: str) -> str:
    if netloc.startswith("["):
        try:
            address = IPv6Address(host)
        except ValueError:
            address = None
        if address is None or address.scope_id is not None:
            raise InvalidMedia("the URL's host is not an IPv6 address")
        return address.compressed
    if _ENDS_IN_NUMBER.fullmatch(host.removesuffix(".")):
        try:
            return str(IPv4Address(host))
        except ValueError:
            raise InvalidMedia("the URL's host is not an IPv4 address in its usual form") from None
    name = host.removesuffix(".")
    if not _NAME.fullmatch(name):
        raise InvalidMedia("the URL's host is not a host name (international names in their xn-- form)")
    return name


def is_public(address: str) -> bool:
    """Whether an IP address is public, including IPv4 addresses embedded in IPv6."""
    try:
        parsed = ip_address(address)
    except ValueError:
        return False
    if isinstance(parsed, IPv6Address):
        if parsed.scope_id is not None:
            return False
        wrapped = _wrapped(parsed)
        if wrapped is not None:
            return is_public(str(wrapped))
        if parsed.is_site_local:
            return False
    return (
        parsed.is_global
        and not (parsed.is_multicast or parsed.is_reserved or parsed.is_unspecified or parsed.is_link_local)
        and not any(parsed in network for network in _METADATA)
    )


def _wrapped(address: IPv6Address) -> IPv4Address | None:
    """The IPv4 address embedded in this one, where its packets are delivered."""
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address.sixtofour is not None:
        return address.sixtofour
    if address.teredo is not None:
        return address.teredo[1]
    if address in _COMPATIBLE or any(address in network for network in _NAT64):
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return None


def _matches(host: str, patterns: tuple[str, ...]) -> bool:
    return any(host == pattern or (pattern.startswith(".") and host.endswith(pattern)) for pattern in patterns)
