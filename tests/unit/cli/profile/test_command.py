"""How ``triptych profile`` treats the process that measures."""

import signal
from pathlib import Path

import pytest

from triptych.cli.outcome import CliError
from triptych.cli.profile.command import Job, PartRun
from triptych.cli.show import plain_console
from triptych.domain.stage import ModelPart


@pytest.mark.slow
def test_the_handler_of_interrupts_is_the_callers_again_afterwards(tmp_path: Path) -> None:
    parts = (ModelPart.ENCODER,)
    job = Job("m", parts, tmp_path, True, "float32", "cpu", 1, 1 << 20, 5.0, False)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(CliError, match="the encoder cannot be measured"):
            PartRun(job, tmp_path / "no model", ModelPart.ENCODER, plain_console()).measure()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
