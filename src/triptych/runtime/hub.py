"""Locate a model's files: the bundled model, a local directory, or a hub repository to download."""

import re
from pathlib import Path

from triptych import demo
from triptych.runtime.process import CannotStart

DEMO = "demo"
"""Names the bundled model."""
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}(@[\w./-]{1,128})?")
WANTED = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.txt", "*.model")
"""Weights as safetensors only, and small configuration files: no pickle and no code."""
_CACHED = "models--"
"""Begins the names of repositories in the cache: ``models--OWNER--NAME/snapshots/HASH``."""
_REASONS = {
    "LocalEntryNotFoundError": "no hub answers, and it was not fetched before",
    "ConnectionError": "no hub answers",
    "ConnectError": "no hub answers",
    "RepositoryNotFoundError": "there is no such repository, or it asks for a login",
    "GatedRepoError": "it asks for a login, and for its terms to be accepted",
    "RevisionNotFoundError": "the repository has no such revision",
}
"""Reasons by exception class of the hub's client."""


def model_directory(model: Path, *, weights: bool = True) -> Path:
    """The directory of a model: as given, or ``OWNER/NAME[@REVISION]`` downloaded into the local cache, or of ``demo``.

    Blocks while downloading. Raises CannotStart.
    """
    if str(model) == DEMO:
        return demo.MODEL_DIR
    if model.is_dir():
        return model
    name = str(model)
    if not _REPOSITORY.fullmatch(name):
        raise CannotStart(f"model {name!r} is neither a local directory nor the name of a repository (OWNER/NAME)")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise CannotStart(f"model {name!r} is not a local directory; to download it, install huggingface_hub") from None
    repository, _, revision = name.partition("@")
    wanted = [pattern for pattern in WANTED if weights or not pattern.endswith(".safetensors")]
    try:
        return Path(snapshot_download(repository, revision=revision or None, allow_patterns=wanted))
    except Exception as error:  # noqa: BLE001 - the client's network layers raise many types
        kind = type(error).__name__
        reason = _REASONS.get(kind, kind)
        raise CannotStart(
            f"model {name!r} is not a local directory and cannot be downloaded from a hub: {reason}"
        ) from None


def served_name(model: Path) -> str:
    """Default name of a served model: that of its directory, as given, or repository.

    A link keeps its own name. A directory in a hub's local cache, whose name is a hash, has the name of its repository.
    """
    if str(model) == DEMO:
        return demo.MODEL_ID
    if not model.is_dir():
        return str(model).partition("@")[0]
    path = model.absolute()
    if path.name == "..":
        path = path.resolve()
    if path.parent.name == "snapshots" and path.parent.parent.name.startswith(_CACHED):
        return path.parent.parent.name.removeprefix(_CACHED).replace("--", "/")
    return path.name
