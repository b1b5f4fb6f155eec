from pathlib import Path

import pytest

from tests.unit.engine.tiny import Reference, encoder_engine, make_model
from triptych.engine.encoder import TransformersEncoderEngine


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared by all tests; read-only."""
    return make_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def reference(model_dir: Path) -> Reference:
    return Reference(model_dir)


@pytest.fixture(scope="session")
def encoder(model_dir: Path) -> TransformersEncoderEngine:
    return encoder_engine(model_dir)
