import subprocess
import sys

import pytest

from triptych.runtime.host import machine_name, new_epoch


@pytest.mark.process
def test_processes_of_one_machine_have_the_same_host_name() -> None:
    code = "from triptych.runtime.host import machine_name; print(machine_name())"
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert out.strip() == machine_name()


def test_a_later_epoch_is_higher() -> None:
    assert new_epoch() < new_epoch()
