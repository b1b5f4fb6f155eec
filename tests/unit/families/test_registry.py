"""The page on models lists exactly the families that are served."""

import re
from pathlib import Path

from triptych.families.registry import FAMILIES

PAGE = Path(__file__).parents[3] / "docs" / "models.md"


def test_the_page_on_models_names_every_family() -> None:
    table = PAGE.read_text().partition("\n## ")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == sorted(FAMILIES)
