"""Addresses: one form of each, and which holders may be connected to (tickets name them, so any caller chooses them)."""

import re
from ipaddress import ip_address

_HOST_PORT = re.compile(
    r"(?:\[(?P<ipv6>[0-9A-Fa-f:.]{2,45})\]|(?P<host>[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,252})))\:(?P<port>[0-9]{1,5})"
)
_MAX_PORT = 65_535


def why_not_called(address: str, *, beyond_loopback: bool) -> str | None:
    """Why ``address`` is refused, or None if it is allowed.

    Without ``beyond_loopback`` it must be a loopback address or ``localhost``; names are not resolved.
    """
    match = _HOST_PORT.fullmatch(address)
    if match is None or not 0 < int(match["port"]) <= _MAX_PORT:
        return "it is not HOST:PORT"
    host = match["ipv6"] or match["host"]
    try:
        is_loopback = ip_address(host).is_loopback
    except ValueError:
        if match["ipv6"]:
            return "it is not HOST:PORT"
        is_loopback = host.lower() == "localhost"
    return None if is_loopback or beyond_loopback else "it is not a loopback address"


def canonical(address: str) -> str:
    """One form of a valid HOST:PORT: lower case, no leading zeros in the port, the shortest form of an IPv6 address.

    Names are not resolved.
    """
    host, _, port = address.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]").lower()
    try:
        ip = ip_address(bare)
    except ValueError:
        return f"{bare}:{int(port)}"
    return f"[{ip.compressed}]:{int(port)}" if ip.version == 6 else f"{ip}:{int(port)}"


def seen_from(address: str, caller: str) -> str:
    """The HOST:PORT at which others reach what a process says it listens on; empty where none does.

    ``caller`` is the host that the process calls from. It stands for a wildcard address. A loopback address is of that
    host alone, so it is reached only where the caller's is one too.
    """
    host, _, port = address.rpartition(":")
    try:
        ip = ip_address(host.removeprefix("[").removesuffix("]"))
        by = ip_address(caller) if caller else None
        number = int(port)
    except ValueError:
        return ""
    if ip.is_unspecified and by is not None:
        ip = by
    elif ip.is_unspecified or (ip.is_loopback and by is not None and not by.is_loopback):
        return ""
    if not 0 < number <= _MAX_PORT or (ip.is_link_local and ip != by):
        return ""
    return canonical(f"[{ip}]:{number}")
