"""Write generated files, or compare them with what is there: the command line of the scripts that make them."""

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run(module: str, about: str, contents: Callable[[], Mapping[Path, str]]) -> int:
    """Write each file, or with ``--check`` name the first that is not current. Returns the exit status."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=about.split("\n", 1)[0])
    parser.add_argument("--check", action="store_true", help="fail if a file is not what this would write")
    check = parser.parse_args().check
    for path, content in contents().items():
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        elif not path.exists() or path.read_text() != content:
            sys.stderr.write(f"{path.relative_to(ROOT)} is out of date: run python -m {module}\n")
            return 1
    return 0
