"""A process starts, drains on the first signal and hurries on the second."""

import os
import signal
import subprocess
import sys
import time

import pytest

APP = """
import asyncio, contextlib, sys
from triptych.runtime.process import run

class Service:
    async def drain(self):
        print("drain", flush=True)
        await asyncio.sleep(float(sys.argv[1]))
        print("drained", flush=True)

@contextlib.asynccontextmanager
async def app():
    print("up", flush=True)
    yield Service()
    print("closed", flush=True)

run("test", app(), log_level="INFO", drain_s=float(sys.argv[2]))
"""


def _start(drain_takes_s: float, drain_limit_s: float) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", APP, str(drain_takes_s), str(drain_limit_s)],
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
    out, err = process.communicate(timeout=20)
    assert out.split() == ["drain", "drained", "closed"]
    assert process.returncode == 0
    assert "test is down" in err


def test_the_drain_ends_at_its_deadline() -> None:
    process = _start(60.0, 0.1)
    process.terminate()
    out, _ = process.communicate(timeout=20)
    assert out.split() == ["drain", "closed"]
    assert process.returncode == 0


def test_a_second_signal_cuts_the_drain_short() -> None:
    process = _start(60.0, 60.0)
    process.terminate()
    assert process.stdout is not None
    assert process.stdout.readline() == "drain\n"
    started = time.perf_counter()
    os.kill(process.pid, signal.SIGTERM)
    out, _ = process.communicate(timeout=20)
    assert out.split() == ["closed"]
    assert process.returncode == 0
    assert time.perf_counter() - started < 10
