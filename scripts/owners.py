"""Writes docs/owners.md, which says who owns which state: ``python -m scripts.owners``; with ``--check`` it compares the page.

An owner is a class whose docstring begins with "Owner of".
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from scripts.generated import ROOT, run

PAGE = ROOT / "docs" / "owners.md"
FOLDERS = {
    "Gateway": ("services/gateway", "src/triptych/machine/shedding.py"),
    "Gateway and SDK": (
        "src/triptych/machine/answer_so_far.py",
        "src/triptych/machine/router_attempts.py",
        "src/triptych/rpc",
    ),
    "Router": ("services/router", "src/triptych/machine/router", "src/triptych/machine/turnover.py"),
    "Encoder": ("services/encoder", "src/triptych/machine/encoder"),
    "Text instance": (
        "services/text",
        "src/triptych/machine/text",
        "src/triptych/engine",
        "src/triptych/machine/stage_states.py",
    ),
    "Any instance": ("src/triptych/machine/arena", "src/triptych/machine/agent_health.py"),
    "Pool manager": ("services/pool_manager", "src/triptych/machine/pool_manager"),
    "triptych up": ("src/triptych/machine/process_pools.py",),
    "Whoever follows a pool manager": ("src/triptych/machine/membership_view.py",),
}
HEAD = """# Who owns which state

Each fact has one owner, which alone changes it. Its docstring says more.
"""


def page() -> str:
    parts = [HEAD]
    for process, places in FOLDERS.items():
        rows = [row for place in places for path in files(ROOT / place) for row in owners(path)]
        parts += [f"## {process}\n", "|state|owner|\n|-|-|\n" + "\n".join(rows) + "\n"]
    return "\n".join(parts)


def files(place: Path) -> list[Path]:
    return [place] if place.is_file() else sorted(place.rglob("*.py"))


def owners(path: Path) -> Iterator[str]:
    """A row for each owner in a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        docstring = ast.get_docstring(node) if isinstance(node, ast.ClassDef) else None
        if isinstance(node, ast.ClassDef) and docstring and docstring.startswith("Owner of "):
            paragraph = " ".join(docstring.split("\n\n")[0].split()).removeprefix("Owner of ")
            sentence = re.split(r"[.:;] ", paragraph, maxsplit=1)[0].rstrip(".")
            name = path.relative_to(ROOT).as_posix().removeprefix("src/triptych/")
            yield f"|{sentence.replace('``', '`')}|`{name}: {node.name}`|"


if __name__ == "__main__":
    raise SystemExit(run("scripts.owners", __doc__ or "", lambda: {PAGE: page()}))
