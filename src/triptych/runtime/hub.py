"""Where a model's files are: in a directory here, or in a repository of a hub from which they are fetched."""

import re
from pathlib import Path

from triptych.runtime.process import CannotStart

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}(@[\w./-]{1,128})?")
WANTED = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.txt", "*.model")
"""Weights as safetensors only, and the small files that say what they mean: no pickle and no code."""
_REASONS = {
    "LocalEntryNotFoundError": "no hub answers, and it was not fetched before",
    "ConnectionError": "no hub answers",
    "ConnectError": "no hub answers",
    "RepositoryNotFoundError": "there is no such repository, or it asks for a login",
    "GatedRepoError": "it asks for a login, and for its terms to be accepted",
    "RevisionNotFoundError": "the repository has no such revision",
}
"""By the class of what the hub's client raises."""


def model_directory(model: Path, *, weights: bool = True) -> Path:
    """The directory of a model that settings name: as it is, or ``OWNER/NAME[@REVISION]`` fetched into the local cache.

    Blocks, for as long as a download takes. Raises CannotStart.
    """
    if model.is_dir():
        return model
    name = str(model)
    if not _REPOSITORY.fullmatch(name):
        raise CannotStart(f"model {name!r} is no directory here, nor the name of a repository (OWNER/NAME)")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise CannotStart(f"model {name!r} is no directory here; to fetch it, install huggingface_hub") from None
    repository, _, revision = name.partition("@")
    wanted = [pattern for pattern in WANTED if weights or not pattern.endswith(".safetensors")]
    try:
        return Path(snapshot_download(repository, revision=revision or None, allow_patterns=wanted))
    except Exception as error:  # noqa: BLE001 - whatever the client's network layers raise
        kind = type(error).__name__
        reason = _REASONS.get(kind, kind)
        raise CannotStart(f"model {name!r} is no directory here, and cannot be fetched from a hub: {reason}") from None


def served_name(model: Path) -> str:
    """Under which a model is served unless settings say otherwise: its directory's, or the repository's."""
    return model.resolve().name if model.is_dir() else str(model).partition("@")[0]
