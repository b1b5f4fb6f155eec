"""Writes the tables of request fields into docs/rest.md: ``python -m scripts.request_fields``; with ``--check`` it compares them."""

from scripts.generated import ROOT, run
from triptych.services.gateway.request_fields import On, table

PAGE = ROOT / "docs" / "rest.md"
BEGIN, END = "<!-- Written by scripts/request_fields.py; `make lint` compares. -->", "<!-- End of the table. -->"
TABLES = ((On.CHAT, On.COMPLETIONS, On.BOTH), (On.RESPONSES,), (On.MESSAGES,))
"""Routes of each table, in the order of the page."""


def page() -> str:
    """The page with the current tables."""
    before, *rest = PAGE.read_text().split(BEGIN)
    parts = [
        f"{BEGIN}\n\n{table(*routes)}\n\n{END}{part.partition(END)[2]}"
        for routes, part in zip(TABLES, rest, strict=True)
    ]
    return before + "".join(parts)


if __name__ == "__main__":
    raise SystemExit(run("scripts.request_fields", __doc__ or "", lambda: {PAGE: page()}))
