"""The model that a cluster serves."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from triptych import demo
from triptych.cli.outcome import ClusterError
from triptych.runtime.hub import model_directory, served_name
from triptych.runtime.process import CannotStart


@dataclass(frozen=True, slots=True)
class Model:
    """A directory with a model, and the name under which it is served."""

    path: Path
    model_id: str

    @classmethod
    def named(cls, model: str | Path) -> Self:
        """``demo`` is the bundled model; otherwise a directory, or ``OWNER/NAME[@REVISION]`` on a hub.

        The latter is downloaded first, once for all processes, which may take long. Raises ClusterError.
        """
        if model == "demo":
            return cls(demo.MODEL_DIR, demo.MODEL_ID)
        try:
            path = model_directory(Path(model)).resolve()
        except CannotStart as error:
            raise ClusterError(str(error)) from None
        if not (path / "config.json").is_file():
            raise ClusterError(f"{model} is not a model: there is no config.json in it")
        return cls(path, served_name(Path(model)))
