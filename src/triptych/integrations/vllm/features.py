"""A request's items in vLLM's terms, for any model: each contiguous run of an item's rows is a feature of its own.

A feature has no pixels. Its rows come by the connector, and its fields say only what M-RoPE needs: what the encoder has sent
beside the rows. vLLM asserts within its step that those fields are there, and a failure ends the engine: so the model itself
is asked for a prompt's positions before a request enters.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from math import prod
from typing import Any, Self

import torch
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)

from triptych.domain.embedding import EMBEDS, DType, TensorSpec
from triptych.domain.engine import EmbeddingInput, EngineRequest
from triptych.domain.media import Modality
from triptych.engine.families.item_processor import exceeds, layer_keys
from triptych.engine.tensors import embedding_tensors
from triptych.errors import InvalidRequest
from triptych.families.base import Family
from triptych.families.generic import MOST_EXTRA_VALUES
from triptych.families.qwen3_vl import deepstack
from triptych.families.qwen_vision import ROTARY
from triptych.integrations.vllm.items import Item

_HOST = torch.device("cpu")
_KEPT = MultiModalBatchedField(keep_on_cpu=True)
"""Positions are computed on the host, and also for items that the prefix cache covers, whose other fields vLLM drops."""

_MOST_PRODUCT = 1 << 24
"""Largest product of a row of a tensor beside the rows, such as a grid's patches: vLLM's models compute positions for as many."""

Tensors = Mapping[str, torch.Tensor]
FindFault = Callable[[list[int], list[MultiModalFeatureSpec]], str]
"""Says why the model cannot compute a prompt's positions; empty if it can."""


class ItemForm:
    """The tensors that an item brings: rows for the model, and small ones from which positions are computed."""

    def __init__(self, hidden_size: int, dtype: DType, *, layers: int) -> None:
        """``layers`` is the number of tensors that are added after layers of the model (DeepStack)."""
        self._hidden_size, self._dtype = hidden_size, dtype
        self._names = (EMBEDS, *map(deepstack, range(layers)))

    @classmethod
    def of_model(cls, hidden_size: int, dtype: DType, config: Any) -> Self:
        """``config`` is the model's, as vLLM has read it."""
        return cls(hidden_size, dtype, layers=len(layer_keys(config)))

    def accepts(self, tokens: int, tensors: Sequence[TensorSpec]) -> bool:
        """Whether an item of ``tokens`` positions may have such tensors."""
        given = {spec.name: spec for spec in tensors}
        shape = (tokens, self._hidden_size)
        rows = [given.pop(name, None) for name in self._names]
        return (
            len(given) + len(rows) == len(tensors)
            and rows == [TensorSpec(name, self._dtype, shape) for name in self._names]
            and all(
                spec == TensorSpec(ROTARY, DType.I32, (tokens, 3))
                if spec.name == ROTARY
                else prod(spec.shape) <= MOST_EXTRA_VALUES
                for spec in given.values()
            )
        )

    def embedding(self, tensors: Tensors) -> torch.Tensor:
        """The rows [tokens, width] that vLLM's own encoder would make: DeepStack rows follow in the last dimension."""
        rows = [tensors[name] for name in self._names]
        return rows[0] if len(rows) == 1 else torch.cat(rows, dim=-1)

    def extras(self, tensors: Tensors) -> Tensors:
        """The tensors beside the rows."""
        return {name: tensor for name, tensor in tensors.items() if name not in self._names}


@dataclass(frozen=True, slots=True)
class PlacedItem:
    """A run of an item's rows and the prompt positions that it fills."""

    item: Item
    feature: MultiModalFeatureSpec


class Features:
    """Makes the items that enter a vLLM engine."""

    def __init__(
        self, form: ItemForm, family: Family, config: Any, *, largest_item: int, find_fault: FindFault | None
    ) -> None:
        """``config`` is the model's, as vLLM has read it; ``largest_item`` is in tokens. ``find_fault`` is None for a model
        whose positions do not depend on items.
        """
        self._form = form
        audio_only = set(family.replacement_targets) == {Modality.AUDIO}
        self._modality = (Modality.AUDIO if audio_only else Modality.IMAGE).value
        self._config = config
        self._largest_item = largest_item
        self._find_fault = find_fault
        self._nameless = count()
        """Numbers the items without identity, as vLLM's caches go by it."""

    def place(self, request: EngineRequest, positions: Sequence[Sequence[int]]) -> list[PlacedItem]:
        """The request's items, copied, in the order of the prompt; ``positions`` are those that each fills.

        Raises InvalidRequest for items that vLLM or the model does not take, EngineFailure for values that are not finite.
        """
        placed: list[PlacedItem] = []
        for given, filled in zip(request.embeddings, positions, strict=True):
            placed += self._runs(given, filled)
        placed.sort(key=lambda item: item.feature.mm_position.offset)
        if placed and self._find_fault is not None:
            fault = self._find_fault(list(request.token_ids), [item.feature for item in placed])
            if fault:
                raise InvalidRequest(f"the model cannot place the prompt's items: {fault}")
        return placed

    def _runs(self, given: EmbeddingInput, positions: Sequence[int]) -> list[PlacedItem]:
        tensors = embedding_tensors(given, self._form.accepts, _HOST)
        embedding, extras = self._form.embedding(tensors), self._form.extras(tensors)
        name = given.key.hex() or f"nameless-{next(self._nameless)}"
        runs = contiguous_runs(positions)
        placed: list[PlacedItem] = []
        for run in runs:
            offset, length = positions[run.start], run.stop - run.start
            if length > self._largest_item:
                raise InvalidRequest(
                    f"an item has {length} tokens, vLLM's encoder cache takes {self._largest_item}: "
                    "raise max_num_batched_tokens"
                )
            identifier = name if len(runs) == 1 else f"{name}/{run.start}+{length}"
            rows = (
                embedding if len(runs) == 1 else embedding[run].clone()
            )  # alone in its storage, as it is sent to workers
            modality, fields = self._fields(extras, run)
            data = {key: MultiModalFieldElem(data=field, field=_KEPT) for key, field in fields.items()}
            feature = MultiModalFeatureSpec(
                data=MultiModalKwargsItem(data) if data else None,
                modality=modality,
                identifier=identifier,
                mm_position=PlaceholderRange(offset=offset, length=length),
                mm_hash=identifier,
            )
            placed.append(PlacedItem(Item(identifier, rows), feature))
        return placed

    def _fields(self, extras: Tensors, run: slice) -> tuple[str, Tensors]:
        """A run's modality and its fields by their names in vLLM."""
        if self._find_fault is None:
            return self._modality, {}
        if (rotary := extras.get(ROTARY)) is not None:
            vision = self._config.vision_config
            return grid_fields(rotary[run], vision.spatial_merge_size, getattr(vision, "tokens_per_second", 1.0))
        if any(not tensor.numel() or exceeds(tensor, _MOST_PRODUCT) for tensor in extras.values()):
            raise InvalidRequest("an item has a size that none has")
        # Processors give one item in a batch of one.
        return self._modality, {
            name: tensor[0] if tensor.dim() and len(tensor) == 1 else tensor for name, tensor in extras.items()
        }


def contiguous_runs(positions: Sequence[int]) -> list[slice]:
    """The parts of ascending positions that have no gap, as slices of them."""
    starts = [at for at, position in enumerate(positions) if not at or position != positions[at - 1] + 1]
    return [slice(start, end) for start, end in zip(starts, [*starts[1:], len(positions)], strict=True)]


def grid_fields(rotary: torch.Tensor, merge: int, positions_per_s: float) -> tuple[str, Tensors]:
    """The modality and grid of rows with rotary positions [rows, 3]. Rows of several times are a video.

    ``merge`` x ``merge`` patches are a row; in a second the position in time grows by ``positions_per_s``. Raises InvalidRequest for
    positions that no grid has.
    """
    height, width = (int(rotary[:, axis].max()) + 1 for axis in (1, 2))
    times = rotary[:: max(1, height * width), 0].tolist()
    fits = min(height, width) > 0 and len(times) * height * width == len(rotary)
    if not fits or not torch.equal(rotary, _grid(times, height, width)):
        raise InvalidRequest("an item has rotary positions that none has")
    grid = torch.tensor([len(times), height * merge, width * merge])
    if len(times) == 1:
        return Modality.IMAGE.value, {"image_grid_thw": grid}
    seconds = torch.tensor(_step(times) / positions_per_s, dtype=torch.float64)
    return Modality.VIDEO.value, {"video_grid_thw": grid, "second_per_grid_ts": seconds}


def _grid(times: Sequence[int], height: int, width: int) -> torch.Tensor:
    """[times * height * width, 3] int32: time, height and width of each row."""
    axes = (torch.tensor(times, dtype=torch.int32), torch.arange(height).int(), torch.arange(width).int())
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, 2)


def _step(times: Sequence[int]) -> float:
    """A step whose multiples, rounded down, are these times: the middle of all such steps, so that rounding does not matter."""
    least = max(time / number for number, time in enumerate(times) if number)
    most = min((time + 1) / number for number, time in enumerate(times) if number)
    if times[0] or least < 0 or least >= most:
        raise InvalidRequest("a video has times that none has")
    return (least + most) / 2
