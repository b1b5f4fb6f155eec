"""The recipe of docs/control_plane.md for two pool managers works as it is printed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from triptych.cli import ports

ROOT = Path(__file__).parents[2]
PORTS = ("6379", "50041", "50042", "50061", "50071", "50051", "8000")


@pytest.mark.extended
def test_another_manager_leads_when_one_is_stopped(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "control_plane.md").read_text()
    section = text.split("### Two managers, step by step\n")[1].split("\n## ")[0]
    blocks = re.findall(r"^```(sh|text)\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    script = "".join(told for kind, told in blocks if kind == "sh")
    wanted = "".join(told for kind, told in blocks if kind == "text")
    for usual, free in zip(PORTS, ports.free(len(PORTS)), strict=True):
        script, wanted = (re.sub(rf"\b{usual}\b", str(free), part) for part in (script, wanted))
    script = re.sub(r"(\w[\w-]*\.log)", rf"{tmp_path}/\1", script)
    url = re.search(r"http://127\.0\.0\.1:\d+", script)
    assert url is not None
    done = subprocess.run(
        ["bash", "-eu", "-c", f"trap 'kill $(jobs -p); wait' EXIT\n{script}"],
        cwd=ROOT,
        env={
            "PATH": f"{Path(sys.executable).parent}:{os.defpath}",
            "HOME": str(tmp_path),
            "LANG": "C.UTF-8",
            "COLUMNS": "120",
            "TRIPTYCH_URL": url[0],
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )
    said = done.stdout
    logs = "\n".join(f"{path.name}:\n{path.read_text()[-1000:]}" for path in tmp_path.glob("*.log"))
    assert done.returncode == 0, said + logs
    assert "Traceback" not in said + logs
    for line in wanted.splitlines():
        pattern = ".*".join(map(re.escape, line.split("...")))
        found = re.search(f"^{pattern}$", said, re.MULTILINE)
        assert found, f"{line!r} is not in the rest of:\n{done.stdout}"
        said = said[found.end() :]
