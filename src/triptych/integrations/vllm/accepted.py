"""The arguments of vLLM's engines that can be set, and what each changes. They are known here where no vLLM is installed."""

from collections.abc import Mapping
from enum import Enum


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


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def effect_of(word: str) -> Effect | None:
    """What a flag of a command line changes; None for one that cannot be set. ``--no-...`` of what changes times leaves them as they are."""
    name, is_negated = _named(word)
    effect = EFFECTS.get(name) if word.startswith("--") else None
    return Effect.NOTHING if is_negated and effect is Effect.TIMES else effect


def _named(word: str) -> tuple[str, bool]:
    """The name of a flag, and whether it is negated."""
    name = word.partition("=")[0].lstrip("-").replace("-", "_")
    is_negated = name.startswith("no_") and name.removeprefix("no_") in EFFECTS
    return name.removeprefix("no_") if is_negated else name, is_negated
