import socket
import subprocess
import sys
from pathlib import Path

import pytest

from triptych.runtime import host
from triptych.runtime.host import instance_name, machine_name, new_epoch, own_address


@pytest.mark.slow
def test_processes_of_one_machine_have_the_same_host_name() -> None:
    code = "from triptych.runtime.host import machine_name; print(machine_name())"
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert out.strip() == machine_name()


def test_a_later_epoch_is_higher() -> None:
    assert new_epoch() < new_epoch()


def test_containers_of_one_machine_name_their_instances_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = []
    for network in ("net:[4026531840]", "net:[4026532200]"):
        link = tmp_path / network
        link.symlink_to(network)
        monkeypatch.setattr(host, "_NETWORK", link)
        names.append(instance_name("encoder", 50061, 1))
    assert names[0] != names[1]
    assert instance_name("encoder", 50061, 2) == names[1]
    assert instance_name("encoder", 50062, 2) != names[1]


def test_the_own_address_is_the_one_of_the_machines_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def resolved(name: object, port: object, **_: object) -> list[object]:
        asked.append(name)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("172.18.0.7", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    monkeypatch.setattr(socket, "gethostname", lambda: "0123456789ab")
    assert own_address() == "172.18.0.7"
    assert asked == ["0123456789ab"]
