"""What a model directory is: its files, whether they are sound, and the revision that they add up to.

Needs no torch, so that a router can tell the same ``ModelInfo`` of the same directory as the engines do.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import Any

from triptych.domain.embedding import DType
from triptych.domain.instance import ModelInfo
from triptych.families.base import Family
from triptych.families.model_files import BadModel, ModelFiles
from triptych.families.registry import load_family

DTYPES: Mapping[str, DType] = {"float32": DType.F32, "float16": DType.F16, "bfloat16": DType.BF16}
"""The element types that a model can be run in, by the names that settings use."""

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
"""A LoRA adapter that some checkpoints bring along, for the prompts that they decide by themselves."""

DECIDING_FILES = (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    "added_tokens.json",
    "chat_template.jinja",
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
"""Besides the weights, the files that decide what comes out."""

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_HEADER_LIMIT_BYTES = 100 << 20


@dataclass(frozen=True)
class Checkpoint:
    """A model directory of a known family whose weights are safetensors and whole."""

    files: ModelFiles
    family: Family
    weights: tuple[Path, ...]

    @property
    def directory(self) -> Path:
        return self.files.directory

    @property
    def architecture(self) -> str:
        """The class in transformers that the weights were saved from."""
        names = self.files.config.get("architectures")
        if not isinstance(names, list) or not names or not isinstance(names[0], str):
            raise BadModel("config.json names no architecture")
        return names[0]

    def revision(self) -> str:
        """BLAKE2b over the names and contents of every file that decides the result, as 64 hex digits.

        They are read when it is asked for first.
        """
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

    def model_info(self, *, model_id: str, dtype: DType) -> ModelInfo:
        """What instances say of the model when they run it in ``dtype``. Reads every file whole, for its revision."""
        return ModelInfo(
            model_id=model_id,
            revision=self.revision(),
            dtype=dtype,
            hidden_size=self.family.hidden_size,
            context_length=self.family.context_length,
        )


def open_checkpoint(directory: Path | Checkpoint) -> Checkpoint:
    """Check a model directory: configuration, family, and weights that are whole safetensors. Raises BadModel.

    One that is open already is returned as it is: a process with encoder and decoder reads and hashes its files once.
    """
    if isinstance(directory, Checkpoint):
        return directory
    files = ModelFiles.load(directory)
    family = load_family(files)
    weights = _weights(files.directory)
    adapter = files.directory / ADAPTER_WEIGHTS
    for file in (*weights, *([adapter] if adapter.is_file() else [])):
        _check_whole(file)
    return Checkpoint(files=files, family=family, weights=weights)


def _weights(directory: Path) -> tuple[Path, ...]:
    names = [_SINGLE]
    if (directory / _INDEX).is_file():
        try:
            names = sorted(set(json.loads((directory / _INDEX).read_bytes())["weight_map"].values()))
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
    """Make sure that a safetensors file is as long as the tensors in its header need. Raises BadModel."""
    damaged = BadModel(f"{file.name} is damaged or cut off: not a whole safetensors file")
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if not 2 <= length <= _HEADER_LIMIT_BYTES:
            raise damaged
        raw = opened.read(length)
    try:
        header: dict[str, Any] = json.loads(raw)
        header.pop("__metadata__", None)
        end = max((int(entry["data_offsets"][1]) for entry in header.values()), default=0)
    except (ValueError, AttributeError, KeyError, TypeError, IndexError):
        raise damaged from None
    if file.stat().st_size != 8 + length + end:
        raise damaged
