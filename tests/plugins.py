"""Installed packages with entry points, for one test."""

from collections.abc import Mapping
from pathlib import Path

import pytest


def offer(
    directory: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: str, points: Mapping[str, Mapping[str, str]]
) -> None:
    """Install a package with one module, ``name``. ``points`` are its entry points: groups, names, places."""
    described = directory / f"{name}-1.0.dist-info"
    described.mkdir(parents=True)
    (directory / f"{name}.py").write_text(code)
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    groups = ("\n".join([f"[{group}]", *(f"{key} = {at}" for key, at in of.items())]) for group, of in points.items())
    (described / "entry_points.txt").write_text("\n\n".join(groups) + "\n")
    monkeypatch.syspath_prepend(directory)
