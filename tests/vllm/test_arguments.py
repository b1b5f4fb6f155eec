"""vLLM's arguments: read by its own parser; those that Triptych sets are refused."""

import pytest

from tests.contract.text_engine_kit import checkpoint
from triptych.engine.compute import ComputeOptions
from triptych.integrations.vllm.arguments import engine_args
from triptych.runtime.process import CannotStart


def test_arguments_are_those_of_vllm() -> None:
    text = "--tensor-parallel-size 2 --max_model_len=512 --quantization fp8 --enforce-eager --seed 3"
    made = engine_args(text, checkpoint(), model_id="m", compute=ComputeOptions(dtype="bfloat16"))
    assert (made.tensor_parallel_size, made.max_model_len, made.quantization) == (2, 512, "fp8")
    assert (made.enforce_eager, made.seed) == (True, 3)
    assert (made.dtype, made.served_model_name, made.model) == ("bfloat16", "m", str(checkpoint().directory))
    assert made.limit_mm_per_prompt == {"image": 0, "video": 0, "audio": 0}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("--dtype bfloat16", "--dtype cannot be set: it is --dtype of the instance"),
        ("--model elsewhere", "--model cannot be set"),
        ("--limit-mm-per-prompt.image 4", "--limit-mm-per-prompt cannot be set: no item is encoded here"),
        ("--enable-lora", "--enable-lora cannot be set: requests name no adapters"),
        (
            '--speculative-config \'{"method": "ngram", "num_speculative_tokens": 2}\'',
            "--speculative-config cannot be set",
        ),
        ("--spec-method ngram --spec-tokens 2", "--spec-method cannot be set"),
        ("--mm-processor-cache-gb 2", "--mm-processor-cache-gb cannot be set: no item is processed here"),
        ("--kv-offloading-size 1", "--kv-offloading-size cannot be set"),
        ("--structured-outputs-config.backend guidance", "--structured-outputs-config cannot be set"),
        ("--reasoning-parser qwen3", "--reasoning-parser cannot be set: response formats hold from the first token"),
        ("--reasoning-config.reasoning_parser qwen3", "--reasoning-config cannot be set"),
        ("--trust-remote-code", "--trust-remote-code cannot be set: no code of a model is run"),
        ("--video-pruning-rate 0.3", "--video-pruning-rate cannot be set"),
        ("--pipeline-parallel-size 2", "--pipeline-parallel-size cannot be set"),
        ("--max-model-len many", "max-model-len"),
        ("--api-key secret", "unrecognized arguments: --api-key secret"),
        ("--no-such-thing", "unrecognized arguments: --no-such-thing"),
        ("'unbalanced", "No closing quotation"),
    ],
)
def test_other_arguments_are_refused_with_the_reason(text: str, said: str) -> None:
    with pytest.raises(CannotStart, match=said):
        engine_args(text, checkpoint(), model_id="m", compute=ComputeOptions())
