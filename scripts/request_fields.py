"""Writes the table of request fields into docs/rest.md: ``python -m scripts.request_fields``; with ``--check`` it compares them."""

from scripts.generated import ROOT, run
from triptych.services.gateway.request_fields import table

PAGE = ROOT / "docs" / "rest.md"
BEGIN, END = "<!-- Written by scripts/request_fields.py; `make lint` compares. -->", "<!-- End of the table. -->"


def page() -> str:
    """The page with the current table."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    raise SystemExit(run("scripts.request_fields", __doc__ or "", lambda: {PAGE: page()}))
