"""The example of docs/adding_a_family.md, offered unchanged by a plug-in, answers as ``generate`` does."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.integration.families import harness
from tests.integration.families.harness import Case, finish
from tests.plugins import offer
from triptych.families.model_files import BadModel, ModelFiles
from triptych.families.registry import written_family

PAGE = Path(__file__).parents[3] / "docs" / "adding_a_family.md"
ANSWER_TOKENS = 8


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The definitions of the page's last block. Those of the others are offered by a plug-in, as the page says."""
    *offered, tested = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    points = {
        "triptych.families": {"vipllava": "vipllava_plugin:VipLlava"},
        "triptych.adapters": {"vipllava": "vipllava_plugin:ADAPTERS"},
    }
    offer(tmp_path / "packages", monkeypatch, "vipllava_plugin", "\n".join(offered), points)
    defined: dict[str, Any] = {"__name__": "tests.integration.families.example"}
    exec(compile(tested, str(PAGE), "exec"), defined)  # noqa: S102 - the page is our own
    return defined


@pytest.mark.timeout(180)
def test_the_example_answers_as_generate_does(example: dict[str, Any], tmp_path: Path) -> None:
    (tiny,) = example["TINIES"]
    tiny.make(directory := tmp_path / "model")
    case = Case(tiny, directory, lambda directory, items: harness._encode(str(directory), list(items)))
    questions = {f"r{items}": case.question(items, items) for items in (0, 1, 3)}
    engine = case.engine()
    for name, question in questions.items():
        engine.add(case.request(name, question, ANSWER_TOKENS))
    assert finish(engine) == {name: case.answer(question, ANSWER_TOKENS) for name, question in questions.items()}


def test_the_error_for_an_unknown_family_links_to_the_page(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "vipllava"}')
    with pytest.raises(BadModel, match=r"docs/adding_a_family\.md") as caught:
        written_family(ModelFiles.load(tmp_path))
    assert PAGE.is_file()
    assert "triptych.families.registry.FAMILIES" in str(caught.value)


def test_every_file_named_in_the_page_exists() -> None:
    root = PAGE.parents[1]
    for place in re.findall(r"`((?:families|engine|tests|src)/[\w./]+\.py)", PAGE.read_text()):
        if "NAME" not in place:
            assert (root / place).is_file() or (root / "src" / "triptych" / place).is_file(), place
