"""Both halves of any model of transformers, by its own forward method.

Whatever a multimodal model does before its language model, it does in ``forward``: it embeds the prompt, computes items,
places their rows, and computes positions, masks and further inputs. A ``Recorder`` stands in the language model's place and
keeps what it is called with. The encoder runs ``forward`` on a prompt of one item, whose tokens have no embeddings: the rows at
its placeholders are the item's. The decoder runs it on the prompt without items: what remains is positions, masks and
inputs by token, beside which the rows are placed.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, count
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from triptych.domain.embedding import EMBEDS, DType, TensorSpec
from triptych.domain.media import Modality
from triptych.engine.checkpoint import Checkpoint
from triptych.engine.decoder.model_runner import rotary_axes, turns_long
from triptych.engine.families.adapters import (
    Features,
    ForwardPart,
    LayerRows,
    PlacedItem,
    PromptPlan,
    embedding_rows,
    layer_rows,
    layer_rows_of_pass,
)
from triptych.engine.families.item_media import decoded
from triptych.engine.families.item_processor import ItemProcessor, exceeds, extras, layer_keys, mask_of, sends_lengths
from triptych.engine.media.item import MediaItem
from triptych.engine.tensors import domain_dtype
from triptych.engine.weight_loading import RemovedPart, base_of, filler_of, language_model_name
from triptych.errors import InvalidMedia, InvalidRequest
from triptych.families.base import filled
from triptych.families.generic import BESIDE_IMAGES, MOST_EXTRA_VALUES, GenericFamily
from triptych.families.model_files import BadModel
from triptych.families.qwen3_vl import deepstack

_NOT_CROSSING = frozenset(
    {
        "input_ids",
        "cache",
        "past_key_values",
        "use_cache",
        "return_dict",
        "output_attentions",
        "output_hidden_states",
        "logits_to_keep",
        "cache_position",
    }
)
"""Arguments of a language model that have nothing to do with the prompt."""
_LAYER_LIST, _LAYER_DICT = "deepstack_visual_embeds", "deepstack_features"
"""Arguments of a language model with rows that are added after its layers: a list, with a mask [1, n] of where they belong,
or by layer, with a mask [1, n, 1].
"""
_EXPECTED = frozenset({"inputs_embeds", "position_ids", "attention_mask"})
"""Arguments that every language model takes of a prompt."""
_ROWS = (EMBEDS, "deepstack")
"""How names of tensors begin that have a row per placeholder."""
_ADD_ROWS = frozenset({"molmo2"})
"""Models that add an item's rows to the embeddings of its placeholders; others replace those."""
_MOST_AXES = 3
"""Axes of rotary positions of models that do not say how many there are."""
_FAULTS = (RuntimeError, ValueError, TypeError, AttributeError, IndexError, KeyError)
"""What a forward method may raise."""
_PLAIN_DIMS = 2
"""Of a mask [batch, tokens] that only says which tokens there are."""
_MOST_PRODUCT = 1 << 27
"""Largest product of a row of an extra tensor, such as a grid's patches or an image's pixels: positions are computed for as many."""
_MOST_LENGTH = 1 << 20
"""Longest mask of an item, such as of a clip's frames."""
_MOST_MASK_VALUES = 1 << 24
"""Of the masks of a prompt's items together."""
_MOST_SHARED_ROWS = 2048
"""Rows of items that share a pass. A larger item fills a device alone, and attention to several may be quadratic."""
_SAME, _SAME_HALF = 1e-4, 0.02
"""Share of the largest value by which rows may differ for rounding: in float32, in half precision."""
_PROBE_TOKENS = 5


class _Recorded(Exception):
    """The language model was called."""


class Recorder(nn.Module):
    """Stands in for a language model: keeps what it is called with, and ends the forward method that calls it."""

    def __init__(self, stands_for: Any, embeddings: nn.Module) -> None:
        """``stands_for`` gives the attributes that forward methods read: a language model, or only its configuration."""
        super().__init__()
        self.embed_tokens = embeddings
        self.__dict__["_stands_for"] = stands_for
        self.called_with: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            stands_for = self.__dict__["_stands_for"]
            if name.startswith("get_") and not isinstance(stands_for, nn.Module):
                return _nothing  # what an absent language model would compute of tokens
            return getattr(stands_for, name)

    def get_input_embeddings(self) -> nn.Module:
        embeddings: nn.Module = self.embed_tokens
        return embeddings

    def forward(self, *args: Any, **kwargs: Any) -> None:
        if args:
            kwargs["input_ids"] = args[0]
        self.called_with = {
            name: value for name, value in kwargs.items() if value is not None and name not in _NOT_CROSSING
        }
        raise _Recorded


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


class _EqualEmbeddings(nn.Module):
    """Embeds every token as one value, usually zero, [..., hidden]: on the device and in the data type of a model."""

    def __init__(self, tokens: int, hidden_size: int, like: torch.Tensor) -> None:
        super().__init__()
        self.value = 0.0
        self.weight = like.new_zeros(1).expand(tokens, hidden_size)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.weight.new_full((*input_ids.shape, self.weight.shape[1]), self.value)


class _Forward:
    """The forward method of a base model up to its language model."""

    def __init__(self, base: nn.Module, recorder: Recorder) -> None:
        self._base: Any = base
        self._name, self._recorder = language_model_name(base), recorder
        self._accepts = frozenset(inspect.signature(self._base.forward).parameters)
        self.needs_mask = False
        """Whether it computes positions only where it is given a mask of the prompt's tokens."""

    def __call__(self, **arguments: Any) -> dict[str, Any]:
        """What the language model is called with. Arguments that the method does not take are left out."""
        taken = {name: value for name, value in arguments.items() if name in self._accepts}
        if self.needs_mask:
            taken["attention_mask"] = torch.ones_like(arguments["input_ids"])
        if hasattr(self._base, "rope_deltas"):
            self._base.rope_deltas = None  # of the prompt before
        with _standing_in(self._base, self._name, self._recorder):
            try:
                self._base(**taken)
            except _Recorded:
                called, self._recorder.called_with = self._recorder.called_with, {}
                if "inputs_embeds" not in called:
                    raise BadModel("the model gives its language model tokens, not embeddings") from None
                return called
        raise BadModel("the model's forward method does not call its language model")


class _Filling:
    """In place of ``_Forward``: a language model that has its towers itself embeds, and these fill in items (``filler_of``)."""

    needs_mask = False

    def __init__(self, filler: nn.Module, embeddings: nn.Module) -> None:
        self._filler, self._embeddings = filler, embeddings
        self._accepts = frozenset(inspect.signature(filler.forward).parameters)

    def __call__(self, *, input_ids: torch.Tensor, **arguments: Any) -> dict[str, Any]:
        embeds = self._embeddings(input_ids)
        if not isinstance(self._filler, RemovedPart):
            taken = {name: value for name, value in arguments.items() if name in self._accepts}
            embeds = self._filler(input_ids, inputs_embeds=embeds, **taken)
        return {"inputs_embeds": embeds}


def _forward_of(base: nn.Module, stands_for: Any, embeddings: nn.Module) -> _Forward | _Filling:
    """What is done to a prompt before the first layer. ``stands_for`` and ``embeddings`` as in ``Recorder``."""
    filler = filler_of(base)
    return _Forward(base, Recorder(stands_for, embeddings)) if filler is None else _Filling(filler, embeddings)


@contextmanager
def _standing_in(parent: nn.Module, name: str, module: nn.Module) -> Iterator[None]:
    """A child replaced for one call: the parent keeps it for all that looks at modules."""
    children: dict[str, Any] = parent._modules  # noqa: SLF001 - setting an attribute would register it anew
    replaced, children[name] = children[name], module
    try:
        yield
    finally:
        children[name] = replaced


@contextmanager
def _calls_noted(base: nn.Module) -> Iterator[set[str]]:
    """Names of the children that are called meanwhile."""
    names: set[str] = set()
    noted = [
        child.register_forward_hook(lambda *_, name=name: names.add(name)) for name, child in base.named_children()
    ]
    try:
        yield names
    finally:
        for hook in noted:
            hook.remove()


# --- encoder ---------------------------------------------------------------------------------------------------------


class GenericEncoder:
    """``EncoderAdapter``: the model without its language model."""

    def __init__(self, model: PreTrainedModel, checkpoint: Checkpoint) -> None:
        self._family = generic_family(checkpoint)
        self._processor = processor_of(checkpoint)
        base = base_of(model)
        self._device, self._dtype = model.device, model.dtype
        like = next(model.parameters())
        config: Any = model.config
        text = config.get_text_config()
        self._embeddings = _EqualEmbeddings(text.vocab_size, self._family.hidden_size, like)
        self._forward = _forward_of(base, text, self._embeddings)
        self._placeholders = torch.tensor(sorted(self._family.placeholder_ids))
        self._sharing: set[frozenset[str]] = set()
        """Names of features of items that may share a pass."""
        self._check_rows(checkpoint.files.model_type)

    @property
    def settings(self) -> Mapping[str, Any]:
        return self._processor.settings

    def prepare(self, item: MediaItem) -> Features:
        info, rate = item.info, self._processor.sample_rate_hz
        blank, frames = self._family.blank(info), self._family.sampled_frames(info)
        medium = decoded(item, blank, sample_rate_hz=rate, frames=frames)
        made = self._processor.process(info.modality, medium, place=blank.place)
        expected = filled(self._family.prompt_replacement(info))
        if filled(made.replacement) != expected:
            raise ValueError(
                f"the processor wrote {filled(made.replacement)} placeholders, not the {expected} of its size"
            )
        if self._family.is_beside_images(info):
            return {**made.tensors, BESIDE_IMAGES[self._family.model_type]: torch.empty(0)}
        return made.tensors

    def encode(self, batch: Sequence[Features]) -> list[tuple[torch.Tensor, ...]]:
        """Items that may share a pass do, up to a number of rows."""
        passes: list[list[int]] = []
        last: dict[object, tuple[list[int], int]] = {}
        """By form: the pass that items are added to, and its rows."""
        for at, features in enumerate(batch):
            form = _form(features) if frozenset(features) in self._sharing else at
            rows, (places, taken) = self._rows(features), last.get(form, ([], 0))
            if not places or taken + rows > _MOST_SHARED_ROWS:
                places, taken = [], 0
                passes.append(places)
            places.append(at)
            last[form] = places, taken + rows
        encoded: dict[int, tuple[torch.Tensor, ...]] = {}
        for places in passes:
            encoded.update(zip(places, self._encode([batch[at] for at in places]), strict=True))
        return [encoded[at] for at in range(len(batch))]

    def _encode(self, batch: Sequence[Features]) -> list[tuple[torch.Tensor, ...]]:
        """One pass: a prompt of all the items."""
        features = _joined(batch)
        called, placed = self._called_with(features)
        rows = called["inputs_embeds"][0]
        beside = rows[~placed]
        if beside.any() and not torch.equal(beside, self._without_item(features)[~placed]):
            raise ValueError("the model places an item's rows beside its placeholders")
        layers = called.get(_LAYER_LIST) or called.get(_LAYER_DICT) or ()
        of_layers = layers.values() if isinstance(layers, dict) else layers
        counts = [self._rows(item) for item in batch]
        by_item = zip(*(tensor.split(counts) for tensor in (rows[placed], *of_layers)), strict=True)
        return [
            (*of_item, *(tensor for _, tensor in extras(item))) for of_item, item in zip(by_item, batch, strict=True)
        ]

    def _rows(self, features: Features) -> int:
        return int(torch.isin(features["input_ids"], self._placeholders).sum())

    def _called_with(self, features: Features) -> tuple[dict[str, Any], torch.Tensor]:
        """What the language model is called with for a prompt of one item, and which of its positions are placeholders."""
        ids = features["input_ids"][0]
        given: dict[str, Any] = {name: self._moved(tensor) for name, tensor in features.items()}
        given |= {name: given[name].tolist() for name in self._processor.lists if name in given}
        called = self._forward(**given | _on(self._processor.token_types(ids), self._device))
        placed = torch.isin(ids, self._placeholders)
        return called, placed.to(self._device)

    def _without_item(self, features: Features) -> torch.Tensor:
        """The same prompt's embeddings without the item: of tokens that the model embeds beside its language model."""
        ids = features["input_ids"]
        given = _on(self._processor.token_types(ids[0]), self._device)
        rows: torch.Tensor = self._forward(input_ids=self._moved(ids), **given)["inputs_embeds"][0]
        return rows

    @torch.inference_mode()
    def _check_rows(self, model_type: str) -> None:
        """Raises BadModel if the model places rows otherwise than the decoder will: added to embeddings, or in their place."""
        for modality in self._family.replacement_targets:
            features = self._processor.probe(modality).tensors
            placed_on: list[torch.Tensor] = []
            for value in (0.0, 1.0):
                self._embeddings.value = value
                try:
                    called, placed = self._called_with(features)
                except _FAULTS as error:
                    raise BadModel(f"the model's forward method cannot encode an {modality.value}: {error}") from error
                placed_on.append(called["inputs_embeds"][0][placed])
            self._embeddings.value = 0.0
            if torch.equal(*placed_on) is (model_type in _ADD_ROWS):
                raise BadModel(
                    f"the model does not place rows of an {modality.value} as models of its type are known to"
                )
            self._try_sharing(features, modality)

    def _try_sharing(self, first: Features, modality: Modality) -> None:
        """Find out whether two items, of several sizes if they fit each other, become the same in one pass as in two."""
        second = first
        with suppress(InvalidMedia):  # of a processor that refuses a larger one
            second = self._processor.probe(modality, 2).tensors
        if second is first or _form(first) != _form(second):
            second = {
                **first,
                **{name: tensor.flip(-1) for name, tensor in first.items() if tensor.is_floating_point()},
            }
        try:
            apart = [tensors for features in (first, second) for tensors in self._encode([features])]
            together = self._encode([first, second])
            share = _SAME if self._dtype == torch.float32 else _SAME_HALF
            pairs = zip(chain(*apart), chain(*together), strict=True)
            if all(_are_close(found, expected, share) for expected, found in pairs):
                self._sharing.add(frozenset(first))
        except _FAULTS:
            return

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._device, self._dtype) if tensor.is_floating_point() else tensor.to(self._device)


def _is_by_token(name: str, batch: Sequence[Features]) -> bool:
    return all(features[name].shape == features["input_ids"].shape for features in batch)


def _form(features: Features) -> object:
    """Equal for items whose features can be joined along their first dimension."""
    return tuple(
        (name, tensor.dtype, tensor.dim(), tensor.shape[1:])
        for name, tensor in sorted(features.items())
        if not _is_by_token(name, [features])
    )


def _joined(batch: Sequence[Features]) -> Features:
    """Features of a prompt of all these items."""
    if len(batch) == 1:
        return batch[0]
    return {
        name: torch.cat([features[name] for features in batch], 1 if _is_by_token(name, batch) else 0)
        for name in batch[0]
    }


def _are_close(found: torch.Tensor, expected: torch.Tensor, share: float) -> bool:
    """Whether tensors are equal but for rounding."""
    most = share * float(expected.abs().max()) if expected.numel() else 0.0
    return found.shape == expected.shape and torch.allclose(found, expected, rtol=0.0, atol=most)


# --- decoder ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Prompt:
    """What a prompt's pass needs beside rows and positions."""

    whole: Mapping[str, Any]
    """Arguments of the language model for a pass over the whole prompt: masks, inputs by token."""
    layers: LayerRows


class GenericDecoder:
    """``UnprovenDecoderAdapter``: the language model, its head, and what the model's forward method has besides towers."""

    def __init__(self, model: PreTrainedModel, checkpoint: Checkpoint) -> None:
        """Raises BadModel if the model's forward method cannot be run without items."""
        self._family = generic_family(checkpoint)
        self._processor = processor_of(checkpoint)
        self._model: Any = model
        self._device = model.device
        base = base_of(model)
        name = language_model_name(base)
        language_model: Any = getattr(base, name)
        has_head = hasattr(language_model, "lm_head") and hasattr(language_model, "model")
        self._decoder: Any = language_model.model if has_head else language_model
        self._embed = self._decoder.get_input_embeddings()
        self._forward = _forward_of(base, self._decoder, self._embed)
        for child in base.children():
            if isinstance(child, RemovedPart):
                child.device, child.dtype = model.device, model.dtype
        self._has_layer_dict = _LAYER_DICT in inspect.signature(self._decoder.forward).parameters
        self._layer_keys = layer_keys(model.config)
        axes = rotary_axes(self._decoder)
        self._axes = axes if axes > 1 else _MOST_AXES
        self._adds_rows = checkpoint.files.model_type in _ADD_ROWS
        self._head = _Head(language_model, "model") if has_head else _Head(model, name if base is model else "model")
        with _calls_noted(base) as parts:
            shape, called = self._called_with_text()
        self._embedding_parts = frozenset(parts) - {name}
        self._by_token = frozenset(
            name
            for name, value in called.items()
            if name not in _EXPECTED and isinstance(value, torch.Tensor) and value.shape[:2] == shape
        )
        """Arguments of the language model that depend on token ids, beside embeddings."""
        self._extras: dict[str, DType] = {}
        """Data types of tensors beside rows that items may have, by name."""
        self._is_packable = self._leaves_masks(self._processor) and not self._by_token and not turns_long(model.config)

    @property
    def decoder(self) -> PreTrainedModel:
        decoder: PreTrainedModel = self._decoder
        return decoder

    @property
    def is_packable(self) -> bool:
        """Whether packed passes may be tried: nothing crosses but rows, positions and rows of layers."""
        return self._is_packable

    @property
    def embedding_parts(self) -> frozenset[str]:
        return self._embedding_parts

    @property
    def looks_ahead(self) -> bool:
        return False

    @property
    def has_spans(self) -> bool:
        return False

    @property
    def supports_cuda_graphs(self) -> bool:
        return True

    def accepts(self, tokens: int, tensors: Sequence[TensorSpec]) -> bool:
        dtype, rows = domain_dtype(self._model.dtype), (tokens, self._family.hidden_size)
        counts = {0, *self._family.facts.layers.values()}
        return any(
            tuple(tensors[: 1 + count])
            == tuple(TensorSpec(name, dtype, rows) for name in (EMBEDS, *map(deepstack, range(count))))
            and all(self._is_extra(spec) for spec in tensors[1 + count :])
            for count in counts
        )

    def _is_extra(self, spec: TensorSpec) -> bool:
        return self._extras.get(spec.name) is spec.dtype and spec.nbytes // spec.dtype.itemsize <= MOST_EXTRA_VALUES

    @torch.inference_mode()
    def plan(self, token_ids: Sequence[int], items: Sequence[PlacedItem]) -> PromptPlan:
        in_order = sorted(items, key=lambda item: item.positions)
        ids = torch.tensor(token_ids)
        for item in in_order:
            if any(_is_beyond(name, tensor) for name, tensor in item.tensors.items() if name in self._extras):
                raise InvalidRequest(f"the item at position {item.positions[0]} of the prompt has a size that none has")
        for name in self._extras:
            lengths = [item.tensors[name] for item in in_order if name in item.tensors]
            lengths = [of_item for of_item in lengths if sends_lengths(name, of_item)]
            if lengths and sum(map(len, lengths)) * max(int(each.max()) for each in lengths) > _MOST_MASK_VALUES:
                raise InvalidRequest("the masks of the prompt's items are larger than any have")
        try:
            called = self._forward(
                input_ids=ids[None].to(self._device),
                **_joined_extras([item.tensors for item in in_order], self._device),
                **_on(self._processor.token_types(ids), self._device),
            )
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise InvalidRequest(f"the model cannot place the prompt's items: {error}") from error
        embeds = called.pop("inputs_embeds")[0]
        rows = embedding_rows(in_order)
        if self._adds_rows:
            rows = {start: added + embeds[start : start + len(added)] for start, added in rows.items()}
        filled_positions = {position for item in in_order for position in item.positions}
        rows |= self._other_rows(ids, embeds, filled_positions)
        positions = _positions(called.pop("position_ids", None), len(token_ids), self._axes)
        depth = max(self._family.facts.layers.values(), default=0)
        with_layers = [item for item in in_order if deepstack(0) in item.tensors]
        layers = layer_rows(with_layers, [deepstack(layer) for layer in range(depth)])
        return PromptPlan(
            rows=rows,
            positions=positions,
            next_position=None if positions is None else int(positions.max()) + 1,
            indivisible=len(token_ids),
            extra=_Prompt({} if self._is_packable else _without_plain_mask(called), layers),
        )

    def inputs(self, parts: Sequence[ForwardPart], rows: int) -> Mapping[str, Any]:
        found: dict[str, Any] = self._layers(parts, rows)
        for part in parts:  # one, where there is more than layers
            if part.first == 0 and not self._is_packable:
                found |= part.plan.extra.whole
            elif self._by_token:
                ids = torch.tensor([list(part.token_ids)], device=self._device)
                types = {name: torch.zeros_like(ids) for name in self._family.facts.token_types}  # as of any answer
                called = self._forward(input_ids=ids, **types)
                found |= {name: called[name] for name in self._by_token if name in called}
        return found

    def _layers(self, parts: Sequence[ForwardPart], rows: int) -> dict[str, Any]:
        of_pass = layer_rows_of_pass([(part, part.plan.extra.layers) for part in parts], rows)
        if of_pass is None:
            return {}
        mask, embeds = of_pass
        if self._has_layer_dict:
            by_layer = dict(zip(self._layer_keys, embeds, strict=True))
            return {_LAYER_DICT: by_layer, "vision_mask": mask[..., None]}
        return {_LAYER_LIST: embeds, "visual_pos_masks": mask}

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head(hidden)

    def _other_rows(self, ids: torch.Tensor, embeds: torch.Tensor, placed: set[int]) -> dict[int, torch.Tensor]:
        """Rows of tokens that the model embeds otherwise than its language model does, by position."""
        usual = self._embed(ids.to(self._device))
        differ = (embeds != usual).any(-1).nonzero().flatten().tolist()
        return {position: embeds[position : position + 1] for position in differ if position not in placed}

    @torch.inference_mode()
    def _called_with_text(self) -> tuple[torch.Size, dict[str, Any]]:
        """The shape of a prompt's ids, and what the language model is called with for it. Raises BadModel."""
        text = next(token for token in count() if token not in self._family.placeholder_ids)
        ids = torch.tensor([[text] * _PROBE_TOKENS], device=self._device)
        try:
            return ids.shape, self._forward(input_ids=ids, **_on(self._processor.token_types(ids[0]), self._device))
        except _FAULTS as error:
            raise BadModel(f"the model's forward method cannot be run without items: {error}") from error

    @torch.inference_mode()
    def _leaves_masks(self, processor: ItemProcessor) -> bool:
        """Whether the model leaves masks to its language model, also around items. Raises BadModel.

        Finds out what items have beside rows, and whether the forward method needs a mask of the tokens to compute positions.
        """
        leaves = True
        for modality in self._family.replacement_targets:
            tensors = processor.probe(modality).tensors
            ids = tensors["input_ids"][0]
            self._extras |= {spec.name: spec.dtype for spec, _ in extras(tensors, most_integers=None)}
            given = _on({"input_ids": ids[None], **processor.token_types(ids)}, self._device)
            given |= _joined_extras([{spec.name: tensor for spec, tensor in extras(tensors)}], self._device)
            try:
                called = self._forward(**given)
                if "position_ids" not in called and not self._forward.needs_mask:
                    self._forward.needs_mask = True
                    called = self._forward(**given)
                    self._forward.needs_mask = "position_ids" in called
            except _FAULTS as error:
                raise BadModel(f"the model's forward method cannot place an {modality.value}: {error}") from error
            leaves = leaves and "attention_mask" not in _without_plain_mask(called)
        return leaves


class _Head:
    """What a model does with the hidden states of the model in it: the head, soft caps, scales."""

    def __init__(self, model: nn.Module, inner: str) -> None:
        """``inner``: the child of ``model`` whose output the head takes."""
        self._model: Any = model
        self._name = inner
        self._hidden = _Hidden()

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        self._hidden.state = hidden[None]
        with _standing_in(self._model, self._name, self._hidden):
            logits: torch.Tensor = self._model(inputs_embeds=hidden[None], use_cache=False, return_dict=True).logits[0]
        return logits


class _Hidden(nn.Module):
    """Stands in for the base model: its output is given."""

    state: torch.Tensor

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG002 - arguments of any base model
        return _Output(self.state)


class _Output(dict[str, Any]):
    """A base model's output of which only the last hidden state is known."""

    def __init__(self, state: torch.Tensor) -> None:
        super().__init__(last_hidden_state=state)

    def __getattr__(self, name: str) -> Any:
        return self.get(name)

    def __getitem__(self, key: Any) -> Any:
        return self.get("last_hidden_state") if key == 0 else super().__getitem__(key)


def generic_family(checkpoint: Checkpoint) -> GenericFamily:
    if not isinstance(checkpoint.family, GenericFamily):
        raise TypeError(f"{checkpoint.family.model_type} has a family of its own")
    return checkpoint.family


def processor_of(checkpoint: Checkpoint) -> ItemProcessor:
    """The model's processor in this process, which from now on also counts for the family."""
    family = generic_family(checkpoint)
    if isinstance(family.processing, ItemProcessor):
        return family.processing
    family.processing.close()
    family.processing = processor = ItemProcessor(checkpoint.files)
    return processor


def _on(tensors: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def _joined_extras(items: Sequence[Mapping[str, torch.Tensor]], device: torch.device) -> dict[str, torch.Tensor]:
    """Each kind of extra tensors of a prompt's items, in their order."""
    names = dict.fromkeys(name for item in items for name in item if not name.startswith(_ROWS))
    joined: dict[str, torch.Tensor] = {}
    for name in names:
        found = [item[name] for item in items if name in item]
        tensors = [tensor.long() if not tensor.is_floating_point() else tensor for tensor in found]
        if all(tensor.shape[1:] == tensors[0].shape[1:] and tensor.dim() for tensor in tensors):
            joined[name] = mask_of(name, torch.cat(tensors).to(device))
    return joined


def _is_beyond(name: str, tensor: torch.Tensor) -> bool:
    """Whether an extra tensor has sizes for which no positions should be computed."""
    if sends_lengths(name, tensor):
        return not tensor.numel() or not 0 <= int(tensor.min()) <= int(tensor.max()) <= _MOST_LENGTH
    return exceeds(tensor, _MOST_PRODUCT)


def _positions(given: torch.Tensor | None, length: int, axes: int) -> torch.Tensor | None:
    """[axes, length]; None where they only number the tokens. One more axis before them numbers the tokens."""
    if given is None:
        return None
    positions = given.reshape(-1, length)[-axes:].cpu()
    if (positions == torch.arange(length)).all():
        return None
    return positions


def _without_plain_mask(called: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments without a mask that only says which tokens there are."""
    mask = called.get("attention_mask")
    masks = [given for given in (mask.values() if isinstance(mask, dict) else (mask,)) if given is not None]
    says_more = any(not isinstance(given, torch.Tensor) or given.dim() > _PLAIN_DIMS for given in masks)
    return {name: value for name, value in called.items() if name != "attention_mask" or says_more}
