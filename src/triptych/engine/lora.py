"""LoRA adapters: read from peft's files, and added by the linear layers of a model's part to selected rows of a pass."""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from math import sqrt
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import nn
from torch.nn.functional import linear
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from triptych.domain.lora import LoraLimits
from triptych.engine.checkpoint import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from triptych.engine.heap import trim
from triptych.errors import InvalidRequest
from triptych.families.model_files import MAX_CONFIG_BYTES, BadModel
from triptych.files import BadFile, check_regular, read_bytes

_KEY = re.compile(
    r"base_model\.model\.(?:(?:model|language_model|text_model)\.)*layers\.(\d+\..+)\.lora_([AB])(?:\.\w+)?\.weight"
)
"""Names of matrices of the language model's layers. Encoders have layers too, under other names."""
_ENCODER_KEY = re.compile(r"base_model\.model\.(?:model\.)?((\w+)(?:\..+)?)\.lora_([AB])(?:\.\w+)?\.weight")
"""Names of matrices of an encoder: the path in the model without its head, and the first name of that."""
_FORMER_LEVEL = ".vision_model."
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "fan_in_fan_out": (False, None),
    "lora_bias": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": ([], None),
    "layer_replication": ([], None),
    "target_parameters": ([], None),
    "trainable_token_indices": ([], {}, None),
    "alora_invocation_tokens": ([], None),
    "arrow_config": (None,),
}
"""Required values of optional fields in the adapter's configuration: plain LoRA without variants."""
_OTHER_BASE = ("pissa", "olora", "loftq", "corda")
"""Initializations that train against changed weights of the base; peft names none of them once an adapter is converted."""
_WITH_OTHER_ROWS = frozenset({"cross_attn", "experts"})
"""Parts of a layer whose inputs are not the rows of the pass."""
_NO_LIMITS = LoraLimits(max_lora_rank=1 << 20, max_lora_bytes=1 << 40)


class LoraPart(NamedTuple):
    """The two matrices of a module: ``down`` [rank, inputs] and ``up`` [rank, outputs], which includes the scaling."""

    down: torch.Tensor
    up: torch.Tensor


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """An adapter in host memory. Implements ``ports.LoraFiles``."""

    digest: str
    rank: int
    parts: Mapping[str, LoraPart]
    """By the paths of modules in the part of the model that they were read for."""
    encodes: bool = False
    """Whether it has matrices of the encoder, read or not."""

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices."""
        return sum(part.down.nbytes + part.up.nbytes for part in self.parts.values())


class LoraRows(NamedTuple):
    """Rows ``first`` to ``first + length`` of a pass, computed with the adapter of this digest."""

    digest: str
    first: int
    length: int


Layout = tuple[tuple[int, int], ...]
"""Numbers and ranks of a module's adapters, in the order of their matrices."""


@dataclass(slots=True)
class _Stack:
    """The matrices of all adapters of a module, one below the other."""

    layout: Layout
    down: torch.Tensor
    """[ranks, inputs]"""
    up: torch.Tensor
    """[ranks, outputs]"""
    hook: Any


@dataclass(slots=True)
class _Pass:
    """The adapters of a pass."""

    numbers: torch.Tensor
    """[rows]: the number of each row's adapter; 0 for none."""
    used: frozenset[int]
    """The numbers in it, 0 included."""
    selections: dict[Layout, tuple[slice, torch.Tensor | None] | None] = field(default_factory=dict)

    def select(self, layout: Layout) -> tuple[slice, torch.Tensor | None] | None:
        """The ranks of a module that the pass needs, and which of them [rows, ranks] do not belong to a row's adapter; None for that if
        all belong. None if the pass needs no rank.
        """
        if layout not in self.selections:
            self.selections[layout] = self._select(layout)
        return self.selections[layout]

    def _select(self, layout: Layout) -> tuple[slice, torch.Tensor | None] | None:
        owners = [number for number, rank in layout for _ in range(rank)]
        wanted = [column for column, number in enumerate(owners) if number in self.used]
        if not wanted:
            return None
        columns = slice(wanted[0], wanted[-1] + 1)
        owners = owners[columns]
        if self.used == {owners[0]}:
            return columns, None
        return columns, self.numbers[:, None] != torch.tensor(owners, device=self.numbers.device)


class LoraLayers:
    """The adapters of a decoder or encoder. Implements ``ports.LoraAccess``.

    Linear layers that an adapter targets get a forward hook, which adds the product of its matrices. Passes that call no modules, as
    captured and fused ones, do not run hooks: those with an adapter must call the modules.

    A pass multiplies by the stacked matrices of all its adapters at once, and clears what does not belong to a row's adapter between the
    two products. So it takes few operations however many adapters it has.
    """

    def __init__(
        self,
        part: nn.Module,
        limits: LoraLimits = _NO_LIMITS,
        *,
        encoders: Collection[str] = (),
        is_encoder: bool = False,
    ) -> None:
        """``encoders``: names of the children of the model that only encode; matrices of others than these and the decoder are refused.
        ``is_encoder``: the part has them as children. Else it is the decoder.
        """
        self._part = part
        self._limits = limits
        self._encoders, self._is_encoder = frozenset(encoders), is_encoder
        self._numbers: dict[str, int] = {}
        """By digest; never used again."""
        self._last_number = 0
        self._stacks: dict[str, _Stack] = {}
        self._pass: _Pass | None = None

    @property
    def digests(self) -> frozenset[str]:
        """The adapters that rows can be computed with."""
        return frozenset(self._numbers)

    @property
    def nbytes(self) -> int:
        """Memory of all matrices."""
        return sum(stack.down.nbytes + stack.up.nbytes for stack in self._stacks.values())

    def read(self, directory: Path) -> LoraWeights:
        """Read the adapter's files and check that it fits the part. Blocks; for any thread. Raises InvalidRequest."""
        try:
            return read_lora(directory, self._part, self._limits, encoders=self._encoders, is_encoder=self._is_encoder)
        except BadModel as error:
            raise InvalidRequest(str(error)) from None

    @torch.inference_mode()
    def add(self, files: LoraWeights) -> None:
        """Let rows be computed with the adapter. Does nothing if they can. Raises what a lack of memory raises, with nothing added."""
        if files.digest in self._numbers:
            return
        self._last_number += 1
        self._numbers[files.digest] = self._last_number
        try:
            for path, part in files.parts.items():
                self._stack(path, part)
        except BaseException:
            self.remove(files.digest)
            raise

    def _stack(self, path: str, part: LoraPart) -> None:
        """Add the matrices of the adapter of the last number to those of a module."""
        base: Any = self._part.get_submodule(path)
        down, up = (matrix.to(base.weight.device) for matrix in part)
        layout: Layout = ((self._last_number, len(down)),)
        if (stack := self._stacks.get(path)) is None:
            hook = base.register_forward_hook(partial(self._hook, path))
            self._stacks[path] = _Stack(layout, down, up, hook)
        else:
            both = torch.cat([stack.down, down]), torch.cat([stack.up, up])
            (stack.down, stack.up), stack.layout = both, stack.layout + layout

    @torch.inference_mode()
    def remove(self, digest: str) -> None:
        """Free the adapter's memory. Unknown ones are ignored; rows that still need it fail."""
        if (removed := self._numbers.pop(digest, None)) is None:
            return
        for path, stack in list(self._stacks.items()):
            if all(number != removed for number, _ in stack.layout):
                continue
            layout = tuple(entry for entry in stack.layout if entry[0] != removed)
            if not layout:
                stack.hook.remove()
                del self._stacks[path]
                continue
            kept = torch.tensor([number != removed for number, rank in stack.layout for _ in range(rank)])
            kept = kept.to(stack.down.device)
            stack.layout, stack.down, stack.up = layout, stack.down[kept], stack.up[kept]
        trim()

    @contextmanager
    def applied(self, rows: Sequence[LoraRows], count: int, device: torch.device) -> Iterator[None]:
        """Within the context, ``take`` holds."""
        self.take(rows, count, device)
        try:
            yield
        finally:
            self._pass = None

    @contextmanager
    def applied_to_all(self, digest: str) -> Iterator[None]:
        """Within the context, all rows of all passes are computed with this adapter; with none if it is empty.

        Raises KeyError for an adapter that was removed.
        """
        used = frozenset({self._numbers[digest]}) if digest else frozenset[int]()
        self._pass = _Pass(torch.empty(0), used) if used else None
        try:
            yield
        finally:
            self._pass = None

    def take(self, rows: Sequence[LoraRows], count: int, device: torch.device) -> None:
        """Select the adapters of the next pass, of ``count`` rows: none for rows that are not named. Holds until the next call.

        Raises KeyError for an adapter that was removed.
        """
        if not rows:
            self._pass = None
            return
        numbers = torch.zeros(count, dtype=torch.int64)
        for digest, first, length in rows:
            numbers[first : first + length] = self._numbers[digest]
        self._pass = _Pass(numbers.to(device), frozenset(numbers.tolist()))

    def _hook(self, path: str, _: nn.Module, arguments: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        """Add to a module's output [..., rows, outputs], in place."""
        if self._pass is None:
            return
        stack = self._stacks[path]
        if (selected := self._pass.select(stack.layout)) is None:
            return
        columns, foreign = selected
        inner = linear(arguments[0].reshape(-1, stack.down.shape[1]), stack.down[columns])
        if foreign is not None:
            inner.masked_fill_(foreign, 0)
        output.view(-1, stack.up.shape[1]).addmm_(inner, stack.up[columns])


def read_lora(
    directory: Path,
    part: nn.Module,
    limits: LoraLimits = _NO_LIMITS,
    *,
    encoders: Collection[str] = (),
    is_encoder: bool = False,
) -> LoraWeights:
    """Read ``adapter_config.json`` and ``adapter_model.safetensors``, as peft writes them, in the data types of the part's layers. The other
    part's matrices are left out. ``encoders`` and ``is_encoder`` as in ``LoraLayers``.

    Raises BadModel for files that are missing, damaged or too large, variants of LoRA, matrices that do not fit a linear layer of
    the part, and values that are not finite.
    """
    raw = _read(directory / ADAPTER_CONFIG, MAX_CONFIG_BYTES), _read(directory / ADAPTER_WEIGHTS, limits.max_lora_bytes)
    digest = blake2b(digest_size=32, person=b"triptych-lora")
    for content in raw:
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)
    config = _config(raw[0])
    rank, scale = _rank_and_scale(config, limits.max_lora_rank)
    of_decoder, of_encoder = _matrices(raw[1], encoders)
    _check_targets(config.get("target_modules"), of_decoder | of_encoder)
    found = {_present(part, path): both for path, both in of_encoder.items()} if is_encoder else of_decoder
    if is_encoder and len(found) < len(of_encoder):
        raise BadModel(f"{ADAPTER_WEIGHTS} names a module of the encoder twice")
    parts = {path: _part(path, matrices, part, rank, scale) for path, matrices in found.items()}
    return LoraWeights(digest.hexdigest(), rank, parts, bool(of_encoder))


def _read(file: Path, limit_nbytes: int) -> bytes:
    try:
        check_regular(file, limit_nbytes)
        return read_bytes(file, file.stat().st_size)
    except BadFile as error:
        fault = "is missing" if not file.exists() else str(error)
        raise BadModel(f"{file.name} {fault}") from None


def _config(raw: bytes) -> dict[str, Any]:
    try:
        config = json.loads(raw)
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise BadModel(f"{ADAPTER_CONFIG} is not a JSON object")
    for name, plain in _PLAIN.items():
        if name in config and config[name] not in plain:
            raise BadModel(f"{ADAPTER_CONFIG}: {name} is {_shown(config[name])}, which is not supported")
    begun = config.get("init_lora_weights")
    if isinstance(begun, str) and begun.lower().startswith(_OTHER_BASE):
        raise BadModel(
            f"{ADAPTER_CONFIG}: init_lora_weights is {_shown(begun)}, which changes the base: convert it when it is saved"
        )
    return config


def _rank_and_scale(config: Mapping[str, Any], most_rank: int) -> tuple[int, float]:
    try:
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
    except (ValueError, KeyError, TypeError, OverflowError):
        raise BadModel(f"{ADAPTER_CONFIG} does not describe a LoRA adapter: r or lora_alpha is no number") from None
    if not 1 <= rank <= most_rank:
        raise BadModel(f"{ADAPTER_CONFIG}: r is {rank}, must be from 1 to {most_rank}")
    return rank, alpha / (sqrt(rank) if config.get("use_rslora") else rank)


_Matrices = dict[str, dict[str, torch.Tensor]]
"""By the path of a module in its part of the model: ``A`` and ``B``."""


def _matrices(raw: bytes, encoders: Collection[str]) -> tuple[_Matrices, _Matrices]:
    """Those of the decoder and of the encoder. Raises BadModel for a tensor of neither."""
    try:
        tensors = load(raw)
    except (SafetensorError, ValueError, KeyError, RuntimeError):
        raise BadModel(f"{ADAPTER_WEIGHTS} is damaged or cut off: not a whole safetensors file") from None
    if not tensors:
        raise BadModel(f"{ADAPTER_WEIGHTS} has no tensor")
    of_decoder, of_encoder = _Matrices(), _Matrices()
    for name, tensor in tensors.items():
        if (match := _KEY.fullmatch(name)) is not None and _WITH_OTHER_ROWS.isdisjoint(match[1].split(".")):
            of_decoder.setdefault(f"layers.{match[1]}", {})[match[2]] = tensor
        elif (match := _ENCODER_KEY.fullmatch(name)) is not None and match[2] in encoders:
            of_encoder.setdefault(match[1], {})[match[3]] = tensor
        else:
            raise BadModel(
                f"{ADAPTER_WEIGHTS} has a tensor that is no matrix of a layer of the language model, nor of a part that only encodes: {_shown(name)}"
            )
    return of_decoder, of_encoder


def _present(model: nn.Module, path: str) -> str:
    """The path, without the level that vision towers had in adapters of transformers 4, where it is gone."""
    if _FORMER_LEVEL not in path or path in (names := {name for name, _ in model.named_modules()}):
        return path
    shorter = path.replace(_FORMER_LEVEL, ".", 1)
    return shorter if shorter in names else path


def _check_targets(targets: object, found: Mapping[str, object]) -> None:
    """Raises BadModel for a target without a tensor. A text is a pattern, of which nothing is known."""
    for target in targets if isinstance(targets, list) else ():
        if not any(path == target or path.endswith(f".{target}") for path in found):
            raise BadModel(
                f"{ADAPTER_CONFIG}: target_modules has {_shown(target)}, of which {ADAPTER_WEIGHTS} has no tensor"
            )


def _part(path: str, matrices: Mapping[str, torch.Tensor], model: nn.Module, rank: int, scale: float) -> LoraPart:
    try:
        base = model.get_submodule(path)
    except AttributeError:
        base = None
    if not isinstance(base, nn.Linear) or isinstance(base, NonDynamicallyQuantizableLinear):  # which is never called
        raise BadModel(f"{ADAPTER_WEIGHTS} has matrices for {path}, which is no linear layer of this model")
    outputs, inputs = base.weight.shape
    shapes = {name: tuple(matrix.shape) for name, matrix in matrices.items()}
    if shapes != {"A": (rank, inputs), "B": (outputs, rank)}:
        raise BadModel(
            f"{ADAPTER_WEIGHTS} does not fit {path}: its matrices are {shapes}, not A ({rank}, {inputs}) and B ({outputs}, {rank})"
        )
    up = (matrices["B"].float() * scale).T.to(base.weight.dtype).contiguous()
    part = LoraPart(matrices["A"].to(base.weight.dtype, copy=True), up)  # not a view of the whole file
    if not all(matrix.isfinite().all() for matrix in part):
        raise BadModel(f"{ADAPTER_WEIGHTS}: matrices of {path} have values that are not finite")
    return part


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
