"""The metrics that the services export, as their sources name them, and those that a PromQL expression uses."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from triptych.runtime.metrics import Metrics

ROOT = Path(__file__).parents[3]

_SUFFIXES = {
    "counter": ("_total",),
    "common_counter": ("_total",),
    "total": ("_total",),
    "gauge": ("",),
    "longest_wait": ("",),
    "histogram": ("_bucket", "_count", "_sum"),
}
"""Of the samples of what these calls of ``triptych.runtime.metrics`` create."""
_NOT_NAMES = re.compile(
    r"""
    "[^"]*" | \{[^}]*\} | \[[^\]]*\] | \b\d[\w.]*
    | \b(?:by|on|without|ignoring|group_left|group_right)\b\s*(?:\([^)]*\))?
    | \b(?:and|or|unless|offset|bool)\b
    """,
    re.VERBOSE,
)


def _calls() -> Iterator[tuple[str, str]]:
    """(call, name) of every metric that the code creates."""
    for path in (*ROOT.glob("src/triptych/**/*.py"), *ROOT.glob("services/**/*.py")):
        if path.is_relative_to(ROOT / "src" / "triptych" / "v1") or path.is_relative_to(
            ROOT / "src" / "triptych" / "cli"
        ):
            continue  # generated code, and a reader of metrics
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(
                    func=ast.Name(id=call) | ast.Attribute(attr=call), args=[ast.Constant(value=str(name)), *_]
                ) if call in _SUFFIXES and name.startswith(("triptych_", "vllm:")):
                    yield call, name


@cache
def families() -> dict[str, str]:
    """The call that creates it, by the metric's name as it is documented: counters with their ``_total``."""
    return {name + _SUFFIXES[call][0] * (_SUFFIXES[call] == ("_total",)): call for call, name in _calls()}


@cache
def exported() -> frozenset[str]:
    """Names of all samples that processes export."""
    of_every_process = text_string_to_metric_families(Metrics().render().decode())
    return frozenset(
        {name + suffix for call, name in _calls() for suffix in _SUFFIXES[call]}
        | {sample.name for family in of_every_process for sample in family.samples}
    )


def names_in(expression: str) -> set[str]:
    """The metrics that a PromQL expression reads."""
    rest = _NOT_NAMES.sub(" ", expression)
    return {found[1] for found in re.finditer(r"\b([a-zA-Z_][\w:]*)(?!\s*\(|[\w:])", rest)}
