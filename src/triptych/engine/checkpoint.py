"""A model directory: its files, their validation, and its revision.

Needs no torch, so that a router reports the same ``ModelInfo`` for a directory as the engines do.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import Any

from triptych.domain.embedding import DType
from triptych.domain.instance import ModelInfo
from triptych.domain.stage import ModelPart
from triptych.families.base import Family
from triptych.families.generic import StartProcessing
from triptych.families.model_files import DEFAULT_TEMPLATE, TOOLS_TEMPLATE, BadModel, ModelFiles
from triptych.families.registry import load_family
from triptych.files import read_json
from triptych.tokens.processor_process import ProcessorProcess

DTYPES: Mapping[str, DType] = {"float32": DType.F32, "float16": DType.F16, "bfloat16": DType.BF16}
"""Data types that a model can run in, by their names in settings."""

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
"""A LoRA adapter that some checkpoints contain and apply to some prompts."""

DECIDING_FILES = (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    "added_tokens.json",
    DEFAULT_TEMPLATE,
    TOOLS_TEMPLATE,
    "chat_template.json",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "preprocessor_config.json",
    "processor_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "video_preprocessor_config.json",
    "vocab.json",
)
"""Files that affect results, besides the weights."""

_TEXT_CONFIGS = ("text_config", "llm_config", "language_config")
_COSTLESS = frozenset({"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"})

_FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Bytes of a value, as safetensors name the types."""
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_HEADER_LIMIT_BYTES = 100 << 20
_INDEX_LIMIT_BYTES = 100 << 20


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a safetensors file."""

    path: Path
    offset: int
    """Offset of its first byte in the file."""
    nbytes: int
    dtype: str
    """Data type as safetensors name it."""
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Checkpoint:
    """A model directory of a known family with complete safetensors weights."""

    files: ModelFiles
    family: Family
    weights: tuple[Path, ...]

    @property
    def directory(self) -> Path:
        return self.files.directory

    @property
    def architecture(self) -> str:
        """The transformers class that saved the weights."""
        names = self.files.config.get("architectures")
        if not isinstance(names, list) or not names or not isinstance(names[0], str):
            raise BadModel("config.json names no architecture")
        return names[0]

    @property
    def quantization(self) -> str | None:
        """How the weights are quantized, as their configuration names it (``awq``, ``fp8``); None if they are not."""
        config = self.files.config
        sections = (config, *(config[name] for name in _TEXT_CONFIGS if isinstance(config.get(name), dict)))
        found = next(
            (section["quantization_config"] for section in sections if section.get("quantization_config")), None
        )
        return str(found.get("quant_method", "unknown")) if isinstance(found, dict) else None

    def revision(self) -> str:
        """BLAKE2b over names and contents of every file that affects results, as 64 hex digits; computed on first use."""
        return self._revision

    @cached_property
    def _revision(self) -> str:
        digest = blake2b(digest_size=32, person=b"triptych-model")
        deciding = [self.directory / name for name in DECIDING_FILES]
        for file in sorted({*self.weights, *(file for file in deciding if file.is_file())}):
            name = file.name.encode()
            digest.update(len(name).to_bytes(8, "little") + name)
            with file.open("rb") as opened:
                digest.update(file_digest(opened, blake2b).digest())
        return digest.hexdigest()

    def stored_tensors(self) -> Iterator[StoredTensor]:
        """Tensors of the weights, from the headers of the files."""
        for file in self.weights:
            length, header = _header(file)
            for entry in header.values():
                first, end = entry["data_offsets"]
                yield StoredTensor(file, 8 + length + first, end - first, entry["dtype"], tuple(entry["shape"]))

    def weights_nbytes(self, dtype: DType) -> int:
        """Bytes of all weights in the data type of the computation, by the headers of the files."""
        return sum(
            tensor.nbytes // _FLOATS[tensor.dtype] * dtype.itemsize if tensor.dtype in _FLOATS else tensor.nbytes
            for tensor in self.stored_tensors()
        )

    def part_digest(self, part: ModelPart) -> str:
        """BLAKE2b over what decides the costs of a part, as 64 hex digits: its configuration, not its weights' values.

        So models that share a part, and fine-tuned versions of one model, share its profile (ADR 20).
        """
        decides = {"part": part.value, "config": _part_config(self.files.config, part)}
        if part is ModelPart.ENCODER:
            processors = {"image": self.files.image_processor, "video": self.files.video_processor}
            decides |= {"hidden_size": self.family.hidden_size, "processors": _costly(processors)}
        text = json.dumps(decides, sort_keys=True, default=str)
        return blake2b(text.encode(), digest_size=32, person=b"triptych-part").hexdigest()

    def model_info(self, *, model_id: str, dtype: DType) -> ModelInfo:
        """The model's ``ModelInfo`` when run in ``dtype``. Reads every file in full, for the revision."""
        return ModelInfo(
            model_id=model_id,
            revision=self.revision(),
            dtype=dtype,
            hidden_size=self.family.hidden_size,
            context_length=self.family.context_length,
        )


def stored_dtype(files: ModelFiles) -> str | None:
    """The data type of the weights as ``DTYPES`` names it, by the configuration; None if it says none of these."""
    text = files.config.get("text_config")
    sections = (files.config, text if isinstance(text, dict) else {})
    named = (section.get(name) for section in sections for name in ("dtype", "torch_dtype"))
    return next((name for name in named if isinstance(name, str) and name in DTYPES), None)


def _part_config(config: Mapping[str, Any], part: ModelPart) -> Any:
    """The part's section of ``config.json``. Without a section for text, what belongs to no encoder is the decoder's; without
    any section (Whisper), everything belongs to both.
    """
    nested = next((name for name in _TEXT_CONFIGS if isinstance(config.get(name), dict)), None)
    if part is ModelPart.DECODER:
        if nested is not None:
            return _costly(config[nested])
        return _costly({name: value for name, value in config.items() if not isinstance(value, dict)})
    if nested is None:
        sections = {name: value for name, value in config.items() if isinstance(value, dict)}
        return _costly({**(sections or config), "model_type": config.get("model_type")})
    return _costly({name: value for name, value in config.items() if name != nested})


def _costly(value: Any) -> Any:
    """Copy without the entries that say nothing about costs: names, versions, and numbers of tokens."""
    if not isinstance(value, Mapping):
        return value
    return {
        name: _costly(entry)
        for name, entry in value.items()
        if name not in _COSTLESS and not name.endswith(("_token_id", "_token_index", "_token_ids"))
    }


def open_checkpoint(directory: Path | Checkpoint, process: StartProcessing = ProcessorProcess) -> Checkpoint:
    """Validate a model directory: configuration, family, complete safetensors weights. Raises BadModel.

    An open checkpoint is returned as it is: a process with encoder and decoder reads and hashes the files once. ``process``
    loads the processor of a model without a family of its own.
    """
    if isinstance(directory, Checkpoint):
        return directory
    files = ModelFiles.load(directory)
    family = load_family(files, process)
    weights = _weights(files.directory)
    adapter = files.directory / ADAPTER_WEIGHTS
    for file in (*weights, *([adapter] if adapter.is_file() else [])):
        _check_whole(file)
    return Checkpoint(files=files, family=family, weights=weights)


def _weights(directory: Path) -> tuple[Path, ...]:
    names = [_SINGLE]
    if (directory / _INDEX).is_file():
        try:
            names = sorted(set(read_json(directory / _INDEX, _INDEX_LIMIT_BYTES)["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise BadModel(f"{_INDEX} has no weight_map") from None
    for name in names:
        if Path(name).name != name or not (directory / name).is_file():
            pickled = sorted(file.name for file in directory.iterdir() if file.suffix in {".bin", ".pt", ".pth"})
            if pickled:
                raise BadModel(f"{pickled[0]} is a pickle: only safetensors are loaded, and {name} is missing")
            raise BadModel(f"{name} is missing from model directory {directory.name!r}")
    return tuple(directory / name for name in names)


def _check_whole(file: Path) -> None:
    """Check that a safetensors file has the length that its header implies. Raises BadModel."""
    length, header = _header(file)
    end = max((int(entry["data_offsets"][1]) for entry in header.values()), default=0)
    if file.stat().st_size != 8 + length + end:
        raise _damaged(file)


def _header(file: Path) -> tuple[int, dict[str, Any]]:
    """The length of a safetensors file's header, and its entries by the names of the tensors. Raises BadModel."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if not 2 <= length <= _HEADER_LIMIT_BYTES:
            raise _damaged(file)
        raw = opened.read(length)
    try:
        header: dict[str, Any] = json.loads(raw)
        header.pop("__metadata__", None)
        for entry in header.values():
            entry["data_offsets"] = [int(entry["data_offsets"][0]), int(entry["data_offsets"][1])]
    except (ValueError, AttributeError, KeyError, TypeError, IndexError, RecursionError):
        raise _damaged(file) from None
    return length, header


def _damaged(file: Path) -> BadModel:
    return BadModel(f"{file.name} is damaged or cut off: not a whole safetensors file")
