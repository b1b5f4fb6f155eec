"""Language models as what they cost, from their section of ``config.json``."""

from collections.abc import Iterable
from itertools import groupby

from triptych.domain.architecture import CrossLayers, DecoderArchitecture, Experts, Layers, Weights, linear
from triptych.families.fields import integer
from triptych.families.model_files import BadModel, Json

_ATTENTION_BIASES = frozenset({"qwen2", "qwen2_vl_text", "qwen2_5_vl_text"})
"""Model types whose queries, keys and values always have biases, and their output never."""
_NORMED_HEADS = frozenset({"gemma3_text", "qwen3", "qwen3_moe", "qwen3_vl_text"})
"""Model types that norm queries and keys."""
_KNOWN = (*_ATTENTION_BIASES, *_NORMED_HEADS, "granite", "llama", "mistral", "mllama_text_model")
_MOST_LAYERS = 10_000
_GEMMA_PATTERN = 6
_MLLAMA_ITEM_TOKENS = 8
"""Embeddings of tokens that have no logits."""


def language_model(text: Json, *, tied: bool) -> DecoderArchitecture:
    """The language model of a configuration with the defaults of its type. ``tied``: its head is its embedding.

    Raises BadModel for a type whose layers are not known here.
    """
    kind = text["model_type"]
    if kind not in _KNOWN:
        raise BadModel(f"text_config.model_type is {kind!r}: costs are known of {', '.join(sorted(_KNOWN))}")
    hidden, vocabulary = integer(text, "hidden_size"), integer(text, "vocab_size")
    count = integer(text, "num_hidden_layers")
    if count > _MOST_LAYERS:
        raise BadModel(f"num_hidden_layers is {count}, at most {_MOST_LAYERS} are counted")
    crossing = set(text["cross_attention_layers"]) if kind == "mllama_text_model" else set()
    layers = tuple(_layers(text, [number for number in range(count) if number not in crossing]))
    head = linear(hidden, vocabulary, bias=False)
    return DecoderArchitecture(
        layers=layers,
        embedding=Weights((vocabulary + (_MLLAMA_ITEM_TOKENS if crossing else 0)) * hidden),
        head=Weights(0, head.used) if tied else head,
        hidden_size=hidden,
        context_length=integer(text, "max_position_embeddings"),
        norm_parameters=hidden,
        heads=integer(text, "num_attention_heads"),
        kv_heads=_kv_heads(text),
        row_values=2 * hidden + max(layer.width + 2 * layer.kv_width for layer in layers) + 2 * _inner(text),
        cross=_cross(text, len(crossing)) if crossing else None,
    )


def whisper_decoder(config: Json, *, tied: bool) -> DecoderArchitecture:
    """The decoder of Whisper, whose layers all attend to the states of a clip. Keys have no biases. Raises BadModel."""
    hidden, inner, vocabulary = (integer(config, name) for name in ("d_model", "decoder_ffn_dim", "vocab_size"))
    count, heads = integer(config, "decoder_layers"), integer(config, "decoder_attention_heads")
    positions = integer(config, "max_target_positions")
    projection, norm, bias = linear(hidden, hidden), Weights(2 * hidden), Weights(hidden)
    keys_values = linear(hidden, 2 * hidden, bias=False) + bias
    feed_forward = linear(hidden, inner) + linear(inner, hidden)
    layers = Layers(count, projection * 2 + keys_values + feed_forward + norm * 2, hidden, hidden)
    head = linear(hidden, vocabulary, bias=False)
    return DecoderArchitecture(
        layers=(layers,),
        embedding=Weights((vocabulary + positions) * hidden),
        head=Weights(0, head.used) if tied else head,
        hidden_size=hidden,
        context_length=positions,
        norm_parameters=norm.stored,
        heads=heads,
        kv_heads=heads,
        row_values=2 * hidden + 3 * hidden + inner,
        cross=CrossLayers(Layers(count, projection * 2 + norm, hidden, hidden), keys_values),
    )


def _layers(text: Json, numbers: Iterable[int]) -> Iterable[Layers]:
    """Layers by their number, equal ones joined: their order says nothing about costs."""
    every = sorted(((_window(text, number) or 0, _is_sparse(text, number)) for number in numbers), reverse=True)
    width, kv_width = _widths(text)
    for (window, sparse), same in groupby(every):
        feed_forward, experts = _experts(text) if sparse else (_feed_forward(text), None)
        weights = _attention(text) + feed_forward + _norms(text)
        yield Layers(len(list(same)), weights, width, kv_width, window or None, experts)


def _widths(text: Json) -> tuple[int, int]:
    size = _head_size(text)
    return integer(text, "num_attention_heads") * size, _kv_heads(text) * size


def _kv_heads(text: Json) -> int:
    return integer({"num_key_value_heads": text["num_attention_heads"], **_given(text)}, "num_key_value_heads")


def _inner(text: Json) -> int:
    """Width of the feed-forward products of a row."""
    if text["model_type"] == "qwen3_moe":
        return integer(text, "moe_intermediate_size") * integer(text, "num_experts_per_tok")
    return integer(text, "intermediate_size")


def _head_size(text: Json) -> int:
    return integer(
        {"head_dim": integer(text, "hidden_size") // integer(text, "num_attention_heads"), **_given(text)}, "head_dim"
    )


def _given(text: Json) -> Json:
    return {name: value for name, value in text.items() if value is not None}


def _attention(text: Json) -> Weights:
    hidden, (width, kv_width) = integer(text, "hidden_size"), _widths(text)
    bias = bool(text.get("attention_bias", False))
    inputs_bias = bias or text["model_type"] in _ATTENTION_BIASES
    inputs = linear(hidden, width + 2 * kv_width, bias=inputs_bias)
    return inputs + linear(width, hidden, bias=bias) + _head_norms(text)


def _head_norms(text: Json) -> Weights:
    return Weights(2 * _head_size(text) if text["model_type"] in _NORMED_HEADS else 0)


def _norms(text: Json) -> Weights:
    return Weights(integer(text, "hidden_size") * (4 if text["model_type"] == "gemma3_text" else 2))


def _feed_forward(text: Json) -> Weights:
    """Gated: three products."""
    hidden, inner = integer(text, "hidden_size"), integer(text, "intermediate_size")
    bias = bool(text.get("mlp_bias", False))
    return linear(hidden, 2 * inner, bias=bias) + linear(inner, hidden, bias=bias)


def _is_sparse(text: Json, number: int) -> bool:
    if text["model_type"] != "qwen3_moe" or number in text["mlp_only_layers"]:
        return False
    return (number + 1) % integer(text, "decoder_sparse_step") == 0


def _experts(text: Json) -> tuple[Weights, Experts]:
    hidden, inner = integer(text, "hidden_size"), integer(text, "moe_intermediate_size")
    experts = Experts(
        integer(text, "num_local_experts", "num_experts"), integer(text, "num_experts_per_tok"), 3 * hidden * inner
    )
    weights = linear(hidden, experts.count, bias=False)
    return weights + Weights(experts.count * experts.each, experts.active * experts.each), experts


def _window(text: Json, number: int) -> int | None:
    """Positions that a layer sees, or None for all."""
    window = text.get("sliding_window")
    if window is None:
        return None
    kind, types = text["model_type"], text.get("layer_types")
    if kind.startswith("qwen") and not text.get("use_sliding_window", False):
        return None
    if types:
        slides = types[number] == "sliding_attention"
    elif kind.startswith("qwen"):
        slides = number >= integer(text, "max_window_layers")
    elif kind == "gemma3_text":
        pattern = text.get("sliding_window_pattern", text.get("_sliding_window_pattern", _GEMMA_PATTERN))
        slides = (number + 1) % pattern != 0
    else:
        slides = True
    return integer(text, "sliding_window") if slides else None


def _cross(text: Json, count: int) -> CrossLayers:
    hidden, (width, kv_width) = integer(text, "hidden_size"), _widths(text)
    gates, head_norms = Weights(2), Weights(2 * _head_size(text))
    queries = linear(hidden, width, bias=False) + linear(width, hidden, bias=False)
    weights = queries + _feed_forward(text) + _norms(text) + gates + head_norms
    return CrossLayers(Layers(count, weights, width, kv_width), linear(hidden, 2 * kv_width, bias=False))
