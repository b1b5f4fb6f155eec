import re
from pathlib import Path

from triptych.families.registry import FAMILIES

PAGE = Path(__file__).parents[3] / "docs" / "models.md"


def test_the_models_page_lists_exactly_the_served_families() -> None:
    table = PAGE.read_text().partition("\n## ")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == sorted(FAMILIES)
