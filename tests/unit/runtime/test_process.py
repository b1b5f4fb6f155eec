"""A process starts, drains on the first signal and stops at once on the second."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

pytestmark = pytest.mark.slow
APP = """
import asyncio, contextlib, gc, sys
from triptych.runtime.process import run

USUAL = gc.get_threshold()

class Service:
    async def missing(self):
        return ()

    async def drain(self):
        print("drain", flush=True)
        await asyncio.sleep(float(sys.argv[1]))
        print("drained", flush=True)

    async def failed(self):
        assert gc.get_threshold() == USUAL
        print("up", flush=True)
        await asyncio.sleep(float(sys.argv[3]))
        return "heart"

@contextlib.asynccontextmanager
async def app():
    yield Service()
    print("closed", flush=True)

run("test", app(), log_level="INFO", drain_s=float(sys.argv[2]))
"""


def _start(
    drain_takes_s: float, drain_limit_s: float, fails_after_s: float = 3600.0, *, open_files: int = 1000
) -> subprocess.Popen[str]:
    """``open_files`` is the soft limit; the hard one is 1,000."""
    times = map(str, (drain_takes_s, drain_limit_s, fails_after_s))
    process = subprocess.Popen(
        ["prlimit", f"--nofile={open_files}:1000", sys.executable, "-c", APP, *times],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_closes(number: int) -> None:
    process = _start(0.0, 5.0)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert out.split() == ["drain", "drained", "closed"]
    assert process.returncode == 0
    assert "test is down" in err


def test_as_many_files_may_be_open_as_the_hard_limit_allows() -> None:
    process = _start(0.0, 1.0, open_files=100)
    limits = psutil.Process(process.pid).rlimit(psutil.RLIMIT_NOFILE)
    process.terminate()
    process.communicate(timeout=60)
    assert limits == (1000, 1000)


def test_the_drain_ends_at_its_deadline() -> None:
    process = _start(60.0, 0.1)
    process.terminate()
    out, _ = process.communicate(timeout=60)
    assert out.split() == ["drain", "closed"]
    assert process.returncode == 0


def test_a_second_signal_cuts_the_drain_short() -> None:
    process = _start(60.0, 60.0)
    process.terminate()
    assert process.stdout is not None
    assert process.stdout.readline() == "drain\n"
    started = time.perf_counter()
    os.kill(process.pid, signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert out.split() == ["closed"]
    assert process.returncode == 0
    assert time.perf_counter() - started < 50, "the drain takes 60 s"


def test_a_failed_vital_task_ends_the_process_with_a_nonzero_status() -> None:
    process = _start(0.0, 5.0, fails_after_s=0.05)
    out, err = process.communicate(timeout=60)
    assert out.split() == ["drain", "drained", "closed"]
    assert process.returncode == 1
    assert "test ends: heart has failed" in err


CANNOT_START = """
import contextlib
from triptych.runtime.process import CannotStart, run

@contextlib.asynccontextmanager
async def app():
    raise CannotStart("there is no model")
    yield

run("test", app(), log_level="INFO", drain_s=1.0)
"""
HANGING_THREAD = (
    APP.replace(
        "yield Service()",
        "ThreadOffload(1, name='stuck')._pool.submit(time.sleep, 3600); yield Service()",
    )
    .replace("import asyncio, ", "import asyncio, time, ")
    .replace(
        "from triptych.runtime.process",
        "from triptych.runtime.offload import ThreadOffload\nfrom triptych.runtime.process",
    )
)


def test_a_failure_at_start_is_one_line_and_status_1() -> None:
    done = subprocess.run([sys.executable, "-c", CANNOT_START], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (1, "test: there is no model\n")


STARTS_SLOWLY = """
import asyncio, contextlib
from triptych.runtime.process import run

@contextlib.asynccontextmanager
async def app():
    print("starting", flush=True)
    await asyncio.sleep(3600)
    yield

run("test", app(), log_level="INFO", drain_s=3600)
"""


def test_a_signal_ends_a_process_during_its_start() -> None:
    with subprocess.Popen([sys.executable, "-c", STARTS_SLOWLY], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "starting\n"
        process.terminate()
        assert process.wait(timeout=60) == 128 + signal.SIGTERM


def test_a_hanging_thread_does_not_block_the_exit() -> None:
    command = [sys.executable, "-c", HANGING_THREAD, "0", "1", "3600"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.terminate()
        assert process.wait(timeout=60) == 0
