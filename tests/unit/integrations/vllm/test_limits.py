"""The limits of vLLM's steps, without vLLM. tests/vllm compares them with vLLM's own."""

import pytest

from triptych.integrations.vllm.limits import EngineLimits, engine_limits
from triptych.runtime.catalogue import load_catalogue
from triptych.runtime.process import CannotStart

DEVICES = load_catalogue(None)


def limits(
    arguments: str, device: str = "h100", degree: int = 1, context_tokens: int = 4096, *, is_measured: bool = True
) -> EngineLimits:
    of_device = DEVICES.device(device)
    return engine_limits(arguments, of_device, degree=degree, context_tokens=context_tokens, is_measured=is_measured)


@pytest.mark.parametrize(
    ("device", "sequences", "tokens"),
    [("cpu", 128, 2048), ("l4", 256, 2048), ("a100-80", 256, 2048), ("h100", 1024, 8192)],
)
def test_usual_steps_depend_on_the_device(device: str, sequences: int, tokens: int) -> None:
    usual = limits("", device)
    assert (usual.max_sequences, usual.token_budget, usual.kv_cache_bytes) == (sequences, tokens, None)


def test_arguments_bound_steps_memory_and_context() -> None:
    given = limits("--max_num_seqs=64 --max-num-active-seqs 16 --max-num-batched-tokens 4k --kv-cache-memory-bytes 64M")
    assert given == EngineLimits(16, 4000, 4096, 64 << 20, 0.92)
    assert limits("--max-model-len 1K --gpu-memory-utilization 0.5").context_tokens == 1024
    assert limits("--max-model-len 16", context_tokens=8).context_tokens == 8


def test_a_step_has_no_more_tokens_than_its_sequences_could_have() -> None:
    assert limits("--max-num-seqs 2 --max-model-len 512").token_budget == 1024
    assert limits("--max-num-batched-tokens 100").max_sequences == 100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--long-prefill-token-threshold 64", "--long-prefill-token-threshold is not simulated"),
        ("--tensor-parallel-size 2", "--tensor-parallel-size is 2, --tensor-parallel says 1"),
        ("--max-num-seqs many", "'many' is not a whole number above 0"),
        ("--max-num-seqs", "expected one argument"),
        ("--seed 'open", "No closing quotation"),
        ("--gpu-memory-utilization 5", "'5' is not a number above 0 and at most 1"),
        ("--gpu-memory-utilization nan", "'nan' is not a number above 0 and at most 1"),
        ("--gpu-memory-utilization much", "invalid"),
    ],
)
def test_what_is_not_simulated_is_refused(arguments: str, message: str) -> None:
    with pytest.raises(CannotStart, match="--vllm-args: ") as refused:
        limits(arguments)
    assert message in str(refused.value)


def test_arguments_that_only_change_costs_are_those_of_a_profile() -> None:
    assert limits("--enforce-eager --block-size 32 --compilation-config '{\"mode\": 0}'") == limits("")


def test_arguments_that_change_costs_need_measured_ones() -> None:
    with pytest.raises(CannotStart, match="--quantization changes costs, which are computed without it"):
        limits("--seed 1 --quantization fp8", is_measured=False)
    assert limits("--seed 1 --enable-prefix-caching", is_measured=False) == limits("")
