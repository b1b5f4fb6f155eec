"""The catalogue that is shipped, and files of the user's."""

from pathlib import Path

import pytest

from triptych.domain.device import BadCatalogue
from triptych.runtime.catalogue import at_hand, load_catalogue


def test_the_shipped_catalogue_has_the_usual_devices_with_their_sources() -> None:
    devices = load_catalogue().devices
    usual = {"a100-40", "a100-80", "h100", "h200", "b200", "l40s", "l4", "rtx-4090", "mi300x", "ascend-910b", "cpu"}
    assert usual <= devices.keys()
    for device in devices.values():
        rates = (device.device_nbytes_per_s, device.host_nbytes_per_s, device.network_nbytes_per_s)
        assert device.memory_nbytes_per_s >= max(rates), device.name
        assert device.source


def test_a_file_adds_devices_and_faults_name_it(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text('[device.h100-nvl]\nlike = "h100"\ntitle = "NVIDIA H100 NVL"\nmemory_gb = 94\n')
    assert load_catalogue(own).device("h100-nvl").memory_nbytes == 94 * 10**9
    own.write_text('[device.h100-nvl]\nlike = "h10"\n')
    with pytest.raises(BadCatalogue, match=r"own.toml: device.h100-nvl.like is 'h10', which is not there"):
        load_catalogue(own)
    own.write_text("[device")
    with pytest.raises(BadCatalogue, match=r"own.toml is not TOML"):
        load_catalogue(own)


def test_cores_at_hand_are_those_of_this_machine() -> None:
    cpu = load_catalogue().device("cpu")
    machine = at_hand(cpu, 3)
    assert machine.flops_per_s == {dtype: 3 * rate for dtype, rate in cpu.flops_per_s.items()}
    assert machine.hardware != cpu.hardware
    gpu = load_catalogue().device("l4")
    assert at_hand(gpu, 3) is gpu
