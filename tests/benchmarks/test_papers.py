"""Published tables that need only formulas: each row is within the tolerance or says why it is not."""

import pytest

from benchmarks.papers.__main__ import PAPERS, main
from benchmarks.papers.rows import Row


@pytest.mark.parametrize(
    "row", [row for paper in PAPERS for row in paper.rows()], ids=lambda row: f"{row.table}: {row.what}"
)
def test_a_row_agrees_or_says_why_it_differs(row: Row) -> None:
    assert row.agrees or row.differs


def test_most_rows_agree() -> None:
    rows = [row for paper in PAPERS for row in paper.rows()]
    assert sum(row.agrees for row in rows) >= 0.7 * len(rows)


def test_all_tables_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main() == 0
    printed = capsys.readouterr().out
    assert all(paper.TITLE in printed for paper in PAPERS)
