"""States of the sequences of a ``PerSequenceModelRunner``, as segments: what transformers' caches have, whatever their layers are.

What a cache consists of is learned from those of two short prompts. Tensors that have floats are the state. What differs
otherwise must be the number of positions, and all else is the same in every cache. A decoder of which that is not so, or that
does not go on from a copy as from the original, transfers nothing.
"""

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import transformers

from triptych.domain.embedding import DType
from triptych.domain.kv_segment import KvSegment
from triptych.domain.sequence_state import HEADER_NBYTES, StateKind, StateTensor
from triptych.engine.decoder.kv_access import BatchKvAccess
from triptych.engine.decoder.per_sequence_runner import PROBE_TOKENS, PerSequenceModelRunner
from triptych.engine.decoder.sequence import EngineSequence
from triptych.engine.tensors import TORCH_DTYPES, domain_dtype
from triptych.errors import EngineFailure
from triptych.machine.text.running_batch import RunningBatch

logger = logging.getLogger(__name__)

_FLOATS = frozenset({DType.F32, DType.F16, DType.BF16})
_LAYERS = "layers"
_ORIGINAL, _COPY = "original", "copy"

_Place = tuple[Any, ...]
"""Attributes, keys and indexes that lead from a cache to a value."""


class UnknownState(Exception):
    """A cache is not as the two that it was learned from say."""


class SequenceStates:
    """Copies the states of a runner's sequences to memory and back."""

    def __init__(self, runner: PerSequenceModelRunner, model_revision: str, prompt: Sequence[int]) -> None:
        """Learns from a text's first ``PROBE_TOKENS``. Raises UnknownState for a decoder whose caches have something else."""
        self._runner = runner
        few, many = runner.probe_caches(prompt)
        found = dict(_values(few))
        others = dict(_values(many))
        if found.keys() != others.keys():
            raise UnknownState("caches of two prompts are built differently")
        tensors: dict[_Place, StateTensor] = {}
        self._counts: list[_Place] = []
        """Where a cache has its number of positions."""
        for place, value in found.items():
            pair = value, others[place]
            if any(isinstance(each, torch.Tensor) and each.dim() for each in pair):
                tensors[place] = _state_tensor(place, *pair, window=_window(few, place))
            elif all(map(_is_number, pair)) and tuple(map(int, pair)) == PROBE_TOKENS:
                self._counts.append(place)
            elif not _are_equal(*pair):
                raise UnknownState(f"{_name(place)} is {pair[0]} and {pair[1]} after prompts of {PROBE_TOKENS} tokens")
        self._places = list(tensors)
        self._constants = {
            place: value for place, value in found.items() if place not in tensors and place not in self._counts
        }
        self._empty = few
        """Cache without its state."""
        for place in self._places:
            _put(few, place, None)
        # What is in a cache is of transformers' making.
        self.kind = StateKind(f"{model_revision} transformers {transformers.__version__}", tuple(tensors.values()))

    def export(self, sequence_id: str, positions: int, memory: memoryview) -> None:
        """Copy the state after ``positions`` to ``memory``, of ``kind.nbytes(positions)``. Raises UnknownState."""
        values = dict(_values(self._runner.cache(sequence_id)))
        if values.keys() != {*self._places, *self._counts, *self._constants}:
            raise UnknownState("the cache is built differently")
        if any(int(values[place]) != positions for place in self._counts):
            raise UnknownState(f"the state is not that after {positions} positions")
        if not all(_are_equal(values[place], value) for place, value in self._constants.items()):
            raise UnknownState("what is the same in every cache has changed")
        memory[:HEADER_NBYTES] = self.kind.header(positions)
        for place, part in zip(self._places, self._parts(positions, memory), strict=True):
            value = values[place]
            if value.shape != part.shape or value.dtype != part.dtype:
                raise UnknownState(f"{_name(place)} is {value.dtype} {list(value.shape)}, not {list(part.shape)}")
            part.copy_(value)

    def load(self, sequence_id: str, positions: int, memory: memoryview) -> bool:
        """Give a sequence the state that ``export`` has copied. False, changing nothing, if ``memory`` has another one."""
        if len(memory) != self.kind.nbytes(positions) or memory[:HEADER_NBYTES] != self.kind.header(positions):
            return False
        cache = copy.deepcopy(self._empty)
        device = self._runner.device
        owned = bytearray(memory) if memory.readonly else memory  # torch takes no read-only memory
        for place, part in zip(self._places, self._parts(positions, owned), strict=True):
            _put(cache, place, part.to(device, copy=True))
        for place in self._counts:
            value = _at(cache, place)
            _put(cache, place, torch.full_like(value, positions) if isinstance(value, torch.Tensor) else positions)
        self._runner.take(sequence_id, cache)
        return True

    def _parts(self, positions: int, memory: memoryview | bytearray) -> Iterator[torch.Tensor]:
        flat = torch.frombuffer(memory, dtype=torch.uint8)
        for tensor, offset in self.kind.places(positions):
            part = flat[offset : offset + tensor.nbytes_at(positions)]
            yield part.view(TORCH_DTYPES[tensor.dtype]).view(tensor.shape_at(positions))


def learned_states(
    runner: PerSequenceModelRunner,
    model_revision: str,
    prompt: Sequence[int],
    are_close: Callable[[torch.Tensor, torch.Tensor], bool],
    are_close_resumed: Callable[[torch.Tensor, torch.Tensor], bool],
) -> SequenceStates | None:
    """The states of a runner's sequences; None, with a logged reason, if they cannot be copied.

    ``prompt``: a text of more than ``PROBE_TOKENS``. ``are_close``: whether logits are equal but for rounding.
    ``are_close_resumed``: the same where prompts are divided within the tokens that linear attention computes together.
    """
    try:
        states = SequenceStates(runner, model_revision, prompt)
        positions = PROBE_TOKENS[-1]
        runner.probe(_ORIGINAL, prompt[:positions])
        memory = memoryview(bytearray(states.kind.nbytes(positions)))
        states.export(_ORIGINAL, positions, memory)
        states.load(_COPY, positions, memory)
        logits = [runner.probe(name, prompt[: positions + 1], positions) for name in (_ORIGINAL, _COPY)]
        if are_close(*logits):
            runner.resumes = _resumes(
                runner, prompt, positions, partial(states.load, _COPY, positions, memory), are_close_resumed
            )
            return states
        reason = "the decoder does not go on from a copy as from the original"
    except Exception as error:  # noqa: BLE001 - transformers' caches and decoders raise many types
        reason = str(error)
    finally:
        runner.drop([_ORIGINAL, _COPY])
    logger.info("sequences cannot be transferred: %s", reason)
    return None


def _resumes(
    runner: PerSequenceModelRunner,
    prompt: Sequence[int],
    positions: int,
    load: Callable[[], bool],
    are_close: Callable[[torch.Tensor, torch.Tensor], bool],
) -> bool:
    """Whether several tokens after a state yield what the prompt does in one pass, and leave a state that does so.

    ``load`` gives ``_COPY`` the state after ``positions``. What follows it is shorter than convolutions, or longer.
    """
    if not runner.is_divisible:
        return False
    runner.resumes = True
    try:
        for end in (positions + 2, positions + 3, len(prompt)):
            load()
            longer = [*prompt[:end], prompt[0]]
            for whole, first in ((longer[:-1], positions), (longer, end)):
                original = runner.probe(_ORIGINAL, whole, first if first == end else 0)
                if not are_close(runner.probe(_COPY, whole, first), original):
                    logger.info("prompts take one pass: %d tokens after a state yield something else", end - positions)
                    return False
    except Exception as error:  # noqa: BLE001 - transformers' decoders raise many types
        logger.info("prompts take one pass: %s", error)
        return False
    else:
        return True


class StateAccess(BatchKvAccess):
    """``ports.KvAccess`` to the states of a batch's sequences."""

    def __init__(self, batch: RunningBatch[EngineSequence], states: SequenceStates) -> None:
        super().__init__(batch)
        self._states = states

    @property
    def kind(self) -> StateKind:
        return self._states.kind

    def _pack(self, sequence: EngineSequence, segment: KvSegment, memory: memoryview) -> None:
        if segment.first or segment.end != sequence.computed:
            raise EngineFailure(f"there is a state after {sequence.computed} positions only, not after {segment.end}")
        try:
            self._states.export(sequence.sequence_id, segment.end, memory)
        except UnknownState as error:
            raise EngineFailure(str(error)) from error

    def _unpack(self, sequence: EngineSequence, segment: KvSegment, memory: memoryview) -> bool:
        """Takes states after the whole prompt only, as no others are sent; and none after the last token, which is computed here."""
        if segment.first or not sequence.prompt_tokens <= segment.end < sequence.length:
            return False
        return self._states.load(sequence.sequence_id, segment.end, memory)


def _values(value: Any, place: _Place = ()) -> Iterator[tuple[_Place, Any]]:
    """The values in a cache, its layers, and their dicts, lists and tuples, with their places."""
    inner: Iterable[tuple[Any, Any]]
    if isinstance(value, dict):
        inner = value.items()
    elif isinstance(value, list | tuple):
        inner = enumerate(value)
    elif hasattr(value, "__dict__") and not isinstance(value, torch.Tensor | type):
        inner = vars(value).items()
    else:
        yield place, value
        return
    for key, each in inner:
        yield from _values(each, (*place, key))


def _at(cache: Any, place: _Place) -> Any:
    value = cache
    for key in place:
        value = value[key] if isinstance(value, dict | list | tuple) else getattr(value, key)
    return value


def _put(cache: Any, place: _Place, value: Any) -> None:
    holder, key = _at(cache, place[:-1]), place[-1]
    if isinstance(holder, dict | list):
        holder[key] = value
    elif isinstance(holder, tuple):
        raise UnknownState(f"{_name(place)} is in a tuple")
    else:
        setattr(holder, key, value)


def _window(cache: Any, place: _Place) -> int | None:
    """Positions of the sliding window of the layer with this value, with the next token; None without one."""
    if place[0] != _LAYERS:
        return None
    window = getattr(_at(cache, place[:2]), "sliding_window", None)
    return window if isinstance(window, int) else None


def _state_tensor(place: _Place, few: Any, many: Any, *, window: int | None) -> StateTensor:
    """How the tensor grows, from its values after prompts of ``PROBE_TOKENS``. Raises UnknownState."""
    name = _name(place)
    if not (isinstance(few, torch.Tensor) and isinstance(many, torch.Tensor)):
        raise UnknownState(f"{name} is not always a tensor")
    dtype = domain_dtype(few.dtype) if few.dtype in TORCH_DTYPES.values() else None
    if dtype not in _FLOATS or few.dtype != many.dtype or few.dim() != many.dim():
        raise UnknownState(f"{name} is {few.dtype} {list(few.shape)} and {many.dtype} {list(many.shape)}")
    growing = [axis for axis, (before, after) in enumerate(zip(few.shape, many.shape, strict=True)) if before != after]
    if not growing:
        return StateTensor(name, dtype, tuple(few.shape))
    axis, *more = growing
    grown = many.shape[axis]
    most = None if window is None else window - 1
    if more or few.shape[axis] != PROBE_TOKENS[0] or grown != min(PROBE_TOKENS[1], most or grown):
        raise UnknownState(f"{name} is {list(few.shape)} and {list(many.shape)} after prompts of {PROBE_TOKENS} tokens")
    if grown < PROBE_TOKENS[1]:
        most = grown
    return StateTensor(name, dtype, (*few.shape[:axis], 0, *few.shape[axis + 1 :]), axis, most)


def _is_number(value: Any) -> bool:
    """An integer, or a tensor of one."""
    if isinstance(value, torch.Tensor):
        return not value.dim() and not value.is_floating_point()
    return isinstance(value, int) and not isinstance(value, bool)


def _are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def _name(place: _Place) -> str:
    return ".".join(map(str, place))
