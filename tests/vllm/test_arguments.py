"""vLLM's arguments: read by its own parser; only those that Triptych has checked can be set."""

import re
from argparse import Action
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.contract.text_engine_kit import checkpoint
from triptych.engine.compute import ComputeOptions
from triptych.integrations.vllm.arguments import ACCEPTED, OWN, REFUSED, cost_options, encoder_args, engine_args
from triptych.runtime.process import CannotStart

PAGE = Path(__file__).parents[2] / "docs" / "vllm.md"


def read(text: str) -> EngineArgs:
    return engine_args(text, checkpoint(), model_id="m", compute=ComputeOptions())


def test_arguments_are_those_of_vllm() -> None:
    text = "--tensor-parallel-size 2 --max_model_len=512 --quantization fp8 --enforce-eager --seed 3"
    made = engine_args(text, checkpoint(), model_id="m", compute=ComputeOptions(dtype="bfloat16"))
    assert (made.tensor_parallel_size, made.max_model_len, made.quantization) == (2, 512, "fp8")
    assert (made.enforce_eager, made.seed) == (True, 3)
    assert (made.dtype, made.served_model_name, made.model) == ("bfloat16", "m", str(checkpoint().directory))
    assert made.limit_mm_per_prompt == {"image": 0, "video": 0, "audio": 0}


def test_every_spelling_of_an_accepted_argument_is_read() -> None:
    assert read("-tp 2").tensor_parallel_size == 2
    assert read("--tensor-par 2").tensor_parallel_size == 2
    assert read("--no-enable-prefix-caching").enable_prefix_caching is False
    assert read("-O1").optimization_level == read("--optimization-level 1").optimization_level
    for text in ("-cc.mode=0", "--compilation-config.mode 0", "-cc '{\"mode\": 0}'", "--compilation_config.mode=0"):
        assert read(text).compilation_config.mode == 0, text
    assert read("--max-num-batched-tokens 8k").max_num_batched_tokens == 8000


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("--dtype bfloat16", "--dtype cannot be set: it is --dtype of the instance"),
        ("--dtype auto", "--dtype cannot be set: it is --dtype of the instance"),
        ("--model elsewhere", "--model cannot be set"),
        ("--limit-mm-per-prompt.image 4", "--limit-mm-per-prompt cannot be set: no item is encoded here"),
        ("--limit-mm-per-prompt '{}'", "--limit-mm-per-prompt cannot be set: no item is encoded here"),
        ("--enable-lora", "--enable-lora cannot be set: requests name no adapters"),
        ("--no-enable-lora", "--enable-lora cannot be set"),
        (
            '--speculative-config \'{"method": "ngram", "num_speculative_tokens": 2}\'',
            "--speculative-config cannot be set",
        ),
        ("-sc.method ngram", "--speculative-config cannot be set"),
        ("--spec-method ngram --spec-tokens 2", "--spec-method cannot be set"),
        ("--mm-processor-cache-gb 2", "--mm-processor-cache-gb cannot be set: no item is processed here"),
        ("--kv-offloading-size 1", "--kv-offloading-size cannot be set"),
        ("--structured-outputs-config.backend guidance", "--structured-outputs-config cannot be set"),
        ("--reasoning-parser qwen3", "--reasoning-parser cannot be set: response formats hold from the first token"),
        ("--reasoning-config.reasoning_parser qwen3", "--reasoning-config cannot be set"),
        ("--trust-remote-code", "--trust-remote-code cannot be set: no code of a model is run"),
        ("--trust-remote", "--trust-remote-code cannot be set: no code of a model is run"),
        ("--video-pruning-rate 0.3", "--video-pruning-rate cannot be set"),
        ("-pp 2", "--pipeline-parallel-size cannot be set"),
        ("-dp=2", "--data-parallel-size cannot be set: run more instances instead"),
        ("--hf-overrides.architectures+ Other", "--hf-overrides cannot be set: routers and encoders read"),
        ("--worker-cls code.Of", "--worker-cls cannot be set: no code is loaded by name"),
        ("--enable-return-routed-experts", "--enable-return-routed-experts cannot be set: it is not among"),
        ("-cc.backend code.of", "--compilation-config.backend cannot be set: only compile_sizes, "),
        ('-cc \'{"mode": 0, "inductor_passes": {"a": "code.of"}}\'', "inductor_passes cannot be set: only"),
        ("--seed 3 -cc.mode", "-cc.mode has no value"),
        ("-cc.mode 0 -cc.nothing 1", "--compilation-config.nothing cannot be set: only"),
        ("-cc mode", "--compilation-config is not JSON"),
        ("--max-model-len many", "max-model-len"),
        ("--quantization-config '{}'", "--quantization-config cannot be set"),
        ("--config settings.yaml", "--config cannot be set: arguments are given here, not in a file"),
        ("--config=settings.yaml", "--config-format cannot be set"),
        ("serve elsewhere", "unrecognized arguments: serve elsewhere"),
        ("--api-key secret", "unrecognized arguments: --api-key secret"),
        ("--no-such-thing", "unrecognized arguments: --no-such-thing"),
        ("'unbalanced", "No closing quotation"),
    ],
)
def test_other_arguments_are_refused_with_the_reason(text: str, said: str) -> None:
    with pytest.raises(CannotStart, match=re.escape(said)):
        read(text)


def actions() -> Iterator[Action]:
    """Every argument of vLLM's parser."""
    yield from EngineArgs.add_cli_args(FlexibleArgumentParser(add_help=False))._actions


def test_every_argument_of_vllm_is_accepted_set_or_refused() -> None:
    for action in actions():
        if action.dest in ACCEPTED:
            continue
        reason = OWN.get(action.dest) or REFUSED.get(action.dest) or "it is not among the arguments"
        for flag in action.option_strings:
            said = f"--{action.dest.replace('_', '-')} cannot be set: {reason}"
            assert any(said in told(text) for text in values(flag, action)), flag


def values(flag: str, action: Action) -> Iterator[str]:
    """The flag with values one of which vLLM's parser takes."""
    yield flag
    for choice in action.choices or ():
        yield f"{flag} {choice}"
    yield from (f"{flag} {value}" for value in ("1", "x", "'{}'", "true"))
    yield f'{flag} \'{{"method": "ngram", "name": "a", "reasoning_parser": ""}}\''


def told(text: str) -> str:
    with pytest.raises(CannotStart) as error:
        read(text)
    return str(error.value)


def test_the_lists_name_arguments_that_vllm_has() -> None:
    known = {action.dest for action in actions()}
    assert not (ACCEPTED | OWN.keys() | REFUSED.keys()) - known
    assert not ACCEPTED & (OWN.keys() | REFUSED.keys())
    assert not OWN.keys() & REFUSED.keys()


def test_the_documentation_lists_what_can_be_set() -> None:
    section = PAGE.read_text().partition("\n## Arguments\n")[2].partition("\n## ")[0]
    rows = [row for row in section.splitlines() if row.startswith("| ") and "`--" in row]
    can = {name for row in rows if "refused" not in row for name in named(row)}
    cannot = {name for row in rows if "refused" in row for name in named(row)}
    assert can == ACCEPTED
    assert OWN.keys() <= cannot <= OWN.keys() | REFUSED.keys()


def named(row: str) -> set[str]:
    """The arguments in a row's first column."""
    flags = re.findall(r"`--(?:no-)?([a-z-]+)`", row.split("|")[1])
    return {flag.replace("-", "_") for flag in flags}


def test_arguments_that_change_costs_are_told_in_one_form() -> None:
    text = "--max-num-seqs 8 --enforce-eager -cc.mode=0"
    assert cost_options(text) == cost_options("-cc '{\"mode\": 0}' --enforce-eager --max_num_seqs=8 --seed 3")
    assert cost_options(text) != cost_options("--max-num-seqs 8 --enforce-eager")
    assert "--max-num-seqs=8" in cost_options(text)
    assert cost_options("-tp 2 --seed 3") == cost_options("") == ""
    long = "--cudagraph-capture-sizes " + " ".join(str(size) for size in range(1, 200))
    assert len(cost_options(long)) == 64
    assert cost_options(long) != cost_options(f"{long} 200")


def test_an_encoder_loads_no_language_model_and_reserves_nothing_for_it() -> None:
    made = encoder_args("--quantization fp8", checkpoint(), model_id="m", compute=ComputeOptions(dtype="bfloat16"))
    assert (made.quantization, made.dtype, made.model) == ("fp8", "bfloat16", str(checkpoint().directory))
    assert made.mm_encoder_only
    assert made.limit_mm_per_prompt == {"image": 1, "video": 0, "audio": 1}
    assert (made.max_num_seqs, made.max_num_batched_tokens) == (1, 1)


@pytest.mark.parametrize(
    "text", ["--max-model-len 512", "--tensor-parallel-size 2", "--dtype bfloat16", "--mm-processor-cache-gb 2"]
)
def test_an_encoder_has_few_arguments(text: str) -> None:
    said = "cannot be set: an encoder takes --mm-encoder-attn-backend and --quantization"
    with pytest.raises(CannotStart, match=f"--vllm-args: {text.partition(' ')[0]} {said}"):
        encoder_args(text, checkpoint(), model_id="m", compute=ComputeOptions())


@pytest.mark.parametrize("text", ["--tensor-parallel-size 2", "--kv-cache-dtype fp8"])
def test_what_keys_and_values_cannot_be_kv_transferred_with_is_refused_by_name(text: str) -> None:
    def made(*, transfers_kv: bool) -> EngineArgs:
        return engine_args(text, checkpoint(), model_id="m", compute=ComputeOptions(), transfers_kv=transfers_kv)

    assert made(transfers_kv=False).kv_transfer_config is None
    with pytest.raises(CannotStart, match=f"--vllm-args: {text.partition(' ')[0]} cannot be set in roles P and D"):
        made(transfers_kv=True)
