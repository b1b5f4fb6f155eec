"""A model that vLLM loads and cannot run: its instance ends before it is ready, and says why."""

import subprocess
from pathlib import Path

from tests.vllm.models import NARROW_HEADS
from tests.vllm.reference import ROOT
from triptych.cli import ports
from triptych.cli.child import child_command


def test_a_head_size_that_vllms_attention_lacks_ends_the_start_with_one_line(tmp_path: Path) -> None:
    model = NARROW_HEADS.make(tmp_path / "model")
    port, admin_port = ports.free(2, ())
    flags = ("--model", str(model), "--port", str(port), "--admin-port", str(admin_port), "--engine", "vllm")
    vllm_args = "--max-model-len 512 --enforce-eager --kv-cache-memory-bytes 64M"
    ended = subprocess.run(
        child_command("triptych.services.text", *flags, "--role", "PD", f"--vllm-args={vllm_args}"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 1, ended.stderr[-3000:]
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("text: engine vllm: the language model cannot be run: its first prompt fails: "), last
    assert "head" in last
    assert "text is up" not in ended.stderr
