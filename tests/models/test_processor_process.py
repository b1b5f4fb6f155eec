"""The process beside a router that has a model's processor."""

from pathlib import Path

import psutil
import pytest

from tests.integration.families.harness import Case
from tests.models.conftest import made
from triptych.domain.media import Modality
from triptych.engine.families.item_processor import ItemProcessor
from triptych.errors import InvalidMedia, Unavailable
from triptych.families.generic import BlankItem
from triptych.families.model_files import BadModel, ModelFiles
from triptych.tokens.processor_process import ProcessorProcess
from triptych.tokens.prompt import PromptBuilder

pytestmark = pytest.mark.timeout(180)

SIZES = ((1, 1), (37, 53), (96, 8), (200, 600))


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return made("minicpmv4_6", tmp_path_factory.mktemp("model"))


def test_it_says_what_the_processor_says_in_this_process(case: Case) -> None:
    files = ModelFiles.load(case.directory)
    here, beside = ItemProcessor(files), ProcessorProcess(files)
    assert beside.facts == here.facts
    for width, height in SIZES:
        blank = BlankItem(Modality.IMAGE, width, height, place=width % 2)
        assert beside.processed(blank) == here.processed(blank)
    beside.close()


def test_it_is_started_again_when_it_is_lost(case: Case) -> None:
    beside = ProcessorProcess(ModelFiles.load(case.directory))
    blank = BlankItem(Modality.IMAGE, 64, 48)
    expected = beside.processed(blank)
    (child,) = (child for child in psutil.Process().children() if "processor_server" in " ".join(child.cmdline()))
    child.kill()
    child.wait()
    with pytest.raises(Unavailable, match="processor was lost"):
        beside.processed(blank)
    assert beside.processed(blank) == expected
    beside.close()


def test_a_router_builds_the_same_prompt_by_it(case: Case) -> None:
    started: list[ProcessorProcess] = []

    def start(files: ModelFiles) -> ProcessorProcess:
        started.append(ProcessorProcess(files))
        return started[0]

    builder = PromptBuilder.load(ModelFiles.load(case.directory), process=start)
    infos = [item.info for item in case.question(2, 2) if not isinstance(item, str)]
    assert [builder.family.prompt_replacement(info) for info in infos] == [
        case.builder.family.prompt_replacement(info) for info in infos
    ]
    started[0].close()


def test_a_size_that_the_processor_refuses_is_the_clients_fault(case: Case) -> None:
    with pytest.raises(InvalidMedia, match="the model's processor refuses the image"):
        ItemProcessor(ModelFiles.load(case.directory)).processed(BlankItem(Modality.IMAGE, 0, 10))


def test_a_model_that_transformers_does_not_know_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen9"}')
    with pytest.raises(BadModel, match=r"qwen9.* is not known; .*Nor can its processor in transformers serve it"):
        PromptBuilder.load(ModelFiles.load(tmp_path))
