"""Inputs that several tests of the command line share."""

from pathlib import Path

import pytest
from triptych.engine.delay import synthetic_profiles

from triptych.demo import MODEL_DIR
from triptych.runtime.profiles import write_profile


@pytest.fixture(scope="module")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with synthetic profiles of both parts of the demo model."""
    directory = tmp_path_factory.mktemp("profiles")
    for one in synthetic_profiles(MODEL_DIR):
        write_profile(directory / one.file_name, one)
    return directory
