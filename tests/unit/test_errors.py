"""The error tree matches its documentation."""

import re

from triptych import errors

_ROW = re.compile(r"^    ((?:\|   |    )*)\+-- (\w+) +([A-Z_]+) +(\d+)", re.MULTILINE)


def test_the_page_names_every_error_with_its_parent_its_grpc_code_and_its_http_status() -> None:
    told: dict[str, tuple[str, str, int]] = {}
    line = ["TriptychError"]
    for indent, name, grpc_code, http_status in _ROW.findall(errors.__doc__ or ""):
        del line[1 + len(indent) // 4 :]
        told[name] = (line[-1], grpc_code, int(http_status))
        line.append(name)
    tree = {cls.__name__: (cls.__bases__[0].__name__, cls.grpc_code, cls.http_status) for cls in errors.tree().values()}
    assert told == tree
