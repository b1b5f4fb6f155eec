"""Media encoders as what they cost: parameters, and the floating-point operations of each item, by family.

Each function takes a family and its ``config.json`` and returns an ``Encoder``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

from triptych.domain.architecture import Layers, Weights, Work, linear, work_of
from triptych.domain.media import MediaInfo, Shard
from triptych.families.anyres import AnyRes
from triptych.families.base import Family, units_of
from triptych.families.defaults import AUDIO_DEFAULTS, QFORMER_DEFAULTS, VISION_DEFAULTS, WHISPER_DEFAULTS
from triptych.families.fields import integer, section, square
from triptych.families.gemma3 import Gemma3
from triptych.families.granite_speech import GraniteSpeech
from triptych.families.mllama import Mllama
from triptych.families.model_files import BadModel, Json
from triptych.families.qwen_vision import Grid, QwenVision
from triptych.families.voxtral import Voxtral

_TAPS = 3
"""Width of Whisper's convolutions."""
_ROW_MULTIPLE = 8
"""Llama 3.2's encoder pads the rows of a tile to a multiple of this."""


@dataclass(frozen=True, slots=True)
class Encoder:
    """A media encoder with its projector."""

    parameters: int
    depth: int
    """Layers that follow each other."""
    width: int
    """Of its rows."""
    work: Callable[[MediaInfo], Work]
    """Operations of one item. Raises InvalidMedia."""

    @property
    def row_values(self) -> int:
        """Most values that a row has at once: its own, those of the layer before, and usually four times as many inside."""
        return 6 * self.width


@dataclass(frozen=True, slots=True)
class _Tower:
    """A vision transformer over tiles of one size."""

    parameters: int
    depth: int
    tile: Work
    patches: int
    """Of a tile."""
    hidden_size: int


# --- images in tiles of one size --------------------------------------------------------------------------------------


def _layers(fields: Json, *, attention_bias: bool = True, more: int = 0) -> Layers:
    """Layers of a vision transformer with two norms and biases; ``more``: further parameters of each."""
    hidden, inner = integer(fields, "hidden_size"), integer(fields, "intermediate_size")
    attention = linear(hidden, 3 * hidden, bias=attention_bias) + linear(hidden, hidden)
    weights = attention + linear(hidden, inner) + linear(inner, hidden) + Weights(4 * hidden + more)
    return Layers(integer(fields, "num_hidden_layers"), weights, hidden, hidden)


def _patch(fields: Json, hidden: int, *, bias: bool) -> Weights:
    """The convolution that turns a patch into a row."""
    return linear(integer(fields, "num_channels") * square(fields, "patch_size") ** 2, hidden, bias=bias)


def _whole(layers: Layers, rows: int) -> Work:
    """Rows that all attend to each other."""
    return layers.work(rows, rows * rows)


def _clip(fields: Json) -> _Tower:
    hidden = integer(fields, "hidden_size")
    patches = (square(fields, "image_size") // square(fields, "patch_size")) ** 2
    patch, layers = _patch(fields, hidden, bias=False), _layers(fields)
    around = hidden + (patches + 1) * hidden + 4 * hidden  # class, positions, two norms
    return _Tower(
        patch.stored + around + layers.count * layers.weights.stored,
        layers.count,
        work_of(patches, patch) + _whole(layers, patches + 1),
        patches,
        hidden,
    )


def _siglip(fields: Json, tile_px: int | None = None) -> _Tower:
    """``tile_px``: side of a tile, where it is smaller than the encoder's largest."""
    hidden, side = integer(fields, "hidden_size"), square(fields, "patch_size")
    positions = (square(fields, "image_size") // side) ** 2
    patches = ((tile_px or square(fields, "image_size")) // side) ** 2
    patch, layers = _patch(fields, hidden, bias=True), _layers(fields)
    parameters = patch.stored + positions * hidden + 2 * hidden + layers.count * layers.weights.stored
    tile = work_of(patches, patch) + _whole(layers, patches)
    if fields.get("vision_use_head", False):
        inner = integer(fields, "intermediate_size")
        query = linear(hidden, hidden) * 2 + linear(hidden, inner) + linear(inner, hidden)
        keys = linear(hidden, 2 * hidden)
        parameters += query.stored + keys.stored + 3 * hidden  # the query itself and a norm
        tile += work_of(1, query) + work_of(patches, keys) + Work(0, 4 * hidden * patches)
    return _Tower(parameters, layers.count, tile, patches, hidden)


def _in_tiles(
    tower: _Tower, projector: Weights, rows: int, tiles: Callable[[MediaInfo], int], more_parameters: int = 0
) -> Encoder:
    """``rows`` of a tile go through the projector."""
    tile = tower.tile + work_of(rows, projector)
    parameters = tower.parameters + projector.stored + more_parameters
    return Encoder(parameters, tower.depth, tower.hidden_size, lambda info: tile * tiles(info))


def _llava(family: Family, config: Json) -> Encoder:
    """LLaVA 1.5, LLaVA-NeXT and LLaVA-OneVision."""
    kind = "siglip_vision_model" if family.model_type == "llava_onevision" else "clip_vision_model"
    fields = section(config, "vision_config", kind, VISION_DEFAULTS)
    tower = _clip(fields) if fields["model_type"] == "clip_vision_model" else _siglip(fields)
    one_vision = family.model_type == "llava_onevision"
    layer = config.get("vision_feature_layer", -1 if one_vision else -2)
    selected = tower.hidden_size * (1 if isinstance(layer, int) else len(layer))
    bias, hidden = bool(config.get("multimodal_projector_bias", True)), family.hidden_size
    projector = linear(selected, hidden, bias=bias) + linear(hidden, hidden, bias=bias)
    strategy = config.get("vision_feature_select_strategy", "full" if one_vision else "default")
    with_class = fields["model_type"] == "clip_vision_model" and strategy == "full"

    def tiles(info: MediaInfo) -> int:
        if not isinstance(family, AnyRes):
            return 1
        units = len(family.units(info))
        return len(family.part(info, Shard(0, units, units)).tiles)

    newline = hidden if isinstance(family, AnyRes) else 0
    return _in_tiles(tower, projector, tower.patches + with_class, tiles, newline)


def _internvl(family: Family, config: Json) -> Encoder:
    fields = section(config, "vision_config", "internvl_vision", VISION_DEFAULTS)
    hidden, ratio = integer(fields, "hidden_size"), config.get("downsample_ratio", 0.5)
    bias = bool(fields["attention_bias"])
    head_norms = 2 * hidden if fields["use_qk_norm"] else 0
    norms = -2 * hidden if fields["norm_type"] == "rms_norm" else 0
    layers = _layers(fields, attention_bias=bias, more=2 * hidden + head_norms + norms)
    patches = (square(fields, "image_size") // square(fields, "patch_size")) ** 2
    patch = _patch(fields, hidden, bias=True)
    around = hidden * (
        1
        + bool(fields["use_mask_token"])
        + (patches + 1) * bool(fields["use_absolute_position_embeddings"])
        + 2 * (not fields["use_mean_pooling"])
    )
    tower = _Tower(
        patch.stored + around + layers.count * layers.weights.stored,
        layers.count,
        work_of(patches, patch) + _whole(layers, patches + 1),
        patches,
        hidden,
    )
    joined = hidden * round(1 / ratio) ** 2
    projector = linear(joined, family.hidden_size) + linear(family.hidden_size, family.hidden_size)
    return _in_tiles(tower, projector, round(patches * ratio**2), lambda info: len(units_of(family, info)), 2 * joined)


def _gemma3(family: Gemma3, config: Json) -> Encoder:
    tower = _siglip(section(config, "vision_config", "siglip_vision_model", VISION_DEFAULTS))
    projector = linear(tower.hidden_size, family.hidden_size, bias=False)
    return _in_tiles(tower, projector, family.tokens_per_image, lambda _: 1, tower.hidden_size)


def _idefics3(family: Any, config: Json) -> Encoder:
    """Idefics3 and SmolVLM."""
    fields = section(config, "vision_config", f"{family.model_type}_vision", VISION_DEFAULTS)
    tower = _siglip(fields, family.tile_px)
    joined = tower.hidden_size * config.get("scale_factor", 2) ** 2
    projector = linear(joined, family.hidden_size, bias=False)
    return _in_tiles(tower, projector, family.tokens_per_tile, lambda info: len(units_of(family, info)))


def _mllama(family: Mllama, config: Json) -> Encoder:
    """All tiles of a canvas attend to each other, with the rows that pad each."""
    fields = section(config, "vision_config", "mllama_vision_model", VISION_DEFAULTS)
    hidden, tiles, states = integer(fields, "hidden_size"), family.max_tiles, family.states_per_tile
    arrangements = len(fields["supported_aspect_ratios"] or range(8)) + 1
    inner = integer(fields, "intermediate_size")
    layer = linear(hidden, 4 * hidden, bias=False) + linear(hidden, inner) + linear(inner, hidden) + Weights(4 * hidden)
    layers = Layers(integer(fields, "num_hidden_layers"), layer, hidden, hidden)
    over_all = Layers(integer(fields, "num_global_layers"), layer + Weights(2), hidden, hidden)
    patch = _patch(fields, hidden, bias=False)
    projector = linear(integer(fields, "vision_output_dim"), family.hidden_size)
    embeddings = arrangements * tiles * hidden * (states + 2) + states * hidden + 3
    parameters = patch.stored + hidden + embeddings + 4 * hidden + projector.stored
    parameters += sum(stack.count * stack.weights.stored for stack in (layers, over_all))
    rows = tiles * ceil(states / _ROW_MULTIPLE) * _ROW_MULTIPLE
    work = work_of(tiles * (states - 1), patch) + work_of(tiles * states, projector)
    work += _whole(layers, rows) + _whole(over_all, rows) + Work(2 * rows * rows)  # the last is the mask's
    return Encoder(parameters, layers.count + over_all.count, hidden, lambda _: work)


# --- images and videos of any shape -----------------------------------------------------------------------------------


def _qwen(family: QwenVision, config: Json) -> Encoder:
    """Qwen2-VL, Qwen2.5-VL and Qwen3-VL: attention within each temporal patch, in some layers within windows."""
    kind = family.model_type  # type: ignore[attr-defined]  # the families that inherit it have one
    fields = {**VISION_DEFAULTS[kind], **config.get("vision_config", {})}
    hidden = integer(fields, "embed_dim" if kind == "qwen2_vl" else "hidden_size")
    depth, merge = integer(fields, "depth"), family.patches.merge
    layer = linear(hidden, 3 * hidden) + linear(hidden, hidden)
    if kind == "qwen2_5_vl":
        inner = integer(fields, "intermediate_size")
        layer += linear(hidden, inner) * 2 + linear(inner, hidden) + Weights(2 * hidden)
        norm = hidden
    else:
        inner = int(hidden * fields["mlp_ratio"]) if kind == "qwen2_vl" else integer(fields, "intermediate_size")
        layer += linear(hidden, inner) + linear(inner, hidden) + Weights(4 * hidden)
        norm = 2 * hidden
    patch = linear(
        prod(
            (integer(fields, "in_channels"), integer(fields, "temporal_patch_size"), integer(fields, "patch_size") ** 2)
        ),
        hidden,
        bias=kind == "qwen3_vl",
    )
    joined = hidden * merge**2
    merger = linear(joined, joined) + linear(joined, family.hidden_size)
    stacked = len(fields.get("deepstack_visual_indexes", ()))
    parameters = patch.stored + depth * layer.stored + merger.stored + norm + stacked * (merger.stored + 2 * joined)
    if kind == "qwen3_vl":
        parameters += integer(fields, "num_position_embeddings") * hidden
    whole = depth if kind != "qwen2_5_vl" else len(set(fields["fullatt_block_indexes"]) & set(range(depth)))
    window = integer(fields, "window_size") // family.patches.side // merge if whole < depth else 0
    every, in_windows = Layers(whole, layer, hidden, hidden), Layers(depth - whole, layer, hidden, hidden)

    def work(info: MediaInfo) -> Work:
        grid = family.grid(info)
        rows = grid.frames * grid.rows * grid.columns
        done = work_of(rows, patch) + work_of(rows // merge**2 * (1 + stacked), merger)
        done += every.work(rows, grid.frames * (grid.rows * grid.columns) ** 2)
        return done + (in_windows.work(rows, _pairs_in_windows(grid, merge, window)) if window else Work())

    return Encoder(parameters, depth, hidden, work)


def _pairs_in_windows(grid: Grid, merge: int, window: int) -> int:
    """Pairs of patches that share a window of ``window`` by ``window`` tokens; those at the edges are smaller."""

    def squares(tokens: int) -> int:
        full, rest = divmod(tokens, window)
        return full * window**2 + rest**2

    return grid.frames * squares(grid.rows // merge) * squares(grid.columns // merge) * merge**4


# --- sounds -----------------------------------------------------------------------------------------------------------


def _whisper_encoder(width: int, inner: int, count: int, mels: int, positions: int) -> tuple[int, Work]:
    """Parameters of a Whisper encoder, and what a window of ``positions`` rows costs."""
    first, second = linear(_TAPS * mels, width), linear(_TAPS * width, width)
    attention = linear(width, 3 * width, bias=False) + linear(width, width) + Weights(2 * width)
    weights = attention + linear(width, inner) + linear(inner, width) + Weights(4 * width)
    layers = Layers(count, weights, width, width)
    parameters = first.stored + second.stored + positions * width + 2 * width + count * weights.stored
    return parameters, work_of(2 * positions, first) + work_of(positions, second) + _whole(layers, positions)


def _whisper(family: Family, config: Json) -> Encoder:  # noqa: ARG001
    fields = {**WHISPER_DEFAULTS, **config}
    names = ("d_model", "encoder_ffn_dim", "encoder_layers", "num_mel_bins", "max_source_positions")
    width, inner, count, mels, positions = (integer(fields, name) for name in names)
    parameters, window = _whisper_encoder(width, inner, count, mels, positions)
    return Encoder(parameters, count, width, lambda _: window)


def _qwen2_audio(family: Family, config: Json) -> Encoder:
    fields = section(config, "audio_config", "qwen2_audio_encoder", AUDIO_DEFAULTS)
    encoder = _whisper(family, fields)
    projector = linear(encoder.width, family.hidden_size)
    projected = work_of(integer(fields, "max_source_positions") // 2, projector)
    parameters = encoder.parameters + projector.stored
    return Encoder(parameters, encoder.depth, encoder.width, lambda info: encoder.work(info) + projected)


def _voxtral(family: Voxtral, config: Json) -> Encoder:
    fields = section(config, "audio_config", "voxtral_encoder", AUDIO_DEFAULTS)
    width, inner = integer(fields, "d_model", "hidden_size"), integer(fields, "intermediate_size")
    count, positions = integer(fields, "num_hidden_layers"), integer(fields, "max_source_positions")
    parameters, work = _whisper_encoder(width, inner, count, integer(fields, "num_mel_bins"), positions)
    projector = linear(inner, family.hidden_size, bias=False) + linear(
        family.hidden_size, family.hidden_size, bias=False
    )
    window = work + work_of(family.tokens_per_window, projector)
    return Encoder(parameters + projector.stored, count, width, lambda info: window * len(family.units(info)))


def _granite_speech(family: GraniteSpeech, config: Json) -> Encoder:
    """A conformer whose rows attend within blocks, then a transformer of queries for each window of rows."""
    fields = section(config, "encoder_config", "granite_speech_encoder", AUDIO_DEFAULTS)
    hidden, count, block = (integer(fields, name) for name in ("hidden_dim", "num_layers", "context_size"))
    width = integer(fields, "num_heads") * integer(fields, "dim_head")
    inner, wide = hidden * integer(fields, "feedforward_mult"), hidden * integer(fields, "conv_expansion_factor")
    taps = integer(fields, "conv_kernel_size")
    feed_forward = linear(hidden, inner) + linear(inner, hidden) + Weights(2 * hidden)
    inputs, output = linear(hidden, 3 * width, bias=False), linear(width, hidden)
    positions = Weights((2 * integer(fields, "max_pos_emb") + 1) * integer(fields, "dim_head"))
    convolution = linear(hidden, 2 * wide) + Weights(wide * taps, wide * taps) + linear(wide, hidden)
    convolution += Weights(2 * wide + 2 * hidden)  # two norms
    row = feed_forward * 2 + output + convolution + Weights(4 * hidden) + positions
    first, middle = linear(integer(fields, "input_dim"), hidden), linear(hidden, integer(fields, "output_dim"))
    middle += linear(integer(fields, "output_dim"), hidden)
    queries = _Queries.load(family, config, hidden)

    def work(info: MediaInfo) -> Work:
        frames = (info.samples_at(family.sample_rate_hz) // family.hop + 1) // 2
        blocks = ceil(frames / block)
        done = work_of(frames, first) + work_of(frames, middle) + work_of(frames * count, row)
        done += work_of(blocks * block * count, inputs)
        done += Work(0, count * 6 * width * blocks * block**2)  # of which a third for relative positions
        return done + queries.window * ceil(frames / family.window_frames) + queries.once

    parameters = first.stored + middle.stored + count * (row.stored + inputs.stored) + queries.parameters
    return Encoder(parameters, count + queries.depth, hidden, work)


@dataclass(frozen=True, slots=True)
class _Queries:
    """The projector of Granite Speech: queries that attend to each other and to a window of rows."""

    parameters: int
    depth: int
    window: Work
    once: Work
    """Up to the first attention to rows, the queries of all windows are the same."""

    @classmethod
    def load(cls, family: GraniteSpeech, config: Json, rows_width: int) -> "_Queries":
        fields = {**QFORMER_DEFAULTS, **config.get("projector_config", {})}
        hidden, inner, count = (
            integer(fields, name) for name in ("hidden_size", "intermediate_size", "num_hidden_layers")
        )
        taken, keys = integer(fields, "encoder_hidden_size"), family.window_frames
        if taken != rows_width:
            raise BadModel(f"projector_config.encoder_hidden_size is {taken}, the encoder makes rows of {rows_width}")
        crossing = len(range(0, count, integer(fields, "cross_attention_frequency")))
        output = linear(hidden, hidden) + Weights(2 * hidden)
        attention = linear(hidden, 3 * hidden) + output
        across, of_rows = linear(hidden, hidden) + output, linear(taken, 2 * hidden)
        feed_forward = linear(hidden, inner) + linear(inner, hidden) + Weights(2 * hidden)
        projection, tokens = linear(hidden, family.hidden_size), family.tokens_per_window
        text = count * feed_forward.stored if fields["use_qformer_text_input"] else 0
        parameters = count * (attention.stored + feed_forward.stored) + crossing * (across.stored + of_rows.stored)
        parameters += text + 2 * hidden + tokens * hidden + projection.stored
        once = work_of(tokens, attention + linear(hidden, hidden)) + Work(0, 4 * hidden * tokens**2)
        work = work_of(tokens * (count - 1), attention) + work_of(tokens * count, feed_forward)
        work += work_of(tokens * crossing, output) + work_of(tokens * (crossing - 1), linear(hidden, hidden))
        work += work_of(keys * crossing, of_rows) + work_of(tokens, projection)
        pairs = (count - 1) * tokens**2 + crossing * tokens * keys
        return cls(parameters, count, work + Work(0, 4 * hidden * pairs), once)


_ENCODERS: Mapping[str, Callable[[Any, Json], Encoder]] = {
    "gemma3": _gemma3,
    "granite_speech": _granite_speech,
    "idefics3": _idefics3,
    "internvl": _internvl,
    "llava": _llava,
    "llava_next": _llava,
    "llava_onevision": _llava,
    "mllama": _mllama,
    "qwen2_5_vl": _qwen,
    "qwen2_audio": _qwen2_audio,
    "qwen2_vl": _qwen,
    "qwen3_vl": _qwen,
    "smolvlm": _idefics3,
    "voxtral": _voxtral,
    "whisper": _whisper,
}


def encoder_of(family: Family, config: Json) -> Encoder:
    """The encoder of a family's configuration. Raises BadModel for a family whose operations are not known here."""
    read = _ENCODERS.get(family.model_type)
    if read is None:
        raise BadModel(f"costs are not known of {family.model_type!r}, only of: {', '.join(sorted(_ENCODERS))}")
    return read(family, config)
