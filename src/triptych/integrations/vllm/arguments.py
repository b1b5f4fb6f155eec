"""The arguments of a vLLM engine: an operator's, read by vLLM's own parser, and those that Triptych sets."""

import json
import shlex
from argparse import SUPPRESS, Action, ArgumentTypeError
from collections.abc import Callable, Collection, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import fields
from functools import cache, partial
from hashlib import sha256
from io import StringIO
from typing import Any

from vllm.config import CompilationConfig, KVTransferConfig
from vllm.engine.arg_utils import EngineArgs, _expand_json_human_readable_numbers
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser

from triptych.domain.media import Modality
from triptych.engine.checkpoint import Checkpoint
from triptych.engine.compute import ComputeOptions
from triptych.integrations.vllm.accepted import EFFECTS, ENCODER_ARGUMENTS, Effect, flag
from triptych.integrations.vllm.connector import CONNECTOR, MODULE
from triptych.integrations.vllm.kv_connector import KV_CONNECTOR, KV_MODULE
from triptych.runtime.process import CannotStart

ACCEPTED = EFFECTS.keys()

_COMPILATION = frozenset(
    {
        "compile_sizes",
        "cudagraph_capture_sizes",
        "cudagraph_mode",
        "custom_ops",
        "max_cudagraph_capture_size",
        "mode",
    }
)
"""Keys of ``compilation_config`` that can be set. Others name code, files or encoders."""

OWN: Mapping[str, str] = {
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

_CONFIGURATION = "routers and encoders read the model's own configuration"
_LIKE_IT = "response formats and load are not tested with it"
_FIRST_TOKEN = "response formats hold from the first token"  # noqa: S105 - no password
_FILES = "the model is a directory, and --model of the instance says which"
_CODE = "no code is loaded by name"
_ONE_HOST = "an instance runs on one host"

REFUSED: Mapping[str, str] = {
    "kv_transfer_config": "the role of the instance says whether keys and values are transferred",
    "kv_offloading_size": "it is not tested",
    "kv_events_config": "routers follow an instance's load, not its blocks",
    "speculative_config": _LIKE_IT,
    "spec_method": _LIKE_IT,
    "spec_model": _LIKE_IT,
    "spec_tokens": _LIKE_IT,
    "structured_outputs_config": "response formats are Triptych's",
    "reasoning_parser": _FIRST_TOKEN,
    "reasoning_parser_plugin": _FIRST_TOKEN,
    "reasoning_config": _FIRST_TOKEN,
    "trust_remote_code": "no code of a model is run",
    "video_pruning_rate": "items keep all of their tokens",
    "enable_lora": "requests name no adapters",
    "data_parallel_size": "run more instances instead",
    "pipeline_parallel_size": "it is not tested",
    "nnodes": _ONE_HOST,
    "master_addr": _ONE_HOST,
    "distributed_executor_backend": "workers are processes of the instance",
    "device_ids": "CUDA_VISIBLE_DEVICES says which devices",
    "max_logprobs": "requests may ask for 20",
    "logprobs_mode": "log-probabilities are those of the model",
    "logits_processors": "they are not part of an answer's parameters",
    "enable_prompt_embeds": "prompts are token ids",
    "language_model_only": "it is always so",
    "mm_encoder_only": "it is a text instance",
    "mm_processor_kwargs": "no item is processed here",
    "media_io_kwargs": "no item is read here",
    "allowed_local_media_path": "no item is read here",
    "allowed_media_domains": "no item is read here",
    "runner": "it generates",
    "convert": "it generates",
    "stream_interval": "it is --stream-interval-s of the instance",
    "enable_sleep_mode": "an instance is stopped instead",
    "async_scheduling": "vLLM chooses it",
    "max_num_scheduled_tokens": "set max_num_batched_tokens",
    "max_num_queued_reqs": "it is --max-concurrent-requests of the instance",
    "prefix_caching_hash_algo": "tenants and images are kept apart by it",
    "hf_overrides": _CONFIGURATION,
    "hf_config_path": _CONFIGURATION,
    "config_format": _CONFIGURATION,
    "model_impl": "the models are vLLM's own",
    "model_class_overrides": "the models are vLLM's own",
    "model_loader_extra_config": "only safetensors are loaded",
    "generation_config": "defaults and end tokens are the model's own",
    "override_generation_config": "defaults and end tokens are the model's own",
    "tokenizer_mode": "the router tokenizes with the model's own",
    "tokenizer_revision": _FILES,
    "revision": _FILES,
    "code_revision": _FILES,
    "download_dir": _FILES,
    "hf_token": _FILES,
    "worker_cls": _CODE,
    "worker_extension_cls": _CODE,
    "scheduler_cls": _CODE,
    "io_processor_plugin": _CODE,
    "profiler_config": "only vLLM's own server starts its profiler",
    "otlp_traces_endpoint": "traces are Triptych's",
    "watermark_config": "answers are as the model gives them",
}
"""Well-known arguments that would change what an instance promises, with the reason."""

_UNKNOWN = "it is not among the arguments that Triptych has checked"
"""The reason for all others."""

_LEAST_SHARE = 0.01
"""Share of a GPU's memory that must be free where vLLM starts as an encoder. It reserves none."""


def engine_args(
    text: str, checkpoint: Checkpoint, *, model_id: str, compute: ComputeOptions, transfers_kv: bool = False
) -> EngineArgs:
    """VLLM's arguments from a command line such as ``--tensor-parallel-size 2``. ``transfers_kv``: keys and values go to other
    instances, or come from there. Raises CannotStart.
    """
    given = _of_text(text)
    transferring = _transferring(given) if transfers_kv else {}
    try:
        return EngineArgs(
            **given,
            **transferring,
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
    except Exception as error:  # noqa: BLE001 - whatever vLLM raises for a value
        raise CannotStart(f"--vllm-args: {_reason(error)}") from None


def _transferring(given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings for KV transfer. Raises CannotStart for what excludes it."""
    if not current_platform.is_cpu():
        raise CannotStart("engine vllm serves roles P and D on CPUs only: on this device it serves role PD")
    for name, kept in (("tensor_parallel_size", 1), ("kv_cache_dtype", "auto")):
        if given.get(name, kept) != kept:
            raise CannotStart(
                f"--vllm-args: {flag(name)} cannot be set in roles P and D: keys and values are transferred by one worker, in the "
                "data type of the model"
            )
    return {
        "kv_transfer_config": KVTransferConfig(
            kv_connector=KV_CONNECTOR,
            kv_connector_module_path=KV_MODULE,
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
        ),
        # Between two steps none runs, so that what is computed can be copied.
        "async_scheduling": False,
    }


def cost_options(text: str, most: int = 256) -> str:
    """The given arguments that change costs, in one form for all of their spellings; a digest of it where it is longer
    than ``most`` bytes. The tensor-parallel degree is not part of it. Raises CannotStart.
    """
    given = sorted(
        (name, value)
        for name, value in _of_text(text).items()
        if EFFECTS[name] is not Effect.NOTHING and name != "tensor_parallel_size"
    )
    flags = " ".join(f"{flag(name)}={_changes(value)}" for name, value in given)
    return flags if len(flags.encode()) <= most else sha256(flags.encode()).hexdigest()


def with_step_tokens(text: str, tokens: int) -> str:
    """The command line of an engine whose steps have room for so many tokens. Raises CannotStart."""
    given = _of_text(text)
    most = max(tokens, *(given.get(name) or 0 for name in ("max_num_seqs", "max_num_batched_tokens")))
    return f"{text} --max-num-batched-tokens {most}"


def encoder_args(
    text: str, checkpoint: Checkpoint, *, model_id: str, compute: ComputeOptions, normalizes: bool = False
) -> EngineArgs:
    """VLLM's arguments for its encoder alone, without language model and KV memory. ``normalizes``: pixels are normalized where
    vLLM does, not before. Raises CannotStart.
    """
    takes = " and ".join(map(flag, ENCODER_ARGUMENTS))
    given = _given(text, ENCODER_ARGUMENTS, lambda _: f"an encoder takes {takes}")
    try:
        return EngineArgs(
            **given,
            model=str(checkpoint.directory),
            served_model_name=model_id,
            dtype=compute.dtype,
            load_format="safetensors",
            mm_encoder_only=True,
            limit_mm_per_prompt={modality.value: int(modality is not Modality.VIDEO) for modality in Modality},
            mm_processor_cache_gb=0,
            mm_device_do_normalize=None if normalizes else False,
            # No prompt is scheduled: vLLM's buffers for them are as small as can be.
            max_num_seqs=1,
            max_num_batched_tokens=1,
            gpu_memory_utilization=_LEAST_SHARE,
            enforce_eager=True,
        )
    except Exception as error:  # noqa: BLE001 - whatever vLLM raises for a value
        raise CannotStart(f"--vllm-args: {_reason(error)}") from None


def _of_text(text: str) -> dict[str, Any]:
    """The arguments of a text engine. Raises CannotStart."""
    return _given(text, ACCEPTED, lambda name: OWN.get(name) or REFUSED.get(name) or _UNKNOWN)


def _given(text: str, accepted: Collection[str], why_not: Callable[[str], str]) -> dict[str, Any]:
    """The arguments that the command line names, as vLLM's parser reads them. ``why_not`` is the reason to refuse one.

    Raises CannotStart.
    """
    complaints = StringIO()
    try:
        words = shlex.split(text)
        with redirect_stdout(complaints), redirect_stderr(complaints):
            parsed: dict[str, Any] = {} if "--config" in words else vars(_parser().parse_args(words))
    except SystemExit:
        reason = complaints.getvalue().strip().rpartition("error: ")[2]
        raise CannotStart(f"--vllm-args: {reason or 'cannot be parsed'}") from None
    except IndexError:
        raise CannotStart(f"--vllm-args: {words[-1]} has no value") from None
    except Exception as error:  # noqa: BLE001 - whatever vLLM raises for a value
        raise CannotStart(f"--vllm-args: {_reason(error)}") from None
    if "--config" in words:
        raise CannotStart("--vllm-args: --config cannot be set: arguments are given here, not in a file")
    for name in parsed:
        if name not in accepted:
            raise CannotStart(f"--vllm-args: {flag(name)} cannot be set: {why_not(name)}")
    return parsed


@cache
def _parser() -> FlexibleArgumentParser:
    """VLLM's own. What it returns has the given arguments only, whatever their values."""
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(exit_on_error=False, add_help=False))
    action: Action
    for action in parser._actions:  # noqa: SLF001 - argparse has no other list of them
        action.default = SUPPRESS
        if action.dest == "compilation_config":
            assert callable(action.type)  # by vLLM
            action.type = partial(_restricted, action.type, _COMPILATION, flag(action.dest))
    return parser


def _restricted(read: Callable[[str], Any], accepted: Collection[str], flag: str, text: str) -> Any:
    """The value of an argument with keys, if it sets none but the accepted ones. Raises ArgumentTypeError.

    Keys come first, as vLLM imports what some of the others name when it reads them.
    """
    try:
        keys = json.loads(_expand_json_human_readable_numbers(text))
    except ValueError as error:
        raise ArgumentTypeError(f"{flag} is not JSON: {error}") from None
    for name in keys if isinstance(keys, dict) else ():
        if name not in accepted:
            raise ArgumentTypeError(f"{flag}.{name} cannot be set: only {', '.join(sorted(accepted))} can")
    return read(text)


def _changes(value: Any) -> Any:
    """A configuration's values that are not the default ones; any other value as it is."""
    if not isinstance(value, CompilationConfig):
        return value
    default = CompilationConfig()
    names = [field.name for field in fields(value)]
    return {name: got for name in names if (got := getattr(value, name)) != getattr(default, name)}


def _reason(error: Exception) -> str:
    return str(error).strip() or type(error).__name__
