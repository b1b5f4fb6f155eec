"""The wheel in a clean environment is complete."""

import os
import re
import signal
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "examples" / "digits"

pytestmark = [pytest.mark.extended, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel and its dependencies, without the checkout."""
    directory = tmp_path_factory.mktemp("wheel")
    _run(sys.executable, "-m", "build", "--wheel", "--outdir", str(directory), str(ROOT), cwd=ROOT)
    (wheel,) = directory.glob("*.whl")
    home = directory / "venv"
    venv.create(home, with_pip=True)
    torch = _run(sys.executable, "-c", "from importlib.metadata import version; print(version('torch').split('+')[0])")
    pip = (str(home / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--quiet", "install")
    _run(*pip, f"torch=={torch.strip()}", cwd=directory)
    _run(*pip, f"{wheel}[all]", cwd=directory)
    return home


@pytest.fixture
def cluster(environment: Path, tmp_path: Path) -> Iterator[str]:
    """``triptych up`` from the wheel, outside of the checkout; returns its gateway's URL."""
    log = tmp_path / "up.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [str(environment / "bin" / "triptych"), "up", "--roles", "E:2,PD:1", "--port", "0", "--router-port", "0"],
            cwd=tmp_path,
            env=_environ(),
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    family = psutil.Process(process.pid)
    children: list[psutil.Process] = []
    try:
        yield _url(process, log)
        children = family.children(recursive=True)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=240) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        left = [child for child in children if child.is_running()]
        for child in left:
            child.kill()
    assert not left


def test_triptych_is_the_only_top_level_package(environment: Path) -> None:
    (files,) = environment.glob("lib/python*/site-packages/triptych-*.dist-info/RECORD")
    tops = {line.split("/")[0].split(",")[0] for line in files.read_text().splitlines()}
    assert tops <= {"triptych", files.parent.name, ".."}
    assert not _exists(environment, "services")


def test_up_serves_the_demo_model_and_chat_gets_an_answer(environment: Path, cluster: str, tmp_path: Path) -> None:
    answer = _run(
        str(environment / "bin" / "triptych"),
        "chat",
        "What digits are shown?",
        *("--image", str(DIGITS / "3_a.png"), "--image", str(DIGITS / "7_a.png"), "--image", str(DIGITS / "1_a.png")),
        *("--url", cluster),
        cwd=tmp_path,
    )
    assert "3 7 1" in answer
    assert "encoder-1" in answer
    assert "encoder-2" in answer


def _url(process: "subprocess.Popen[bytes]", log: Path) -> str:
    """Waits until ``triptych up`` prints its address."""
    for _ in range(1200):
        found = re.search(r"^ready in .* at (http://127\.0\.0\.1:\d+)$", log.read_text(errors="replace"), re.MULTILINE)
        if found:
            return found[1]
        if process.poll() is not None:
            break
        try:
            process.wait(timeout=0.1)
        except subprocess.TimeoutExpired:
            continue
    raise AssertionError(f"triptych up did not come up:\n{log.read_text(errors='replace')}")


def _exists(environment: Path, package: str) -> bool:
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    python = str(environment / "bin" / "python")
    return subprocess.run([python, "-c", code], cwd="/", env=_environ(), check=False).returncode == 0


def _environ() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key not in {"PYTHONPATH", "VIRTUAL_ENV"}}  # noqa: TID251 - the test's own


def _run(*command: str, cwd: Path | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, env=_environ(), check=False, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout
