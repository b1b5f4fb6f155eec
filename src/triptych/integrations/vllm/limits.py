"""What bounds the steps and the memory of a vLLM engine by its arguments. Simulations need it where no vLLM is installed."""

import re
import shlex
from argparse import ArgumentError, ArgumentParser, ArgumentTypeError
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from triptych.domain.device import Device
from triptych.integrations.vllm.accepted import EFFECTS, Effect, effect_of, flag
from triptych.runtime.process import CannotStart

MEMORY_SHARE = 0.92
"""Of a device's memory, unless ``--gpu-memory-utilization`` is given."""
_GIB = 1 << 30
_MULTIPLES: Mapping[str, int] = {
    **{letter: 1000**power for power, letter in enumerate("kmgt", 1)},
    **{letter: 1024**power for power, letter in enumerate("KMGT", 1)},
}
_SHARES = ("gpu_memory_utilization",)
_SHORT: Mapping[str, str] = {"tensor_parallel_size": "-tp"}


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits of an engine, as ``vllm serve`` of the supported release would set them."""

    max_sequences: int
    """Most sequences in one step."""
    token_budget: int
    """Most tokens of one step."""
    context_tokens: int
    """Most tokens of a prompt and its answer."""
    kv_cache_bytes: int | None
    """KV memory of each device; None for what ``memory_share`` leaves."""
    memory_share: float


def engine_limits(
    arguments: str, device: Device, *, degree: int, context_tokens: int, is_measured: bool
) -> EngineLimits:
    """``context_tokens``: of the model; ``degree``: of tensor parallelism; ``is_measured``: costs are those of a profile. Raises CannotStart
    for arguments that are not simulated.
    """
    given = _given(arguments, is_measured=is_measured)
    if (tensor_parallel := given.get("tensor_parallel_size", degree)) != degree:
        raise CannotStart(f"--vllm-args: --tensor-parallel-size is {tensor_parallel}, --tensor-parallel says {degree}")
    usual_sequences, usual_tokens = _usual(device, degree)
    context_tokens = min(context_tokens, given.get("max_model_len", context_tokens))
    sequences = given.get("max_num_seqs", usual_sequences)
    tokens = given.get("max_num_batched_tokens", min(usual_tokens, sequences * context_tokens))
    if "max_num_seqs" not in given:
        sequences = min(sequences, tokens)
    return EngineLimits(
        max_sequences=min(sequences, given.get("max_num_active_seqs", sequences)),
        token_budget=tokens,
        context_tokens=context_tokens,
        kv_cache_bytes=given.get("kv_cache_memory_bytes"),
        memory_share=given.get("gpu_memory_utilization", MEMORY_SHARE),
    )


def _usual(device: Device, degree: int) -> tuple[int, int]:
    """Sequences and tokens of a step, unless they are given."""
    if device.kind == "cpu":
        return 128 * degree, 2048 * degree
    if device.memory_nbytes >= 160 * _GIB:
        return 1024, 16_384
    if device.memory_nbytes >= 70 * _GIB and not device.name.startswith("a100"):
        return 1024, 8192
    return 256, 2048


def _given(arguments: str, *, is_measured: bool) -> Mapping[str, Any]:
    parser = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in [name for name, effect in EFFECTS.items() if effect is Effect.BOUNDS]:
        words = [flag(name), *([_SHORT[name]] if name in _SHORT else [])]
        parser.add_argument(*words, type=_share if name in _SHARES else _count)
    try:
        parsed, others = parser.parse_known_args([_dashed(word) for word in shlex.split(arguments)])
    except (ArgumentError, ValueError) as error:
        raise CannotStart(f"--vllm-args: {error}") from None
    effects = {word.partition("=")[0]: effect_of(word) for word in others if word.startswith("-")}
    if unknown := [word for word, effect in effects.items() if effect in (None, Effect.BOUNDS, Effect.OTHER_BOUNDS)]:
        raise CannotStart(f"--vllm-args: {unknown[0]} is not simulated")
    if not is_measured and (costly := [word for word, effect in effects.items() if effect is Effect.TIMES]):
        raise CannotStart(
            f"--vllm-args: {costly[0]} changes costs, which are computed without it: give measured --profiles"
        )
    return {name: value for name, value in vars(parsed).items() if value is not None}


def _dashed(word: str) -> str:
    name, equals, value = word.partition("=")
    return (name.replace("_", "-") if word.startswith("--") else name) + equals + value


def _share(text: str) -> float:
    share = float(text)
    if not 0 < share <= 1:
        raise ArgumentTypeError(f"{text!r} is not a number above 0 and at most 1")
    return share


def _count(text: str) -> int:
    """As vLLM reads a number: 4096, 4k or 4K."""
    match = re.fullmatch(r"(\d+)([kmgtKMGT]?)", text)
    if match is None or not int(match[1]):
        raise ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(match[1]) * _MULTIPLES.get(match[2], 1)
