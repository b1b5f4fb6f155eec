"""``triptych up`` as a process: closed terminals, taken ports, files left behind."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from tests.unit.cli.closing_terminal import Terminal
from tests.unit.cli.foreign_server import foreign_server
from triptych.cli.placement import fair_threads

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]
FREE = ("--port", "0", "--router-port", "0")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "tests.unit.cli.up_with_stubs", "up", "--roles", "E:1,PD:1", *arguments]


def environment(tmp_path: Path) -> dict[str, str]:
    """The stubs report a ready cluster; temporary files go below the test's directory."""
    instances = {"TRIPTYCH_STUB_INSTANCES": "encoder-1,text-1"}
    return {**os.environ, "TMPDIR": str(tmp_path), "COLUMNS": "200", "TERM": "xterm", **instances}  # noqa: TID251


@pytest.mark.timeout(60)
@pytest.mark.parametrize("view", ["--live", "--no-live"])
@pytest.mark.parametrize("repeat", [False, True], ids=["by the system", "by the shell, too"])
def test_closing_the_terminal_stops_the_cluster_in_order(tmp_path: Path, view: str, *, repeat: bool) -> None:
    logs = tmp_path / "logs"
    with Terminal(command(*FREE, view, "--log-dir", str(logs)), cwd=ROOT, env=environment(tmp_path)) as terminal:
        terminal.read_until("Ctrl-C stops" if view == "--live" else "try:")
        children = terminal.children()
        assert len(children) == 5
        ports = [connection.laddr.port for child in children for connection in child.net_connections("tcp4")]
        assert ports
        terminal.close()
        if repeat:
            terminal.process.send_signal(signal.SIGHUP)
        assert terminal.process.wait(60) == 0
    assert not any(child.is_running() for child in children)
    assert {path.name for path in tmp_path.iterdir()} == {"logs"}
    for port in ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))


def started(process: "subprocess.Popen[str]") -> str:
    """What ``up`` has shown when its cluster is ready."""
    assert process.stdout is not None
    shown = ""
    while "try:" not in shown:
        line = process.stdout.readline()
        assert line, shown
        shown += line
    return shown


@pytest.mark.timeout(60)
def test_nohup_keeps_the_cluster_when_the_terminal_closes(tmp_path: Path) -> None:
    with subprocess.Popen(
        ["nohup", *command(*FREE, "--no-live")],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env=environment(tmp_path),
        text=True,
        start_new_session=True,
    ) as process:
        url = started(process).rsplit("--url ", 1)[1].strip()
        children = psutil.Process(process.pid).children()
        os.killpg(process.pid, signal.SIGHUP)
        assert len(children) == 5
        assert len(status(tmp_path, url)["admin"]) == 5
        assert all(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


@pytest.mark.timeout(60)
def test_settings_in_the_environment_that_have_no_effect_are_said(tmp_path: Path) -> None:
    told = {
        "TRIPTYCH_GATEWAY_HOST": "0.0.0.0",
        "TRIPTYCH_ROUTER_PORT": "50051",
        "triptych_text_torch_threads": "7",
        "TRIPTYCH_TEXT_LOG_LEVEL": "DEBUG",
        "TRIPTYCH_ENCODER_HOST": "127.0.0.1",
    }
    with subprocess.Popen(
        command(*FREE, "--no-live", "--mount-router", "--threads", "1"),
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**environment(tmp_path), **told},
        text=True,
    ) as process:
        shown = started(process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert "TRIPTYCH_GATEWAY_HOST has no effect on a local cluster, which sets 127.0.0.1\n" in shown
    assert "TRIPTYCH_ROUTER_PORT has no effect on a local cluster, which sets " in shown
    assert "triptych_text_torch_threads has no effect on a local cluster, which sets 1\n" in shown
    assert shown.count("has no effect") == 3, "a setting that is used, or has the same value, is not mentioned"


def status(tmp_path: Path, url: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "triptych.cli", "status", "--json", "--url", url],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return cast("dict[str, Any]", json.loads(done.stdout))


@pytest.mark.timeout(60)
def test_status_finds_the_admin_ports_of_local_clusters_only(tmp_path: Path) -> None:
    with subprocess.Popen(
        command(*FREE, "--no-live"), stdout=subprocess.PIPE, cwd=ROOT, env=environment(tmp_path), text=True
    ) as process:
        shown = started(process)
        url = shown.rsplit("--url ", 1)[1].strip()
        found = status(tmp_path, url)["admin"]
        assert list(found) == ["pool-manager", "encoder-1", "text-1", "router", "gateway"]
        assert all(f"{admin}/metrics" in shown for admin in found.values())
        (note,) = tmp_path.glob("triptych-up-*/*.json")
        copy = json.loads(note.read_text())
        note.write_text(json.dumps({**copy, "router": {**copy["router"], "pid": 1}}))
        assert list(status(tmp_path, url)["admin"]) == ["pool-manager", "encoder-1", "text-1", "gateway"], (
            "another pid is another process"
        )
        note.write_text("{")
        assert status(tmp_path, url)["admin"] == {}
        note.write_text(json.dumps(copy))
        note.parent.chmod(0o755)
        assert status(tmp_path, url)["admin"] == {}, "others could have written it"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("processes", "cores", "grows", "threads"),
    [(1, 2, False, 2), (2, 2, False, 1), (3, 2, False, 1), (3, 16, False, 5), (1, 16, True, 1)],
)
def test_cores_are_divided_among_processes(processes: int, cores: int, *, grows: bool, threads: int) -> None:
    assert fair_threads(processes, cores, grows=grows) == threads


@pytest.mark.timeout(60)
def test_more_threads_than_cores_are_said(tmp_path: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    with subprocess.Popen(
        command(*FREE, "--no-live", "--threads", str(cores)),
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env=environment(tmp_path),
        text=True,
    ) as process:
        shown = started(process)
        told = [child.cmdline() for child in psutil.Process(process.pid).children()]
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    if cores > 1:
        assert f"2 processes with {cores} threads each share {cores} cores" in shown
    assert [line[line.index("--torch-threads") + 1] for line in told if "--torch-threads" in line] == [str(cores)] * 2


@pytest.mark.timeout(60)
def test_a_closed_output_pipe_does_not_stop_the_cluster(tmp_path: Path) -> None:
    with subprocess.Popen(
        command(*FREE, "--no-live"), stdout=subprocess.PIPE, cwd=ROOT, env=environment(tmp_path), text=True
    ) as process:
        assert process.stdout is not None
        assert "starting" in process.stdout.readline()
        process.stdout.close()
        while not list(tmp_path.glob("triptych-up-*/*.json")):  # the cluster continues to start
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_before_the_cluster_is_ready_is_no_success(tmp_path: Path, number: signal.Signals, code: int) -> None:
    never_ready = {**environment(tmp_path), "TRIPTYCH_STUB_INSTANCES": ""}
    with subprocess.Popen(
        command(*FREE, "--no-live"), stdout=subprocess.PIPE, cwd=ROOT, env=never_ready, text=True
    ) as process:
        assert process.stdout is not None
        assert "starting" in process.stdout.readline()
        process.send_signal(number)
        assert process.wait(60) == code
        assert process.stdout.read().endswith("stopped\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(60)
def test_the_death_of_the_last_instance_of_a_kind_reports_the_consequence(tmp_path: Path) -> None:
    options = (*FREE, "--roles", "E:1,PD:2", "--no-live")
    instances = {"TRIPTYCH_STUB_INSTANCES": "encoder-1,text-1,text-2"}
    with subprocess.Popen(
        command(*options), stdout=subprocess.PIPE, cwd=ROOT, env={**environment(tmp_path), **instances}, text=True
    ) as process:
        assert process.stdout is not None
        pids: dict[str, int] = {}
        for line in process.stdout:
            if ready := re.match(r" +(\S+) +ready after .* pid (\d+)", line):
                pids[ready[1]] = int(ready[2])
            if "try:" in line:
                break
        told: dict[str, str] = {}
        for name in ("encoder-1", "text-1"):
            os.kill(pids[name], signal.SIGKILL)
            told[name] = ""
            while "processes continue" not in told[name]:
                told[name] += process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    assert "requests with images, video or audio wait or fail until there is one" in told["encoder-1"]
    assert "until there is one" not in told["text-1"]


@pytest.mark.parametrize(
    ("flag", "owner"),
    [
        pytest.param("--port", "the gateway", marks=pytest.mark.extended),
        pytest.param("--router-port", "the router", marks=pytest.mark.extended),
        ("--admin-port", "the admin port of the gateway"),
    ],
)
def test_a_taken_port_is_one_line_at_once(tmp_path: Path, flag: str, owner: str) -> None:
    with foreign_server(b'{"ready": true, "missing": [], "instances": ["encoder-1: ready", "text-1: ready"]}') as port:
        done = subprocess.run(
            command(*FREE, flag, str(port)),
            cwd=ROOT,
            env=environment(tmp_path),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr == (
        f"triptych: port {port}, for {owner}, is taken: another process listens on it; "
        f"choose another with {flag}, 0 picks a free one\n"
    )
    assert done.stdout == "", "it is said before anything starts"
    assert list(tmp_path.iterdir()) == [], "there is no log to read"


def test_two_services_cannot_share_a_port(tmp_path: Path) -> None:
    done = subprocess.run(
        command("--port", "19001", "--router-port", "19001"),
        cwd=ROOT,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (
        1,
        "triptych: port 19001 is used twice, for the gateway and for the router\n",
    )
