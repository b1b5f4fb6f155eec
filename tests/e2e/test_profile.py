"""``triptych profile`` as users run it: interrupted, resumed, and read back."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from triptych.demo import MODEL_DIR
from triptych.domain.stage import ModelPart
from triptych.engine.checkpoint import open_checkpoint
from triptych.policy.costs import Costs
from triptych.runtime.profiles import read_profile, read_profiles

pytestmark = [pytest.mark.extended, pytest.mark.timeout(300)]

COMMAND = (sys.executable, "-m", "triptych.cli", "profile", "--quick", "--part", "encoder", "--out")


def test_an_interrupted_profile_goes_on_where_it_was(tmp_path: Path) -> None:
    partial = tmp_path / "model-encoder-float32-quick.partial"
    first = subprocess.Popen([*COMMAND, tmp_path], stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        while first.poll() is None and not partial.exists():
            signal.sigtimedwait([], 0.05)
        first.send_signal(signal.SIGINT)
        said, _ = first.communicate(timeout=240)
    finally:
        first.kill()
        first.wait()
    assert first.returncode == 130
    assert "interrupted: the rows so far are in" in said
    kept = read_profile(partial)
    rows = {*kept.encode, *kept.prepare}
    assert rows

    again = subprocess.run([*COMMAND, tmp_path], capture_output=True, text=True, check=False, timeout=240)
    assert again.returncode in (0, 1), again.stderr  # 1: the machine's speed changed
    assert "going on from" in again.stdout
    assert not partial.exists()
    (profile,), faults = read_profiles(tmp_path)
    assert not faults
    assert rows <= {*profile.encode, *profile.prepare}
    assert profile.identity.digest == open_checkpoint(MODEL_DIR).part_digest(ModelPart.ENCODER)
    assert profile.errors
    assert {row.backend for row in profile.transfer} >= {"shm", "tcp"}
    assert profile.measured.start_s > profile.measured.load_s > 0
    assert Costs(profile).encode_s(16, 3).value > 0
    assert ("while the encoder was measured" in again.stdout) == (again.returncode == 1)
