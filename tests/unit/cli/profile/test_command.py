"""How ``triptych profile`` treats the process that measures."""

import signal
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.command_line import invoke
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


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--vllm-args=--seed 1",), "--vllm-args goes with --engine vllm"),
        (("--encoder-vllm-args=--quantization fp8",), "--encoder-vllm-args goes with --encoder-engine vllm"),
        (("--engine=vllm", "--device=cuda"), "vLLM chooses its devices itself"),
        (("--engine=vllm", "--kv-cache-mib=64"), "it is --kv-cache-memory-bytes in --vllm-args"),
        (("--engine=vllm", "--analytic", "--device=h100"), "--engine would have no effect"),
        (("--engine=vllm", "--part=encoder"), "--engine is that of the decoder, which --part leaves out"),
        (
            ("--encoder-engine=vllm", "--part=decoder"),
            "--encoder-engine is that of the encoder, which --part leaves out",
        ),
        pytest.param(
            ("--encoder-engine=vllm", "--part=encoder"),
            "this needs vllm: install Triptych's extra 'vllm'",
            marks=pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed"),
        ),
    ],
)
def test_what_does_not_fit_the_engine_is_refused_before_anything_loads(
    options: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    result = invoke(["profile", "--out", str(tmp_path), *options])
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())
    assert not list(tmp_path.iterdir())
