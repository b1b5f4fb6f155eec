"""The compiled code of kernels on disk."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from triptych.engine import vectors

pytestmark = pytest.mark.slow

KERNEL = """
from changed import compiled, number
def _asked(): return number()
asked = compiled(_asked)
print(asked(), sum(asked.stats.cache_hits.values()))
"""


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], str]:
    """Asks a kernel in a process of its own for a number, which a function of another file returns: the number, and 1 if the kernel was kept."""
    source = Path(vectors.__file__).read_text()
    (tmp_path / "kernel.py").write_text(KERNEL)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "kept"))

    def ask(number: int) -> str:
        (tmp_path / "changed.py").write_text(f"{source}\ndef _number(): return {number}\nnumber = compiled(_number)\n")
        command = [sys.executable, "-B", str(tmp_path / "kernel.py")]
        return subprocess.check_output(command, text=True, timeout=60).strip()

    return ask


def files(directory: Path) -> list[Path]:
    return sorted(directory.glob("kept/*/kernel._asked*"))


def test_kernels_are_compiled_again_when_what_they_use_has_changed(asked: Callable[[int], str], tmp_path: Path) -> None:
    """Numba alone compares the kernel's own file with what it was."""
    assert [asked(number) for number in (1, 1, 2, 1)] == ["1 0", "1 1", "2 0", "1 1"]
    assert len(files(tmp_path)) == 2, "no other version's code is overwritten"


def _empty(code: bytes) -> bytes:
    return b""


def _cut(code: bytes) -> bytes:
    return code[: len(code) // 2]


def _zeros(code: bytes) -> bytes:
    middle = len(code) // 2
    return code[:middle] + bytes(64) + code[middle + 64 :]


def _other(code: bytes) -> bytes:
    return b"neither code nor a checksum"


@pytest.mark.parametrize(
    "damage", [*(pytest.param(damage, marks=pytest.mark.extended) for damage in (_empty, _zeros)), _cut, _other]
)
def test_what_is_damaged_is_compiled_again(
    asked: Callable[[int], str], damage: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    """As after a power failure: without its checksum, code would be executed as it is."""
    assert asked(1) == "1 0"
    (kept,) = files(tmp_path)
    kept.write_bytes(damage(kept.read_bytes()))
    assert [asked(1), asked(1)] == ["1 0", "1 1"]


def test_where_numba_may_not_compile_there_are_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing them fails as without Numba, which text engines do without."""
    command = [sys.executable, "-c", "import triptych.engine.cpu_kernels"]
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "ImportError: Numba is told not to compile, by NUMBA_DISABLE_JIT" in done.stderr
