"""Weights of one part of a model in one block of memory, which is given back and filled again while the model stays
(weight offloading).

On a CPU the weights are read again from the checkpoint's files, which the kernel keeps in its page cache while there is
room. On another device a copy in host memory is kept, pinned for CUDA.

Which bytes of the files a parameter has is found by comparing values, as the loader renames and joins what it reads.
Values that no file has are kept in host memory.
"""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch
from torch import nn

from triptych.engine.checkpoint import Checkpoint
from triptych.engine.heap import give_back, trim
from triptych.engine.host_memory import available_nbytes
from triptych.errors import Unavailable

_ALIGNMENT = 64
_PIECE_NBYTES = 8 << 20
"""Copied at once, so that other threads get their turns."""
_HEAD = 16
"""Values by which a tensor is looked up, before all are compared."""
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Data types as safetensors name them."""


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class _Version:
    """Version of a file, which must be the one that was loaded at start."""

    inode: int
    nbytes: int
    changed_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> "_Version":
        return cls(status.st_ino, status.st_size, status.st_mtime_ns)


@dataclass(frozen=True, slots=True)
class _InFile:
    """The values of a parameter in a file."""

    path: Path
    offset: int
    dtype: torch.dtype

    def pieces(self, target: torch.Tensor, descriptor: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Parts of ``target``, which is flat, and what belongs there; read anew."""
        step = _PIECE_NBYTES // self.dtype.itemsize
        for first in range(0, len(target), step):
            part = target[first : first + step]
            values = torch.empty(len(part), dtype=self.dtype)
            read = os.preadv(descriptor, [_bytes_of(values)], self.offset + first * self.dtype.itemsize)
            if read != values.nbytes:
                raise OSError(f"{self.path.name} is cut off")
            yield part, values

    def read_into(self, target: torch.Tensor, descriptor: int) -> None:
        """Fill ``target``, which is flat."""
        if self.dtype != target.dtype:
            for part, values in self.pieces(target, descriptor):
                part.copy_(values)
            return
        memory = _bytes_of(target)
        for first in range(0, len(memory), _PIECE_NBYTES):
            piece = memory[first : first + _PIECE_NBYTES]
            if os.preadv(descriptor, [piece], self.offset + first) != len(piece):
                raise OSError(f"{self.path.name} is cut off")


@dataclass(frozen=True, slots=True)
class _Weight:
    """A parameter's place in the memory, flat, and where its values come from."""

    first: int
    count: int
    dtype: torch.dtype
    source: _InFile | torch.Tensor


class PartWeights:
    """Owner of a part's weights. ``load`` and ``unload`` are called by one thread at a time, and not while the part computes."""

    def __init__(
        self,
        model: nn.Module,
        checkpoint: Checkpoint,
        *,
        free_nbytes: Callable[[], int | None] = available_nbytes,
    ) -> None:
        """Moves the parameters of ``model``, which must be loaded, into one block. ``free_nbytes``: of the host, None if unknown."""
        parameters = list(model.parameters())
        self._device = parameters[0].device
        self._free_nbytes = free_nbytes
        self._versions = {path: _Version.of(path.stat()) for path in checkpoint.weights}
        places, end = list[int](), 0
        for parameter in parameters:
            places.append(end)
            end += -(-parameter.nbytes // _ALIGNMENT) * _ALIGNMENT
        self.nbytes = end
        """Bytes of the block."""
        self._memory = torch.empty(end, dtype=torch.uint8, device=self._device)
        stored = _Stored(checkpoint) if self._is_on_host else None
        weights: list[_Weight] = []
        for parameter, first in zip(parameters, places, strict=True):
            values = parameter.data.contiguous().view(-1)
            place = self._memory[first : first + values.nbytes].view(values.dtype)
            place.copy_(values)
            parameter.data = place.view(parameter.shape)
            source = None if stored is None else stored.find(parameter.data)
            weights.append(_Weight(first, values.numel(), values.dtype, _kept(values) if source is None else source))
        self._weights: Sequence[_Weight] = weights
        self.kept_nbytes = sum(weight.source.nbytes for weight in weights if isinstance(weight.source, torch.Tensor))
        """Bytes of the copies in host memory."""
        self.resident = True
        """Whether the part can compute. Set by the thread that calls ``load`` and ``unload``; others only read it."""
        self.load_s = 0.0
        """Time that the last load took, seconds."""
        self._make: Callable[[], None] = _nothing
        self._free: Callable[[], None] = _nothing
        self.before_unload: Callable[[], None] = _nothing
        self.after_load: Callable[[], None] = _nothing

    def also(
        self,
        *,
        load: Callable[[], None],
        unload: Callable[[], None],
        before_unload: Callable[[], None] = _nothing,
        after_load: Callable[[], None] = _nothing,
    ) -> None:
        """Call ``load`` once the weights are there again, and ``unload`` when they go: what else is in memory because of them.

        ``before_unload`` and ``after_load`` are what the engine itself does then, as in ``ports.UnloadableWeights``.
        """
        self._make, self._free = load, unload
        self.before_unload, self.after_load = before_unload, after_load

    @property
    def _is_on_host(self) -> bool:
        return self._device.type == "cpu"

    @property
    def address(self) -> int:
        """Address of the block. On a host it never changes."""
        return self._memory.data_ptr()

    def unload(self) -> None:
        """Give the memory back. The parameters have no values then."""
        self.resident = False
        self._free()
        if self._is_on_host:
            give_back(self.address, self.nbytes)
        else:
            self._memory.untyped_storage().resize_(0)

    def load(self) -> None:
        """Fill the memory again, in pieces. Raises Unavailable if a file is gone or changed, or memory is short; then nothing is kept."""
        if self.resident:
            return
        began_s = perf_counter()
        try:
            self._load()
            self._make()
        except (OSError, RuntimeError) as error:
            self.unload()
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error).partition("\n")[0]
            name = Path(error.filename).name + ": " if isinstance(error, OSError) and error.filename else ""
            raise Unavailable(f"weights cannot be loaded: {name}{reason}") from error
        self.load_s = perf_counter() - began_s
        self.resident = True

    def measure(self) -> None:
        """Unload and load once, so that ``load_s`` is known and it is known to work. Raises Unavailable."""
        trim()  # the memory that the parameters had before
        self.unload()
        self.load()

    @torch.inference_mode()
    def _load(self) -> None:
        if not self._is_on_host:
            self._memory.untyped_storage().resize_(self.nbytes)
            self._copy_to_device()
            return
        free = self._free_nbytes()
        if free is not None and free < self.nbytes:
            raise OSError(f"they take {self.nbytes} bytes, {free} are free")
        files = {weight.source.path for weight in self._weights if isinstance(weight.source, _InFile)}
        opened: dict[Path, int] = {}
        try:
            for path in sorted(files):
                opened[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                if _Version.of(os.fstat(opened[path])) != self._versions[path]:
                    raise OSError(f"{path.name} has changed since the start")
            for weight in self._weights:
                target = self._place(weight)
                if isinstance(weight.source, torch.Tensor):
                    target.copy_(weight.source)
                else:
                    weight.source.read_into(target, opened[weight.source.path])
        finally:
            for descriptor in opened.values():
                os.close(descriptor)

    def _copy_to_device(self) -> None:
        """Copy to the device on a stream of its own, beside what the device computes."""
        kept = [
            (self._place(weight), weight.source) for weight in self._weights if isinstance(weight.source, torch.Tensor)
        ]
        if self._device.type != "cuda":
            for place, values in kept:
                place.copy_(values)
            return
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]  # as in torch
        stream.wait_stream(torch.cuda.current_stream(self._device))  # who had this memory before may still compute
        with torch.cuda.stream(stream):
            for place, values in kept:
                place.copy_(values, non_blocking=True)
        stream.synchronize()

    def _place(self, weight: _Weight) -> torch.Tensor:
        return self._memory[weight.first : weight.first + weight.count * weight.dtype.itemsize].view(weight.dtype)


class _Stored:
    """The tensors of the checkpoint's files, found by shape and first values."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._tensors = [tensor for tensor in checkpoint.stored_tensors() if tensor.dtype in _DTYPES]
        self._found: dict[torch.dtype, dict[tuple[tuple[int, ...], bytes], list[_InFile]]] = {}
        """Stored tensors by the data type that they are converted to."""

    @torch.inference_mode()
    def find(self, values: torch.Tensor) -> _InFile | None:
        """Place of exactly these values in a file; None if no file has them."""
        if values.dtype not in self._found:
            self._found[values.dtype] = self._index(values.dtype)
        flat = values.view(-1)
        for tensor in self._found[values.dtype].get((tuple(values.shape), bytes(_bytes_of(flat[:_HEAD]))), ()):
            with tensor.path.open("rb") as opened:
                if _is_equal(tensor, flat, opened.fileno()):
                    return tensor
        return None

    def _index(self, dtype: torch.dtype) -> dict[tuple[tuple[int, ...], bytes], list[_InFile]]:
        index: dict[tuple[tuple[int, ...], bytes], list[_InFile]] = {}
        for tensor in self._tensors:
            stored = _InFile(tensor.path, tensor.offset, _DTYPES[tensor.dtype])
            head = torch.empty(min(_HEAD, math.prod(tensor.shape)), dtype=dtype)
            with tensor.path.open("rb") as opened:
                stored_head = [values.to(dtype) for _, values in stored.pieces(head, opened.fileno())]
            index.setdefault((tensor.shape, b"".join(bytes(_bytes_of(part)) for part in stored_head)), []).append(
                stored
            )
        return index


def _is_equal(stored: _InFile, values: torch.Tensor, descriptor: int) -> bool:
    return all(torch.equal(part, read.to(part.dtype)) for part, read in stored.pieces(values, descriptor))


def _kept(values: torch.Tensor) -> torch.Tensor:
    """A copy in host memory."""
    copied = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.device.type == "cuda")
    return copied.copy_(values)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.view(torch.uint8).numpy().data
