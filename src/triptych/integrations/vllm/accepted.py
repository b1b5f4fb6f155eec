"""The arguments of vLLM's engines that can be set, and what each changes. They are known here where no vLLM is installed."""

import json
import re
import shlex
from ast import literal_eval
from collections.abc import Mapping
from enum import Enum
from typing import Any

from triptych.domain.stage import ModelPart
from triptych.runtime.process import CannotStart


class Effect(Enum):
    """What an argument of a text engine changes."""

    BOUNDS = "how much runs in a step, or how much memory there is; simulations follow it"
    OTHER_BOUNDS = "the same, and simulations do not follow it"
    TIMES = "how long a step takes: a measured profile has it"
    PREFIXES = "whether prompts share what is computed of them; simulated ones do not"
    NOTHING = "neither: it is no part of the identity of a profile"


EFFECTS: Mapping[str, Effect] = {
    "attention_backend": Effect.TIMES,
    "block_size": Effect.TIMES,
    "compilation_config": Effect.TIMES,
    "cpu_offload_gb": Effect.TIMES,
    "cudagraph_capture_sizes": Effect.TIMES,
    "cudagraph_metrics": Effect.NOTHING,
    "disable_custom_all_reduce": Effect.TIMES,
    "enable_logging_iteration_details": Effect.NOTHING,
    "enable_mfu_metrics": Effect.NOTHING,
    "enable_prefix_caching": Effect.PREFIXES,
    "enforce_eager": Effect.TIMES,
    "gpu_memory_utilization": Effect.BOUNDS,
    "kv_cache_dtype": Effect.OTHER_BOUNDS,
    "kv_cache_dtype_skip_layers": Effect.TIMES,
    "kv_cache_memory_bytes": Effect.BOUNDS,
    "kv_cache_metrics": Effect.NOTHING,
    "kv_cache_metrics_sample": Effect.NOTHING,
    "long_prefill_token_threshold": Effect.OTHER_BOUNDS,
    "long_prefill_token_threshold_adaptive": Effect.OTHER_BOUNDS,
    "max_cudagraph_capture_size": Effect.TIMES,
    "max_model_len": Effect.BOUNDS,
    "max_num_active_seqs": Effect.BOUNDS,
    "max_num_batched_tokens": Effect.BOUNDS,
    "max_num_seqs": Effect.BOUNDS,
    "num_gpu_blocks_override": Effect.OTHER_BOUNDS,
    "optimization_level": Effect.TIMES,
    "performance_mode": Effect.OTHER_BOUNDS,
    "quantization": Effect.TIMES,
    "safetensors_load_strategy": Effect.NOTHING,
    "seed": Effect.NOTHING,
    "show_hidden_metrics_for_version": Effect.NOTHING,
    "tensor_parallel_size": Effect.BOUNDS,
    "use_tqdm_on_load": Effect.NOTHING,
    "watermark": Effect.OTHER_BOUNDS,
}
"""The arguments of a text engine that can be set."""

ENCODER_ARGUMENTS = ("mm_encoder_attn_backend", "quantization")
"""Arguments of an encoder. Each may change embeddings and their times."""

_TIMES: Mapping[ModelPart, frozenset[str]] = {
    ModelPart.ENCODER: frozenset(ENCODER_ARGUMENTS),
    ModelPart.DECODER: frozenset([name for name, effect in EFFECTS.items() if effect is Effect.TIMES]),
}
_DIGEST = re.compile(r"[0-9a-f]{64}")
_NEXT = re.compile(r" (?=(?:--)?[a-z][a-z_-]*=)")
_MEMBER = re.compile(r"<\w+\.(\w+): ([^>]*)>|\b\w+\.([A-Z]\w*)\b")
"""A member of an enum, as Python shows it."""


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def effect_of(word: str) -> Effect | None:
    """What a flag of a command line changes; None for one that cannot be set. ``--no-...`` of what changes times leaves them as they are."""
    name, is_negated = _named(word)
    effect = EFFECTS.get(name) if word.startswith("--") else None
    return Effect.NOTHING if is_negated and effect is Effect.TIMES else effect


def other_times(part: ModelPart, measured: str, arguments: str) -> tuple[str, ...]:
    """The flags that change times and differ: ``measured`` are the arguments in a profile's identity, ``arguments`` the
    command line of an engine. Raises CannotStart.
    """
    if _DIGEST.fullmatch(measured):
        return ("perhaps all, as the profile has a digest of its own",)
    profiled, given = _profiled(measured), _given(arguments)
    differing = [name for name in _TIMES[part] if not _are_same(profiled.get(name), given.get(name))]
    return tuple([flag(name) for name in sorted(differing)])


def _named(word: str) -> tuple[str, bool]:
    """The name of a flag, and whether it is negated."""
    name = word.partition("=")[0].lstrip("-").replace("-", "_")
    is_negated = name.startswith("no_") and name.removeprefix("no_") in EFFECTS
    return name.removeprefix("no_") if is_negated else name, is_negated


def _profiled(text: str) -> dict[str, Any]:
    """Values by name, of ``--name=value`` or ``name=value`` as Python shows it."""
    values: dict[str, Any] = {}
    for entry in _NEXT.split(text) if text else ():
        name, _, value = entry.partition("=")
        values[_named(name)[0]] = _form(value)
    return values


def _given(arguments: str) -> dict[str, Any]:
    """Values by name, of a command line. Raises CannotStart."""
    values: dict[str, list[str]] = {}
    of_flag: list[str] = []
    try:
        words = shlex.split(arguments)
    except ValueError as error:
        raise CannotStart(f"--vllm-args: {error}") from None
    for word in words:
        if word.startswith("-"):
            name, is_negated = _named(word)
            _, equals, value = word.partition("=")
            of_flag = values[name] = ["False"] if is_negated else [value] if equals else []
        else:
            of_flag.append(word)
    return {
        name: _form("True" if not parts else parts[0] if len(parts) == 1 else repr(parts))
        for name, parts in values.items()
    }


def _form(text: str) -> Any:
    """A value in one form, however it is written: None where it is the same as no value; for each entry, the names that it has."""
    if text in ("False", "None"):
        return None
    try:
        value = json.loads(text)
    except ValueError:
        try:
            value = literal_eval(_MEMBER.sub(lambda found: repr("|".join(filter(None, found.groups()))), text))
        except (ValueError, SyntaxError):
            value = text
    if isinstance(value, dict):
        return {str(key): _names(entry) for key, entry in value.items()}
    return [_names(entry) for entry in value] if isinstance(value, list) else [_names(value)]


def _names(entry: Any) -> frozenset[str]:
    """A member of an enum has two: its name and its value."""
    return frozenset(map(_plain, str(entry).casefold().split("|")))


def _plain(text: str) -> str:
    """A number in one form."""
    try:
        return str(float(text))
    except ValueError:
        return text


def _are_same(first: Any, second: Any) -> bool:
    if type(first) is not type(second) or first is None:
        return first is second
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(first[key] & second[key] for key in first)
    return len(first) == len(second) and all(one & other for one, other in zip(first, second, strict=True))
