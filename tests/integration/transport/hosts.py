"""Two network namespaces with a virtual cable in place of two hosts, and faults of the cable."""

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass

_NAME = "triptych"
_ADDRESSES = ("198.18.77.1", "198.18.77.2")
"""Of the range that RFC 2544 sets aside for tests; nothing outside the two namespaces sees them."""
_COMMAND_S = 10.0


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=_COMMAND_S, check=False)
    if done.returncode != 0:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


@dataclass(frozen=True)
class Host:
    namespace: str
    interface: str
    address: str

    @property
    def prefix(self) -> tuple[str, ...]:
        """Put before a command, runs it on this host."""
        return ("ip", "netns", "exec", self.namespace)

    def run(self, *words: str) -> None:
        _run(*self.prefix, *words)


@dataclass(frozen=True)
class Cable:
    """The link between ``a``, the holder, and ``b``, the reader."""

    a: Host
    b: Host

    def cut(self) -> None:
        self.a.run("ip", "link", "set", self.a.interface, "down")

    def deaf(self, host: Host) -> None:
        """Silently drop all packets to ``host``; those it sends still arrive."""
        host.run("iptables", "-A", "INPUT", "-i", host.interface, "-j", "DROP")

    def reset(self, host: Host) -> None:
        """Answers every connection of ``host`` with a reset."""
        rule = ("-i", host.interface, "-p", "tcp", "-j", "REJECT", "--reject-with", "tcp-reset")
        host.run("iptables", "-A", "INPUT", *rule)

    def slow(self, host: Host, *, mbit_per_s: int) -> None:
        """Limits the rate at which ``host`` sends. Raises OSError where the kernel does not support it."""
        rate = ("rate", f"{mbit_per_s}mbit", "burst", "128kbit", "latency", "100ms")
        host.run("tc", "qdisc", "replace", "dev", host.interface, "root", "tbf", *rate)

    def heal(self) -> None:
        for host in (self.a, self.b):
            host.run("iptables", "-F", "INPUT")
            host.run("ip", "link", "set", host.interface, "up")


@functools.cache
def why_not() -> str:
    """The reason why namespaces are not available; empty if they are."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [word for word in ("ip", "iptables") if shutil.which(word) is None]
    if missing:
        return f"{' and '.join(missing)} not found: install iproute2 and iptables"
    try:
        with hosts():
            return ""
    except OSError as error:
        return f"no network namespaces here: {error}"


@contextlib.contextmanager
def hosts() -> Iterator[Cable]:
    """A cable between two hosts. They and all processes in them are removed at the end."""
    _remove_stale()
    ends = [
        Host(f"{_NAME}-{os.getpid()}-{side}", f"tript-{side}", address)
        for side, address in zip("ab", _ADDRESSES, strict=True)
    ]
    a, b = ends
    try:
        for host in ends:
            _run("ip", "netns", "add", host.namespace)
        _run(
            *("ip", "link", "add", a.interface, "netns", a.namespace, "type", "veth"),
            *("peer", "name", b.interface, "netns", b.namespace),
        )
        for host in ends:
            _run("ip", "-n", host.namespace, "addr", "add", f"{host.address}/30", "dev", host.interface)
            _run("ip", "-n", host.namespace, "link", "set", "lo", "up")
            _run("ip", "-n", host.namespace, "link", "set", host.interface, "up")
            host.run("iptables", "-L", "-n")
        yield Cable(a, b)
    finally:
        for host in ends:
            _remove(host.namespace)


def _remove(namespace: str) -> None:
    """Removes it with all its processes; it need not exist."""
    with contextlib.suppress(OSError):
        for pid in _run("ip", "netns", "pids", namespace).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        deadline_s = time.monotonic() + _COMMAND_S  # noqa: TID251 - no event loop here
        while _run("ip", "netns", "pids", namespace) and time.monotonic() < deadline_s:  # noqa: TID251
            time.sleep(0.02)
        _run("ip", "netns", "del", namespace)


def _remove_stale() -> None:
    """Removes namespaces of a test run that was killed."""
    for line in _run("ip", "netns", "list").splitlines():
        name = line.split()[0] if line else ""
        owner = name.split("-")[1] if name.startswith(f"{_NAME}-") else ""
        if owner.isdigit() and not os.path.exists(f"/proc/{owner}"):  # noqa: PTH110
            _remove(name)
