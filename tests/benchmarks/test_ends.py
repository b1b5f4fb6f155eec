import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("router_overhead", ("--quick",)),
        ("transport", ("--quick",)),
        ("pool_manager", ("--quick",)),
        ("engine", ("--quick",)),
        ("burst", ()),
    ],
)
def test_a_benchmark_that_is_terminated_leaves_no_process_and_no_files(
    name: str, arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    benchmark = subprocess.Popen(
        [sys.executable, "-m", f"benchmarks.{name}", *arguments],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    children: list[psutil.Process] = []
    try:
        while not any(_has_started(process) for process in children):
            assert benchmark.poll() is None, "it ended before it was terminated"
            time.sleep(0.05)
            children = psutil.Process(benchmark.pid).children(recursive=True)
        benchmark.terminate()
        benchmark.wait()
        assert psutil.wait_procs(children, timeout=60)[1] == []
        left = [path.name for path in tmp_path.iterdir()]
        assert [name for name in left if not name.startswith("torchinductor")] == []  # PyTorch's own cache
    finally:
        benchmark.kill()
        benchmark.wait()
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()


def _has_started(child: psutil.Process) -> bool:
    """Whether a child is past the start of the interpreter."""
    with suppress(psutil.NoSuchProcess):
        return bool(child.cpu_times().user > 0.1)
    return False
