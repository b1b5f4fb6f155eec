"""Items of a generic model that contradict it: refused one by one, and the engine goes on."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.integration.families.harness import Case, finish
from tests.models.conftest import made
from tests.models.test_parity import ANSWER_TOKENS, clear_question
from triptych.domain.embedding import DType, Tensor, TensorSpec
from triptych.domain.engine import EngineRequest
from triptych.errors import InvalidRequest
from triptych.families.model_files import BadModel

pytestmark = pytest.mark.timeout(180)

GRID = "image_grid_thw"


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return made("qwen3_5", tmp_path_factory.mktemp("model"))


def with_tensor(request: EngineRequest, name: str, values: list[list[int]]) -> EngineRequest:
    """The request whose item has this tensor beside, or in place of, its own."""
    (item,) = request.embeddings
    array = np.array(values, np.int32)
    tensor = Tensor(TensorSpec(name, DType.I32, array.shape), memoryview(array.tobytes()))
    return replace(request, embeddings=(replace(item, tensors={**item.tensors, name: tensor}),))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("attention_mask", [[1, 1]]),
        ("pixel_values", [[1, 1]]),
        ("position_ids", [[0, 0]]),
        (GRID, [[1] * 3] * 30),
        (GRID, [[1, 1 << 20, 1 << 20]]),
        (GRID, [[1, -4, 4]]),
        (GRID, [[0, 0, 0]]),
        (GRID, [[1, 2, 400]]),
    ],
)
def test_an_item_with_other_tensors_or_sizes_is_refused(case: Case, name: str, values: list[list[int]]) -> None:
    question = clear_question(case, 1, 1)
    request = case.request("good", question, ANSWER_TOKENS)
    engine = case.engine()
    with pytest.raises(InvalidRequest):
        engine.add(with_tensor(request, name, values))
    engine.add(request)
    assert finish(engine)["good"] == case.answer(question, ANSWER_TOKENS)


def test_a_model_whose_weights_contradict_its_configuration_is_refused_at_start(case: Case, tmp_path: Path) -> None:
    for file in case.directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = (tmp_path / "config.json").read_text()
    assert '"hidden_size": 64' in config
    (tmp_path / "config.json").write_text(config.replace('"hidden_size": 64', '"hidden_size": 96'))
    with pytest.raises(BadModel, match=r"mismatched keys|cannot be loaded"):
        replace(case, directory=tmp_path).engine()


def test_a_size_that_the_processor_refuses_is_refused_alone(case: Case) -> None:
    """Qwen's processor takes no image that is over 200 times as long as wide."""
    (item,) = (part for part in case.question(1, 1) if not isinstance(part, str))
    family = case.builder.family
    with pytest.raises(InvalidRequest, match="refuses the image"):
        family.prompt_replacement(replace(item.info, width=2000, height=2))
    assert family.prompt_replacement(item.info)
