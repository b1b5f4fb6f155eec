"""What is settled when a text engine starts: how its decoder is run, how its KV memory is laid out, how large a step is."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from triptych.engine.decoder.attention import PACKED_ATTENTION
from triptych.engine.decoder.cached_passes import CachedPasses
from triptych.engine.decoder.decode_graphs import DecodeGraphs, cuda_recorder
from triptych.engine.decoder.flash import FLASH_BLOCK_TOKENS, has_paged_kernel
from triptych.engine.decoder.kv import KvCache, KvShape
from triptych.engine.decoder.passes import PackedPasses, Passes, Work
from triptych.engine.families.halves import TextHalf
from triptych.errors import EngineFailure
from triptych.families.model_files import BadModel
from triptych.policy.batching import MEASURED_SHARE, largest_within

logger = logging.getLogger(__name__)

_PACKED_LAYERS = frozenset({"full_attention", "sliding_attention"})
_BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class KvOptions:
    """Of each, None takes what suits the device."""

    block_tokens: int | None = None
    contiguous: bool | None = None
    """Whether a sequence's blocks are kept beside each other, and a known beginning copied rather than shared."""


@dataclass(frozen=True, slots=True)
class Made:
    """A way to run the decoder, and the KV memory that it has."""

    passes: Passes
    blocks: int
    block_tokens: int
    contiguous: bool
    fixed_blocks: int = 0
    """What a sequence takes beside its tokens."""
    is_cuttable: bool = True
    """Whether a prompt may be computed in chunks."""


@dataclass(frozen=True, slots=True)
class GraphOptions:
    """Record, where the device can, passes that decode up to ``most_rows`` sequences of up to ``most_tokens`` tokens."""

    most_rows: int
    most_tokens: int


def passes_for(
    half: TextHalf,
    kv_cache_bytes: int,
    *,
    device: torch.device,
    options: KvOptions,
    graphs: GraphOptions | None = None,
) -> Made:
    """Packed passes for decoders of full and sliding attention, else one cache for each sequence. Raises BadModel.

    One small pass shows now, not at the first request, that the decoder works so.
    """
    config: Any = half.decoder.config
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    made = (
        _packed(half, kv_cache_bytes, device, options, graphs)
        if kinds <= _PACKED_LAYERS
        else _cached(half, kv_cache_bytes, device, options)
    )
    (result,) = _probe(made, half, 1)
    if isinstance(result, EngineFailure):
        raise BadModel("the language model cannot be run: its first pass fails")
    return made


def measured_budget(made: Made, half: TextHalf, tpot_slo_s: float, *, most: int, least: int) -> int:
    """The most tokens of a prompt that one pass computes within the objective (HydraInfer section 4.2), with room to spare."""
    measured_pass_s(made, half, least)
    return largest_within(
        MEASURED_SHARE * tpot_slo_s, most, lambda tokens: measured_pass_s(made, half, tokens), least=least
    )


def measured_pass_s(made: Made, half: TextHalf, tokens: int) -> float:
    """How long one pass over so many tokens of a prompt takes, while nothing else runs."""
    return fastest_s(lambda: _probe(made, half, tokens))


def fastest_s(work: Callable[[], object]) -> float:
    """The shorter of two times that it takes: what disturbs a measurement makes it longer."""
    times_s = []
    for _ in range(2):
        began_s = time.perf_counter()
        work()
        times_s.append(time.perf_counter() - began_s)
    return min(times_s)


def _probe(made: Made, half: TextHalf, tokens: int) -> Sequence[object]:
    """Compute a prompt in memory that nobody has yet; waits until it is done."""
    table = range(made.fixed_blocks + -(-tokens // made.block_tokens))
    plan = half.plan([0] * tokens, [])
    results = made.passes.run([Work("probe", [0] * tokens, plan, 0, table, True, True, False)])
    made.passes.drop(["probe"])
    return results


def _packed(
    half: TextHalf, kv_cache_bytes: int, device: torch.device, options: KvOptions, graphs: GraphOptions | None
) -> Made:
    config: Any = half.decoder.config
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    dtype = half.decoder.dtype
    shape = KvShape(config.num_hidden_layers, config.num_key_value_heads, head_size, dtype)
    paged = has_paged_kernel(device, dtype) and options.block_tokens in {None, FLASH_BLOCK_TOKENS}
    block_tokens = options.block_tokens or (FLASH_BLOCK_TOKENS if paged else _BLOCK_TOKENS)
    if not (paged and half.decodes_alike):
        graphs = None
    spare = graphs is not None
    cache = KvCache(shape, nbytes=kv_cache_bytes, block_tokens=block_tokens, device=device, spare=spare)
    config._attn_implementation = PACKED_ATTENTION  # noqa: SLF001 - transformers' documented switch
    contiguous = device.type == "cpu" if options.contiguous is None else options.contiguous
    recorded = None if graphs is None else _recorded(half, cache, graphs)
    passes = PackedPasses(half, cache, device=device, paged=paged, graphs=recorded)
    return Made(passes, cache.blocks, block_tokens, contiguous)


def _recorded(half: TextHalf, cache: KvCache, options: GraphOptions) -> DecodeGraphs | None:
    """None, and said so, where the decoder does in a pass what cannot be recorded."""
    try:
        return DecodeGraphs(
            half,
            cache,
            most_rows=options.most_rows,
            most_tokens=options.most_tokens,
            record=cuda_recorder(cache.keys.device),
        )
    except Exception:  # whatever a decoder of transformers and CUDA make of it
        logger.warning("decoding cannot be recorded as CUDA graphs: it runs step by step", exc_info=True)
        return None


def _cached(half: TextHalf, kv_cache_bytes: int, device: torch.device, options: KvOptions) -> Made:
    passes = CachedPasses(half, device=device)
    try:
        token_nbytes, fixed_nbytes = passes.cache_nbytes()
    except Exception as error:
        kinds = sorted(set(half.decoder.config.layer_types))
        raise BadModel(f"a language model with layers of the kinds {kinds} cannot be run: {error}") from error
    block_tokens = options.block_tokens or _BLOCK_TOKENS
    block_nbytes = token_nbytes * block_tokens or fixed_nbytes or 1
    blocks = kv_cache_bytes // block_nbytes
    if not blocks:
        raise ValueError(f"a KV cache of {kv_cache_bytes} bytes holds no block of {block_tokens} tokens")
    fixed_blocks = max(1, -(-fixed_nbytes // block_nbytes))  # at least 1: nothing that is counted so can be shared
    return Made(passes, blocks, block_tokens, True, fixed_blocks, is_cuttable=False)
