"""docs/adding_things.md, applied to a copy of the tree: what it adds works."""

import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from triptych.cli import ports

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "adding_things.md").read_text()
COPIED = ("src", "services", "tests", "docs", "deploy", "pyproject.toml")
NO_CACHES = shutil.ignore_patterns("__pycache__", ".*")


def replaced(block: str) -> tuple[str, str]:
    """What a block of a diff takes for granted, and what is there after it."""
    lines = [line if line.strip() else " " for line in block.splitlines()]
    before = "\n".join(line[1:] for line in lines if line[0] in " -")
    return before, "\n".join(line[1:] for line in lines if line[0] in " +")


def apply(section: str, tree: Path) -> None:
    (text,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    for kind, head, block in re.findall(r"^```(python|diff)\n([^\n]+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        path = tree / head.removeprefix("# " if kind == "python" else "--- ")
        if kind == "python":
            path.write_text(block)
            continue
        before, after = replaced(block)
        there = path.read_text()
        assert there.count(before) == 1, f"{head} does not have, or has more than once:\n{before}"
        path.write_text(there.replace(before, after))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    copy = tmp_path / "tree"
    copy.mkdir()
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=NO_CACHES)
        else:
            shutil.copy(ROOT / name, copy / name)
    return copy


def environment(tree: Path, **variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TRIPTYCH_")}  # noqa: TID251
    return {**kept, "PYTHONPATH": f"{tree / 'src'}{os.pathsep}{tree}", **variables}


def run(tree: Path, *arguments: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=tree,
        env=environment(tree, **variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.extended
@pytest.mark.timeout(180)
def test_the_transport_of_the_page_moves_a_tensor_and_keeps_the_contract(tree: Path) -> None:
    apply("A transport", tree)
    measured = (
        "from triptych.cli.profile.transfers import measure_transfers as m; print({r.backend for r in m([1 << 20])})"
    )
    assert "'procmem'" in run(tree, "-c", measured)
    said = run(
        tree, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/contract/test_transport.py", "-k", "procmem"
    )
    assert re.search(r"[1-9]\d+ passed", said)
    assert "procmem" in run(
        tree, "-m", "triptych.services.text", "--model", "demo", "--prefer-transport", "procmem", "--print-config"
    )


@pytest.mark.timeout(120)
def test_the_metric_of_the_page_is_exported_and_documented(tree: Path) -> None:
    apply("A metric", tree)
    (port,) = ports.free(1)
    command = [sys.executable, "-m", "triptych.services.pool_manager", "--port", "0", "--admin-port", str(port)]
    with subprocess.Popen(command, cwd=tree, env=environment(tree)) as process:
        try:
            assert "\ntriptych_pool_models 0.0\n" in metrics(port, process)
        finally:
            process.terminate()
    documented = "tests/unit/deploy/test_alerts.py::test_every_metric_is_documented"
    assert "1 passed" in run(tree, "-m", "pytest", "-q", "-p", "no:cacheprovider", documented)


def metrics(port: int, process: "subprocess.Popen[bytes]") -> str:
    while process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
                return str(answer.read().decode())
        except OSError:
            time.sleep(0.1)
    raise AssertionError("the pool manager ended")


@pytest.mark.extended
@pytest.mark.timeout(120)
def test_the_setting_of_the_page_is_read_from_everywhere_and_kept(tree: Path) -> None:
    apply("A setting", tree)
    (file := tree / "settings.toml").write_text("[members]\nmax_name_chars = 16\n")
    manager = ("-m", "triptych.services.pool_manager", "--print-config")
    kept = '"max_name_chars": 16'
    assert '"max_name_chars": 128' in run(tree, *manager)
    assert kept in run(tree, *manager, "--max-name-chars", "16")
    assert kept in run(tree, *manager, "--config", str(file))
    assert kept in run(tree, *manager, TRIPTYCH_POOL_MANAGER_MAX_NAME_CHARS="16")
    of_up = "from triptych.cli.service_options import parse; print(parse(['--max-name-chars=16'])['pool_manager'])"
    assert "('--max-name-chars=16',)" in run(tree, "-c", of_up)


def test_every_block_of_the_page_is_applied() -> None:
    """But for that of entry points: other tests offer the families and policies of their pages by such."""
    assert len(re.findall(r"^```(?!toml)\w", PAGE, re.MULTILINE)) == len(
        re.findall(r"^```(?:python\n# |diff\n--- )", PAGE, re.MULTILINE)
    )
