"""Tiny models of the types that the generic family serves, one after the other. ``make test-models`` tries all; elsewhere a few are."""

import fcntl
import json
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.integration.families.harness import Case, encode_here
from tests.models import zoo_clips, zoo_grids, zoo_patches, zoo_runs, zoo_tiles, zoo_timm
from tests.models.zoo import ZooModel

SPLIT_OTHERWISE = "hyperclovax_vision_v2"
"""Its class of tokenizers does not take the way in which the tiny tokenizer splits text."""
ZOO: dict[str, ZooModel] = {
    tiny.name: tiny
    for zoo in (zoo_clips, zoo_grids, zoo_patches, zoo_runs, zoo_tiles, zoo_timm)
    for tiny in zoo.ZOO
    if tiny.name != SPLIT_OTHERWISE
}
USUAL = ("qwen3_5", "granite4_vision", "hunyuan_vl", "minicpmv4_6", "moss_transcribe_diarize")
"""Linear attention; rows for layers; a target of several tokens; places of items; audio."""
EVERY = "TRIPTYCH_TEST_MODELS"
"""Names the file in the environment to which results of all models are written."""
WITHOUT = {
    "chameleon": "the model gives its language model tokens",
    "idefics2": "depends on what is around it",
    "vibevoice_asr": "does not place rows",
}
"""Types that are refused at start, and a part of the reason."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "served" in metafunc.fixturenames:
        every = [name for name in ZOO if name.partition("--")[0] not in WITHOUT]
        chosen = every if os.environ.get(EVERY) else USUAL  # noqa: TID251  # whoever runs the tests chooses the part
        metafunc.parametrize("served", chosen, indirect=True, scope="session")


@pytest.fixture(scope="session")
def results() -> Iterator[dict[str, dict[str, Any]]]:
    """What is known of each model after its tests, for the table of docs/models.md."""
    found: dict[str, dict[str, Any]] = {}
    yield found
    if path := os.environ.get(EVERY):  # noqa: TID251
        with Path(path).open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # each worker adds its own
            file.seek(0)
            known = json.loads(file.read() or "{}")
            file.truncate(0)
            merged = {name: known.get(name, {}) | found.get(name, {}) for name in known | found}
            json.dump(merged, file, indent=1, sort_keys=True)


@pytest.fixture(scope="session")
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """All tests of one model come together, as it is made once."""
    return made(request.param, tmp_path_factory.mktemp("model"))


def made(name: str, directory: Path) -> Case:
    tiny = ZOO[name]
    if tiny.needs_torchvision and find_spec("torchvision") is None:
        pytest.skip(f"NOT TESTED: the processor of {name} needs torchvision; make test-models")
    tiny.make(directory)
    return Case(tiny, directory, encode_here)
