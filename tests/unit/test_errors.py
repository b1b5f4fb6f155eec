"""The error tree matches its documentation."""

import re
from pathlib import Path

from triptych import errors

ROOT = Path(__file__).parents[2]

_ROW = re.compile(r"^    ((?:\|   |    )*)\+-- (\w+) +([A-Z_]+) +(\d+)", re.MULTILINE)
_CLASS = re.compile(r"\bclass (\w+)\(([^:]*)\):")


def test_the_page_names_every_error_with_its_parent_its_grpc_code_and_its_http_status() -> None:
    told: dict[str, tuple[str, str, int]] = {}
    line = ["TriptychError"]
    for indent, name, grpc_code, http_status in _ROW.findall(errors.__doc__ or ""):
        del line[1 + len(indent) // 4 :]
        told[name] = (line[-1], grpc_code, int(http_status))
        line.append(name)
    tree = {cls.__name__: (cls.__bases__[0].__name__, cls.grpc_code, cls.http_status) for cls in errors.tree().values()}
    assert told == tree


def test_no_other_module_adds_an_error_to_the_tree() -> None:
    """Peers know the errors of the tree by their codes. What is imported must not change it."""
    own = Path(errors.__file__)
    names = {"TriptychError"} | {cls.__name__ for cls in errors.tree().values()}
    for path in (*own.parent.rglob("*.py"), *(ROOT / "services").rglob("*.py")):
        if path != own:
            for name, bases in _CLASS.findall(path.read_text()):
                assert not names & set(re.findall(r"\w+", bases)), f"{path.relative_to(ROOT)}: {name}"
