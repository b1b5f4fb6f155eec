"""What arguments of vLLM change, without vLLM. tests/vllm compares the names with vLLM's own."""

import pytest

from triptych.domain.stage import ModelPart
from triptych.integrations.vllm.accepted import other_times
from triptych.runtime.process import CannotStart


@pytest.mark.parametrize(
    ("measured", "arguments"),
    [
        ("", ""),
        ("", "--no-enforce-eager --seed 3"),
        ("--max-num-seqs=64 --gpu-memory-utilization=0.5", "--max-num-seqs 8 --max-model-len=512 -tp 2"),
        ("--block-size=32 --enforce-eager=True", "--enforce_eager --block_size 32"),
        ("--cpu-offload-gb=4.0", "--cpu-offload-gb 4"),
        ("--quantization=fp8", "--quantization=fp8"),
        ("--attention-backend=AttentionBackendEnum.FLASH_ATTN", "--attention-backend flash_attn"),
        ("--cudagraph-capture-sizes=[1, 2, 4] --enforce-eager=False", "--cudagraph-capture-sizes 1 2 4"),
        ("--cudagraph-capture-sizes=[8]", "--cudagraph-capture-sizes 8"),
        ("--compilation-config={'mode': <CompilationMode.NONE: 0>}", "--compilation-config '{\"mode\": 0}'"),
        (
            "--compilation-config={'cudagraph_mode': <CUDAGraphMode.FULL: 2>, 'custom_ops': ['all']} --max-num-seqs=4",
            """--compilation-config '{"custom_ops": ["all"], "cudagraph_mode": "FULL"}'""",
        ),
    ],
)
def test_arguments_that_leave_times_do_not_differ_however_they_are_written(measured: str, arguments: str) -> None:
    assert other_times(ModelPart.DECODER, measured, arguments) == ()


@pytest.mark.parametrize(
    ("measured", "arguments", "differing"),
    [
        ("", "--enforce-eager", ("--enforce-eager",)),
        ("--enforce-eager=True", "", ("--enforce-eager",)),
        ("--block-size=16 --quantization=fp8", "--block-size 32 --max-num-seqs 4", ("--block-size", "--quantization")),
        ("--cudagraph-capture-sizes=[1, 2]", "--cudagraph-capture-sizes 1 2 4", ("--cudagraph-capture-sizes",)),
        (
            "--compilation-config={'mode': <CompilationMode.NONE: 0>}",
            "--compilation-config '{\"mode\": 3}'",
            ("--compilation-config",),
        ),
        ("--compilation-config={'mode': 0}", "", ("--compilation-config",)),
        ("0" * 64, "--enforce-eager", ("perhaps all, as the profile has a digest of its own",)),
    ],
)
def test_arguments_that_change_times_and_differ_are_named(
    measured: str, arguments: str, differing: tuple[str, ...]
) -> None:
    assert other_times(ModelPart.DECODER, measured, arguments) == differing


def test_arguments_of_encoders_are_their_own() -> None:
    assert other_times(ModelPart.ENCODER, "quantization=fp8", "--quantization fp8") == ()
    measured = "mm_encoder_attn_backend=TORCH_SDPA"
    assert other_times(ModelPart.ENCODER, measured, "--mm-encoder-attn-backend TORCH_SDPA --quantization fp8") == (
        "--quantization",
    )


def test_a_command_line_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(CannotStart, match="No closing quotation"):
        other_times(ModelPart.DECODER, "", "--seed 'open")
