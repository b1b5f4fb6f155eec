"""Rows of published tables beside what Triptych's cost functions say, and why they differ where they do."""

from collections.abc import Iterable
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

TOLERANCE = 0.1


@dataclass(frozen=True, slots=True)
class Row:
    """``published`` None: out of memory or context, as is ``ours``."""

    table: str
    what: str
    published: float | None
    ours: float | None
    assumption: str = ""
    differs: str = ""
    """Why it is beyond the tolerance."""

    @property
    def error(self) -> float:
        """Relative to what was published; infinite if only one of both is a number."""
        if self.published is None or self.ours is None:
            return 0.0 if self.published is self.ours else float("inf")
        return abs(self.ours - self.published) / abs(self.published) if self.published else abs(self.ours)

    @property
    def agrees(self) -> bool:
        return self.error <= TOLERANCE


def show(title: str, rows: Iterable[Row], console: Console) -> bool:
    """Print the rows. Return whether each agrees within the tolerance or says why not."""
    table = Table(title=title, title_justify="left")
    for heading in ("table", "row", "published", "ours", "error", "assumption; why it differs"):
        table.add_column(heading, justify="right" if heading in ("published", "ours", "error") else "left")
    explained = True
    for row in rows:
        explained &= row.agrees or bool(row.differs)
        error = "-" if row.error == 0 else "x" if row.error == float("inf") else f"{row.error:.1%}"
        remarks = "; ".join(text for text in (row.assumption, "" if row.agrees else row.differs) if text)
        table.add_row(row.table, row.what, _figure(row.published), _figure(row.ours), error, remarks)
    console.print(table)
    return explained


def _figure(value: float | None) -> str:
    return "does not fit" if value is None else f"{value:.4g}"
