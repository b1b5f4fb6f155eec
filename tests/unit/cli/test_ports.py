import subprocess
import sys

import pytest

from triptych.cli import ports
from triptych.cli.outcome import ClusterError


@pytest.mark.slow
def test_ports_that_were_found_are_found_by_no_other_process(monkeypatch: pytest.MonkeyPatch) -> None:
    (first,) = ports.free(1)
    monkeypatch.setattr(ports, "RANGE", range(first, first + 1))
    with pytest.raises(ClusterError, match="found no 1 free ports"):
        ports.free(1)
    script = f"from triptych.cli import ports; ports.RANGE = range({first}, {first + 1}); print(ports.free(1))"
    other = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert f"found no 1 free ports between {first} and {first + 1}" in other.stderr


def test_a_process_gives_up_the_ports_that_it_found_first(monkeypatch: pytest.MonkeyPatch) -> None:
    (first,) = ports.free(1)
    for _ in range(ports._reserved.maxlen or 0):
        ports.free(1)
    monkeypatch.setattr(ports, "RANGE", range(first, first + 1))
    assert ports.free(1) == [first]
