"""Inputs that several tests of the command line share."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.families.test_architecture import PUBLISHED
from triptych.demo import MODEL_DIR
from triptych.engine.delay import synthetic_profiles
from triptych.runtime.profiles import write_profile


@pytest.fixture(scope="module")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with synthetic profiles of both parts of the demo model."""
    directory = tmp_path_factory.mktemp("profiles")
    for profile in synthetic_profiles(MODEL_DIR):
        write_profile(directory / profile.file_name, profile)
    return directory


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The configuration of LLaVA 1.5 with 7 billion parameters, without weights."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(PUBLISHED["llava-1.5-7b"][1] | {"torch_dtype": "float16"}))
    return path


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A shell's background jobs ignore Ctrl-C, and their children as well."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
