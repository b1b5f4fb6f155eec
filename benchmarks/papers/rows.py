"""Rows of published tables beside what cost functions and simulations say, and why they differ where they do."""

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
    is_bound: bool = False
    """``published`` is the most that it may be."""
    until: float | None = None
    """Of a published range, whose other end is ``published``."""
    instead: str = ""
    """What is known where ``ours`` was not found, as it lies beyond what was tried. Such a row does not agree."""

    @property
    def error(self) -> float:
        """Relative to what was published; infinite if only one of both is a number, or ours unknown. 0 within a bound or a range."""
        if self.instead:
            return float("inf")
        if self.published is None or self.ours is None:
            return 0.0 if self.published is self.ours else float("inf")
        ends = sorted((self.published, self.published if self.until is None else self.until))
        least, most = (float("-inf") if self.is_bound else ends[0]), ends[1]
        nearest = min(max(self.ours, least), most)
        return abs(self.ours - nearest) / abs(nearest) if nearest else abs(self.ours)

    def document(self, paper: str) -> dict[str, object]:
        """As a file has it; ``remark`` says why it differs, if it does."""
        error = None if self.error == float("inf") else self.error
        return {
            "paper": paper,
            "table": self.table,
            "what": self.what,
            "published": self.published,
            "until": self.until,
            "is_bound": self.is_bound,
            "ours": self.ours,
            "instead": self.instead,
            "error": error,
            "assumption": self.assumption,
            "remark": "" if self.agrees else self.differs,
        }

    @property
    def agrees(self) -> bool:
        return self.error <= TOLERANCE


def show(title: str, rows: Iterable[Row], console: Console) -> None:
    """Print the rows."""
    table = Table(title=title, title_justify="left")
    for heading in ("table", "row", "published", "ours", "error", "assumption; why it differs"):
        table.add_column(heading, justify="right" if heading in ("published", "ours", "error") else "left")
    for row in rows:
        error = "-" if row.error == 0 else "x" if row.error == float("inf") else f"{row.error:.1%}"
        remarks = "; ".join(text for text in (row.assumption, "" if row.agrees else row.differs) if text)
        published = f"{'<= ' * row.is_bound}{_figure(row.published)}"
        published += "" if row.until is None else f" to {_figure(row.until)}"
        table.add_row(row.table, row.what, published, row.instead or _figure(row.ours), error, remarks)
    console.print(table)


def _figure(value: float | None) -> str:
    return "does not fit" if value is None else f"{value:.4g}"
