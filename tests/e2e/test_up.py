"""``triptych up`` on a terminal, with real services: its listening ports, and cleanup when the terminal closes."""

import os
import re
import socket
import sys
from ipaddress import ip_address
from pathlib import Path

import psutil

from tests.unit.cli.closing_terminal import Terminal

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "triptych.cli", "up", "--roles", "E:1,PD:1", "--port", "0", "--router-port", "0"]


def listens_on(process: psutil.Process) -> set[tuple[str, int]]:
    found = set()
    for connection in process.net_connections("inet"):
        if connection.status == psutil.CONN_LISTEN:
            found.add((connection.laddr.ip.removeprefix("::ffff:"), connection.laddr.port))
    return found


def test_a_cluster_listens_on_loopback_only_and_ends_with_its_terminal(tmp_path: Path) -> None:
    env = {**os.environ, "TMPDIR": str(tmp_path), "COLUMNS": "200", "TERM": "xterm"}  # noqa: TID251
    with Terminal(COMMAND, cwd=ROOT, env=env) as terminal:
        terminal.read_until("Ctrl-C stops")
        assert re.search(r"encoder-1 +ready after", terminal.shown)
        services = psutil.Process(terminal.process.pid).children()
        assert len(services) == 5
        children = terminal.children()  # including the decoder processes of the encoder
        listening = {address for child in children for address in listens_on(child)}
        assert len(listening) >= 10, "a port and an admin port each"
        assert {ip for ip, _ in listening if not ip_address(ip).is_loopback} == set()
        mapped = {Path(memory_map.path) for child in children for memory_map in child.memory_maps()}
        terminal.close()
        assert terminal.process.wait(240) == 0
    assert not any(child.is_running() for child in children)
    left = [path.name for path in tmp_path.iterdir() if not path.name.startswith("torchinductor_")]
    assert left == [], "except torch's per-user cache"
    assert [path for path in mapped if path.is_relative_to("/dev/shm") and path.exists()] == []  # noqa: S108
    for ip, port in listening:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((ip, port))
