"""LoRA adapters: names, identities and limits."""

import re
from dataclasses import dataclass

from triptych.domain.limits import Positive, check_limits
from triptych.domain.record import record

MAX_NAME = 128
"""Characters of an adapter's name."""
MAX_LOADED = 256
"""Adapters that an instance may report."""
DIGEST_CHARS = 64
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._:/-]{{0,{MAX_NAME - 1}}}", re.ASCII)


@record
class LoadedLora:
    """An adapter that an instance applies to requests for the model of its name."""

    name: str
    digest: str
    """BLAKE2b over the adapter's files, 64 hex digits: its identity, whatever its name."""
    rank: int
    nbytes: int
    """Memory of its matrices."""
    encodes: bool = False
    """Whether it changes embeddings: then its items are encoded where it is loaded too."""


@dataclass(frozen=True, slots=True)
class LoadLora:
    """An order to load an adapter."""

    name: str
    directory: str
    """On the instances, below their ``lora_root``."""
    parent: str = ""
    """Id of the base model; empty where there is only one."""


@dataclass(frozen=True, slots=True)
class LoraLimits:
    """Limits of the adapters of an instance."""

    max_loras: Positive = 16
    """Most LoRA adapters at the same time."""
    max_lora_rank: Positive = 128
    """Largest rank of a LoRA adapter."""
    max_lora_bytes: Positive = 1 << 30
    """Memory for the matrices of all LoRA adapters, and the largest file of one."""

    def __post_init__(self) -> None:
        check_limits(self)
        if self.max_loras > MAX_LOADED:
            raise ValueError(f"max_loras is {self.max_loras}, must be at most {MAX_LOADED}")


def is_lora_name(name: str) -> bool:
    """Whether an adapter may have this name: 1 to 128 of ``A-Z a-z 0-9 . _ : / -``, a letter or digit first."""
    return _NAME.fullmatch(name) is not None
