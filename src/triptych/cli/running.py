"""Notes of the clusters that ``triptych up`` runs on this machine, for ``triptych status`` of the same user.

A note is only a hint: its reader asks the processes for their pids, so a stale note of a killed cluster matches none.
"""

import asyncio
import contextlib
import json
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx

from triptych.cli.cluster import LocalCluster
from triptych.files import read_json

_HOSTS = frozenset({"127.0.0.1", "localhost"})
_TIMEOUT_S = 1.0
_MAX_NOTE_NBYTES = 1 << 16


@contextlib.contextmanager
def noted(cluster: LocalCluster) -> Iterator[None]:
    """Lets ``triptych status`` find the cluster's admin ports in the body, also of processes that are started there.

    A note that cannot be written is skipped.
    """
    path = _path(httpx.URL(cluster.url).port)
    ours = False
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, exist_ok=True)
        if _is_private(path.parent):
            _write(path, cluster)
            ours = True
            cluster.on_change = lambda: _write(path, cluster)
    try:
        yield
    finally:
        cluster.on_change = lambda: None
        if ours:
            with contextlib.suppress(OSError):
                path.unlink()
                path.parent.rmdir()


def _write(path: Path, cluster: LocalCluster) -> None:
    admin_urls = cluster.admin_urls
    targets = cluster.targets
    running = {
        name: {"pid": pid, "admin": admin_urls[name], "address": targets[name]}
        for name, pid in cluster.processes.items()
    }
    with contextlib.suppress(OSError):
        path.write_text(json.dumps(running))


@dataclass(frozen=True, slots=True)
class Process:
    """A running process of a local cluster."""

    pid: int
    admin: str
    """Base URL of its admin port."""
    address: str
    """``host:port`` of its service."""


async def find(url: str, http: httpx.AsyncClient) -> Mapping[str, Process]:
    """The processes, by name, of the local cluster whose gateway is at ``url``; empty if there is none."""
    parsed = httpx.URL(url)
    if parsed.host not in _HOSTS:
        return {}
    noted_processes = _read(_path(parsed.port))
    answers = await asyncio.gather(*(_is(http, process.admin, process.pid) for process in noted_processes.values()))
    return {name: process for (name, process), is_it in zip(noted_processes.items(), answers, strict=True) if is_it}


def _path(port: int | None) -> Path:
    return Path(tempfile.gettempdir()) / f"triptych-up-{os.getuid()}" / f"{port}.json"


def _is_private(directory: Path) -> bool:
    """The directory for temporary files is shared by all users, so this one must be owned by the user."""
    status = directory.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077


def _read(path: Path) -> dict[str, Process]:
    try:
        if not _is_private(path.parent):
            return {}
        document = read_json(path, _MAX_NOTE_NBYTES)
        return {
            str(name): Process(int(process["pid"]), str(process["admin"]), str(process["address"]))
            for name, process in document.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


async def _is(http: httpx.AsyncClient, admin: str, pid: int) -> bool:
    try:
        return bool((await http.get(f"{admin}/ready", timeout=_TIMEOUT_S)).json()["pid"] == pid)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError):
        return False
