"""The arguments of a vLLM engine: an operator's, checked by vLLM's own parser, and those that Triptych sets."""

import shlex
from argparse import ArgumentError
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from typing import Any

from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from triptych.domain.media import Modality
from triptych.engine.checkpoint import Checkpoint
from triptych.engine.compute import ComputeOptions
from triptych.integrations.vllm.connector import CONNECTOR, MODULE
from triptych.runtime.process import CannotStart

_OWN: Mapping[str, str] = {
    "model": "it is --model of the instance",
    "served_model_name": "it is --model-id of the instance",
    "dtype": "it is --dtype of the instance, as encoders must use the same",
    "tokenizer": "the router tokenizes with the model's own",
    "skip_tokenizer_init": "response formats need the tokenizer",
    "limit_mm_per_prompt": "no item is encoded here",
    "enable_mm_embeds": "items come as embeddings",
    "mm_processor_cache_gb": "no item is processed here",
    "ec_transfer_config": "embeddings come from Triptych's encoders",
    "scheduling_policy": "it is by priority",
    "disable_log_stats": "load is read from vLLM's statistics",
    "load_format": "only safetensors are loaded",
}
"""Arguments that Triptych sets, with the reason."""

_UNSUPPORTED: Mapping[str, str] = {
    "kv_transfer_config": "prefill and decode run in one instance",
    "kv_offloading_size": "it is not tested",
    "speculative_config": "response formats and load are not tested with it",
    "spec_method": "response formats and load are not tested with it",
    "spec_model": "response formats and load are not tested with it",
    "spec_tokens": "response formats and load are not tested with it",
    "structured_outputs_config": "response formats are Triptych's",
    "reasoning_parser": "response formats hold from the first token",
    "reasoning_parser_plugin": "response formats hold from the first token",
    "reasoning_config": "response formats hold from the first token",
    "trust_remote_code": "no code of a model is run",
    "video_pruning_rate": "items keep all of their tokens",
    "enable_lora": "requests name no adapters",
    "data_parallel_size": "run more instances instead",
    "pipeline_parallel_size": "it is not tested",
    "max_logprobs": "requests may ask for 20",
    "logprobs_mode": "log-probabilities are those of the model",
    "logits_processors": "they are not part of an answer's parameters",
    "enable_prompt_embeds": "prompts are token ids",
    "language_model_only": "it is always so",
    "mm_encoder_only": "it is a text instance",
    "runner": "it generates",
    "convert": "it generates",
    "stream_interval": "it is --stream-interval-s of the instance",
    "enable_sleep_mode": "an instance is stopped instead",
    "async_scheduling": "vLLM chooses it",
}
"""Arguments that change what an instance promises."""


def engine_args(text: str, checkpoint: Checkpoint, *, model_id: str, compute: ComputeOptions) -> EngineArgs:
    """VLLM's arguments from a command line such as ``--tensor-parallel-size 2``. Raises CannotStart."""
    given = _parsed(text)
    for name, reason in {**_OWN, **_UNSUPPORTED}.items():
        if name in given:
            flag = name.replace("_", "-")
            raise CannotStart(f"--vllm-args: --{flag} cannot be set: {reason}")
    return EngineArgs(
        **given,
        model=str(checkpoint.directory),
        served_model_name=model_id,
        dtype=compute.dtype,
        load_format="safetensors",
        scheduling_policy="priority",
        # No encoder is loaded, and its memory is left to vLLM's KV cache.
        limit_mm_per_prompt={modality.value: 0 for modality in Modality},
        enable_mm_embeds=True,
        mm_processor_cache_gb=0,
        ec_transfer_config={
            "ec_connector": CONNECTOR,
            "ec_connector_module_path": MODULE,
            "ec_role": "ec_consumer",
        },
    )


def _parsed(text: str) -> dict[str, Any]:
    """The arguments that the command line names, as vLLM's parser reads them. Raises CannotStart."""
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(exit_on_error=False, add_help=False))
    told = StringIO()
    try:
        words = shlex.split(text)
        with redirect_stdout(told), redirect_stderr(told):
            parsed = parser.parse_args(words)
    except (ArgumentError, ValueError, TypeError) as error:
        raise CannotStart(f"--vllm-args: {error}") from None
    except SystemExit:
        reason = told.getvalue().strip().rpartition("error: ")[2]
        raise CannotStart(f"--vllm-args: {reason or 'cannot be parsed'}") from None
    defaults = vars(parser.parse_args([]))
    return {name: value for name, value in vars(parsed).items() if value != defaults[name]}
