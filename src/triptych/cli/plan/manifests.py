"""YAML files of a deployment: those of the repository that are read, and those of a plan that are written."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from triptych.cli.outcome import CliError
from triptych.cli.plan.cluster import PlannedCluster
from triptych.files import BadFile, read_text
from triptych.runtime.hub import DEMO

Document = dict[str, Any]
_MAX_NBYTES = 1 << 20


def read_documents(path: Path) -> list[Any]:
    """The documents of a YAML file. Raises CliError."""
    yaml = _yaml()
    try:
        return list(yaml.safe_load_all(read_text(path, _MAX_NBYTES)))
    except BadFile as error:
        raise CliError(f"{path} {error}: run this beside Triptych's checkout, or name the file", caller=True) from None
    except yaml.YAMLError:
        raise CliError(f"{path} is no YAML", caller=True) from None


def as_yaml(*documents: Any, comment: str = "") -> str:
    """Text of a YAML file. Nothing in it is an alias."""
    yaml = _yaml()

    class Dumper(yaml.SafeDumper):  # type: ignore[misc, name-defined]  # it has no types
        def ignore_aliases(self, data: Any) -> bool:
            del data
            return True

    text = yaml.dump_all(documents, Dumper=Dumper, sort_keys=False, width=140)
    return f"# {comment}\n{text}" if comment else str(text)


def checked_images(cluster: PlannedCluster) -> None:
    """Raises CliError for instances that have no image."""
    if any(pool.settings.get("engine") == "vllm" for pool in cluster.pools):
        raise CliError("the images of Triptych have no vLLM: use --to up", caller=True)


def is_demo(cluster: PlannedCluster) -> bool:
    return cluster.model == DEMO


def model_directory(cluster: PlannedCluster) -> str:
    """Where containers find the model: in the volume of models, or by its name on a hub."""
    path = Path(cluster.model)
    if is_demo(cluster) or not path.exists():
        return cluster.model
    return f"/models/{(path.parent if path.is_file() else path).absolute().name}"


def _yaml() -> Any:
    try:
        import yaml
    except ImportError:
        raise CliError("this needs PyYAML: install Triptych's extra 'plan'", caller=True) from None
    return yaml


def write_files(directory: Path, files: Mapping[str, str]) -> None:
    """Write text files below a directory. Raises CliError."""
    try:
        for name, text in files.items():
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    except OSError as error:
        raise CliError(f"cannot write {error.filename}: {error.strerror}", caller=True) from None
