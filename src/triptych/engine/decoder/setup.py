"""Setup of a text engine: model runner, KV cache layout, CUDA graphs."""

import logging
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, islice
from typing import Any

import torch

from triptych.domain.kv_segment import KvKind
from triptych.engine import product_attention
from triptych.engine.decoder.attention import PACKED_ATTENTION
from triptych.engine.decoder.cuda_graphs import GraphOptions, PassGraphs, cuda_graph_capture
from triptych.engine.decoder.kv_cache import KvCache
from triptych.engine.decoder.model_runner import ForwardInput, ForwardOutput, ModelRunner, best_tokens, turns_long
from triptych.engine.decoder.packed_runner import PackedModelRunner
from triptych.engine.decoder.paged_attention import compile_kernels, has_paged_kernel, head_group
from triptych.engine.decoder.per_sequence_runner import PerSequenceModelRunner
from triptych.engine.decoder.sequence_states import SequenceStates, learned_states
from triptych.engine.families.adapters import DecoderAdapter, UnprovenDecoderAdapter
from triptych.engine.joined_layers import JoinedLinear
from triptych.engine.tensors import domain_dtype
from triptych.engine.worker_threads import WorkerThreads
from triptych.errors import EngineFailure
from triptych.families.model_files import BadModel
from triptych.machine.text.kept_states import BORDER_TOKENS, KeptStates

logger = logging.getLogger(__name__)

_PACKED_LAYERS = frozenset({"full_attention", "sliding_attention"})
_BLOCK_TOKENS = 16
_PROBE_TOKENS = 6
_PROBED = 6
"""Results of the passes that are compared."""
_SAME = 1e-4
"""Largest difference of two logits that are the same but for rounding, in shares of the largest logit."""
_SAME_HALF = 5e-2
"""The same for decoders in 16-bit types."""
_SAME_RESUMED = 1e-3
"""The same where a prompt is divided within the tokens that linear attention computes together: 2e-4 was measured in float32."""
_PROOF = "proof"
_PROVEN_TOKENS = 40
"""Tokens of the prompt by which packed passes are compared with those of transformers, and caches of sequences are learned."""
_MOST_HOST_NBYTES = 4 << 30
"""Most host memory for the kept states of a device with memory of its own."""


@dataclass(frozen=True, slots=True)
class KvOptions:
    """None: the device's default."""

    block_tokens: int | None = None
    contiguous: bool | None = None
    """Whether a sequence's blocks are contiguous, and cached prefixes are copied rather than shared."""
    border_tokens: int = BORDER_TOKENS
    """Tokens between the borders at which states are kept for prefixes."""


@dataclass(frozen=True, slots=True)
class DecoderSetup:
    """A model runner and its KV blocks."""

    runner: ModelRunner
    blocks: int
    block_tokens: int
    contiguous: bool
    cache: KvCache | None = None
    """Cache of the keys and values. None: each sequence has a cache of its own, and blocks are only counted."""
    fixed_blocks: int = 0
    """Blocks per sequence besides those of its tokens."""
    supports_chunked_prefill: bool = True
    """Whether a prompt may be computed in chunks."""
    states: SequenceStates | None = None
    """Of sequences with caches of their own, if these can be copied."""
    keep_states: Callable[[], KeptStates] | None = None
    """Makes the states kept for prefixes, with none in it. None: prompts do not go on from states."""
    joined: Sequence[JoinedLinear] = ()
    """Layers whose parts compute nothing."""


def build_runner(
    adapter: DecoderAdapter,
    kv_cache_bytes: int,
    *,
    device: torch.device,
    options: KvOptions,
    model_revision: str,
    graphs: GraphOptions | None = None,
    threads: WorkerThreads | None = None,
    placeholder_ids: AbstractSet[int] = frozenset(),
) -> DecoderSetup:
    """Packed sequences for decoders with full and sliding attention, else one cache per sequence. Raises BadModel.

    One cache also where a long sequence would change the frequencies of others in its pass.

    ``threads``: for fused layers, which compute float32 on a CPU where the decoder has the structure; None for layers as they are.

    ``placeholder_ids``: tokens that are in no prompt without items.

    A small pass shows at start, not at the first request, that the decoder runs.
    """
    kinds = set(getattr(adapter.decoder.config, "layer_types", None) or ["full_attention"])
    prompt = list(islice((token for token in count() if token not in placeholder_ids), _PROVEN_TOKENS))
    build_cached = partial(_cached, adapter, kv_cache_bytes, device, options, model_revision, prompt)
    build_packed = partial(_packed, adapter, kv_cache_bytes, device, options, model_revision, graphs, threads)
    if not kinds <= _PACKED_LAYERS or turns_long(adapter.decoder.config):
        setup = build_cached()
    elif not isinstance(adapter, UnprovenDecoderAdapter):
        setup = build_packed()
    elif not adapter.is_packable:
        setup = build_cached()
    else:
        setup = _same_as_transformers(build_packed, adapter, prompt, device) or build_cached()
    (result,) = _probe(setup, adapter, 1)
    if isinstance(result, EngineFailure):
        raise BadModel("the language model cannot be run: its first pass fails")
    return setup


def _same_as_transformers(
    build: Callable[[], DecoderSetup], adapter: DecoderAdapter, prompt: Sequence[int], device: torch.device
) -> DecoderSetup | None:
    """What ``build`` makes, if its passes yield what transformers' own caches and masks do; else None, with the decoder as it was."""
    config: Any = adapter.decoder.config
    attention = config._attn_implementation  # noqa: SLF001 - transformers' documented switch
    reference = PerSequenceModelRunner(adapter, device=device)
    expected = _prompt_logits(reference, adapter, prompt, ())
    if expected is None:
        return None
    shapes = reference.cached_shapes(_PROOF)
    reference.drop([_PROOF])
    kind = kv_kind(adapter, "")
    if shapes != [(kind.heads, kind.head_size, kind.head_size)] * kind.layers:
        return None
    try:
        setup = build()
        found = _prompt_logits(setup.runner, adapter, prompt, range(-(-len(prompt) // setup.block_tokens)))
        if found is not None and _are_close(found, expected, _share(adapter)):
            return setup
        difference = "it yields something else"
    except Exception as error:  # noqa: BLE001 - transformers' decoders raise many types
        difference = str(error)
    logger.info("sequences are computed one by one, as packed attention does not suit this decoder: %s", difference)
    config._attn_implementation = attention  # noqa: SLF001
    return None


def _prompt_logits(
    runner: ModelRunner, adapter: DecoderAdapter, prompt: Sequence[int], table: Sequence[int]
) -> torch.Tensor | None:
    """Logits [vocabulary] after a prompt; None if the pass fails."""
    (result,) = runner.run([ForwardInput(_PROOF, prompt, adapter.plan(prompt, []), 0, table, True, True, True)])
    return result.logits.clone() if isinstance(result, ForwardOutput) and result.logits is not None else None


def _share(adapter: DecoderAdapter) -> float:
    return _SAME if adapter.decoder.dtype == torch.float32 else _SAME_HALF


def _are_close(found: torch.Tensor, expected: torch.Tensor, share: float = _SAME) -> bool:
    """Whether logits are equal but for rounding."""
    return torch.allclose(found, expected, rtol=0.0, atol=share * float(expected.abs().max()))


def _probe(setup: DecoderSetup, adapter: DecoderAdapter, tokens: int) -> Sequence[object]:
    """Compute a prompt in free blocks, and wait for the result."""
    table = range(setup.fixed_blocks + -(-tokens // setup.block_tokens))
    plan = adapter.plan([0] * tokens, [])
    results = setup.runner.run([ForwardInput("probe", [0] * tokens, plan, 0, table, True, True, False)])
    setup.runner.drop(["probe"])
    return results


def _packed(
    adapter: DecoderAdapter,
    kv_cache_bytes: int,
    device: torch.device,
    options: KvOptions,
    model_revision: str,
    graphs: GraphOptions | None,
    threads: WorkerThreads | None,
) -> DecoderSetup:
    config: Any = adapter.decoder.config
    dtype = adapter.decoder.dtype
    kind = kv_kind(adapter, model_revision)
    paged = has_paged_kernel(device)
    block_tokens = options.block_tokens or _BLOCK_TOKENS
    if not (paged and adapter.supports_cuda_graphs):
        graphs = None
    spare = graphs is not None
    cache = KvCache(kind, nbytes=kv_cache_bytes, block_tokens=block_tokens, device=device, spare=spare)
    config._attn_implementation = PACKED_ATTENTION  # noqa: SLF001 - transformers' documented switch
    contiguous = device.type == "cpu" if options.contiguous is None else options.contiguous
    runner = PackedModelRunner(adapter, cache, device=device)
    setup = DecoderSetup(runner, cache.blocks, block_tokens, contiguous, cache)
    if paged and _compiles(setup, runner, adapter, cache):
        runner.graphs = None if graphs is None else _captured(adapter, cache, graphs)
    elif device.type == "cpu" and dtype == torch.float32:
        if threads is not None:
            setup = replace(setup, joined=_fuse(runner, adapter, cache, threads))
        if not runner.is_fused:
            runner.by_products = product_attention.is_faster(kind.heads, head_group(config), kind.head_size)
    return setup


def kv_kind(adapter: DecoderAdapter, model_revision: str) -> KvKind:
    """What the decoder's layers keep of a token, by its configuration, where all keep the same."""
    config: Any = adapter.decoder.config
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    dtype = domain_dtype(adapter.decoder.dtype)
    return KvKind(model_revision, dtype, config.num_hidden_layers, config.num_key_value_heads, int(head_size))


def _compiles(setup: DecoderSetup, runner: PackedModelRunner, adapter: DecoderAdapter, cache: KvCache) -> bool:
    """Let the kernels of paged attention compute the passes, if all that are needed can be compiled."""
    config: Any = adapter.decoder.config
    runner.paged, runner.calls = True, {}
    _probe(setup, adapter, 1)
    calls, runner.calls = runner.calls, None
    try:
        compile_kernels(
            cache.keys[0],
            cache.values[0],
            cache.block_tokens,
            heads=config.num_attention_heads,
            windows={call.window for call in calls.values()},
            spans=adapter.has_spans,
        )
    except Exception:  # triton raises many types; a device may have too little memory for a program
        logger.warning("paged attention cannot be compiled, so sequences are gathered: that is slow", exc_info=True)
        runner.paged = False
    return runner.paged


def _fuse(
    runner: PackedModelRunner, adapter: DecoderAdapter, cache: KvCache, threads: WorkerThreads
) -> Sequence[JoinedLinear]:
    """Let fused layers compute the passes, if the decoder has the structure, and they yield the same. Returns the layers that they made."""
    from triptych.engine.decoder import fused_layers  # needs numba

    if (
        cache.blocks < 2 * _PROBE_TOKENS
        or adapter.has_spans
        or not adapter.supports_cuda_graphs
        or not fused_layers.can_fuse(adapter.decoder)
    ):
        return ()
    runner.calls = {}
    expected = _logits(runner, adapter, cache.block_tokens)
    calls, runner.calls = runner.calls, None
    if expected is None or not expected.isfinite().all():
        return ()
    fused = fused_layers.fuse(adapter.decoder, cache, calls, threads)
    runner.is_fused = True
    runner.best = fused_layers.best_tokens
    fused_logits = _logits(runner, adapter, cache.block_tokens)
    if fused_logits is not None and _are_close(fused_logits, expected):
        return fused
    logger.warning("operations between products are not compiled: they would yield something else")
    runner.is_fused, runner.best = False, best_tokens
    fused_layers.unfuse(adapter.decoder)
    return ()


def _logits(runner: PackedModelRunner, adapter: DecoderAdapter, block_tokens: int) -> torch.Tensor | None:
    """Logits [6, vocabulary] of a prompt, and of a pass over the token after it and another prompt. Then of the same at
    the end of the longest context, as what is computed may depend on positions. None if a pass fails.
    """
    tokens, last = range(_PROBE_TOKENS), _PROBE_TOKENS - 1
    blocks = -(-_PROBE_TOKENS // block_tokens)
    first, second = range(blocks), range(blocks, 2 * blocks)
    begin = adapter.plan([0] * _PROBE_TOKENS, [])
    end = replace(
        begin,
        positions=torch.arange(_PROBE_TOKENS)[None] + (adapter.decoder.config.max_position_embeddings - _PROBE_TOKENS),
        next_position=adapter.decoder.config.max_position_embeddings,
    )
    logits: list[torch.Tensor] = []
    for plan in (begin, end):
        alone = [ForwardInput("a", tokens[:last], plan, 0, first, False, True, True)]
        together = [
            ForwardInput("a", tokens[last:], plan, last, first, False, True, True),
            ForwardInput("b", tokens[::-1], plan, 0, second, False, True, True),
        ]
        for inputs in (alone, together):
            results = runner.run(inputs)
            logits += [
                result.logits.clone()
                for result in results
                if isinstance(result, ForwardOutput) and result.logits is not None
            ]
        runner.drop(["a", "b"])
    return torch.stack(logits) if len(logits) == _PROBED else None


def _captured(adapter: DecoderAdapter, cache: KvCache, options: GraphOptions) -> PassGraphs | None:
    """Capture graphs; not compiled, with a logged warning, if that fails. None if the decoder's pass cannot be
    captured.
    """
    try:
        return PassGraphs(adapter, cache, options, capture=cuda_graph_capture(cache.keys.device))
    except Exception:  # transformers' decoders, compilers and CUDA raise many types
        if options.compiled:
            logger.warning("passes cannot be compiled: they are captured as they are", exc_info=True)
            return _captured(adapter, cache, replace(options, compiled=False))
        logger.warning("passes cannot be captured as CUDA graphs: they run eagerly", exc_info=True)
        return None


def _cached(
    adapter: DecoderAdapter,
    kv_cache_bytes: int,
    device: torch.device,
    options: KvOptions,
    model_revision: str,
    prompt: Sequence[int],
) -> DecoderSetup:
    runner = PerSequenceModelRunner(adapter, device=device)
    try:
        token_nbytes, fixed_nbytes = runner.cache_nbytes(prompt)
    except Exception as error:
        kinds = sorted(set(adapter.decoder.config.layer_types))
        raise BadModel(f"a language model with layers of the kinds {kinds} cannot be run: {error}") from error
    block_tokens = options.block_tokens or _BLOCK_TOKENS
    block_nbytes = token_nbytes * block_tokens or fixed_nbytes or 1
    blocks = kv_cache_bytes // block_nbytes
    if not blocks:
        raise ValueError(f"a KV cache of {kv_cache_bytes} bytes holds no block of {block_tokens} tokens")
    fixed_blocks = max(1, -(-fixed_nbytes // block_nbytes))  # at least 1: nothing counted this way can be shared
    share = _share(adapter)
    are_close, are_close_resumed = (partial(_are_close, share=most) for most in (share, max(share, _SAME_RESUMED)))
    states = learned_states(runner, model_revision, prompt, are_close, are_close_resumed)
    keep_states = None
    if states is not None and runner.resumes:
        nbytes = kept_nbytes(kv_cache_bytes, device)
        keep_states = partial(KeptStates, nbytes, states.kind.nbytes, border_tokens=options.border_tokens)
    return DecoderSetup(
        runner,
        blocks,
        block_tokens,
        True,
        fixed_blocks=fixed_blocks,
        supports_chunked_prefill=False,
        states=states,
        keep_states=keep_states,
    )


def kept_nbytes(kv_cache_bytes: int, device: torch.device) -> int:
    """Most bytes of states kept for prefixes, which are in host memory: on a CPU a part of the KV memory."""
    return kv_cache_bytes if device.type == "cpu" else min(kv_cache_bytes, _MOST_HOST_NBYTES)
