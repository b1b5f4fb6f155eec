"""The models that a cluster serves."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from triptych.cli.outcome import ClusterError
from triptych.runtime.hub import model_directory, served_name
from triptych.runtime.process import CannotStart


@dataclass(frozen=True, slots=True)
class Model:
    """A directory with a model, and the name under which it is served."""

    path: Path
    model_id: str
    prefix: str = ""
    """Begins the names of its processes, where a cluster serves several models."""

    @classmethod
    def named(cls, model: str | Path) -> Self:
        """``demo`` is the bundled model; otherwise a directory, or ``OWNER/NAME[@REVISION]`` on a hub.

        The latter is downloaded first, once for all processes, which may take long. ``SERVED_NAME=`` before any of these
        serves it under that name. Raises ClusterError.
        """
        name, equals, rest = str(model).partition("=")
        if equals and name and not Path(model).is_dir():
            return replace(cls.named(rest), model_id=name)
        try:
            path = model_directory(Path(model)).resolve()
        except CannotStart as error:
            raise ClusterError(str(error)) from None
        if not (path / "config.json").is_file():
            raise ClusterError(f"{model} is not a model: there is no config.json in it")
        return cls(path, served_name(Path(model)))

    @classmethod
    def all_named(cls, models: Sequence["str | Path | Model"]) -> tuple["Model", ...]:
        """Name at least one model, each under another name. Raises ClusterError."""
        named = [model if isinstance(model, Model) else cls.named(model) for model in models]
        if not named:
            raise ClusterError("name at least one model")
        ids = [model.model_id for model in named]
        if twice := next((name for name in ids if ids.count(name) > 1), None):
            raise ClusterError(
                f"two models would be served as {twice}: a model is served once, under the name of its directory",
                caller=True,
            )
        if len(named) == 1:
            return (named[0],)
        prefixes: list[str] = []
        for model in named:
            short = re.sub(r"[^a-z0-9]+", "-", model.model_id.rsplit("/", 1)[-1].lower())[:40].strip("-") or "model"
            same = sum(re.fullmatch(rf"{re.escape(short)}(-\d+)?-", prefix) is not None for prefix in prefixes)
            prefixes.append(f"{short}-{same + 1}-" if same else f"{short}-")
        return tuple(replace(model, prefix=prefix) for model, prefix in zip(named, prefixes, strict=True))
