"""Reads the metrics on processes' admin ports."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import httpx

_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class Samples:
    """Values of one scrape, by name and labels."""

    values: Mapping[tuple[str, frozenset[tuple[str, str]]], float]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse Prometheus' text format, skipping lines that are not samples."""
        values = {}
        for line in text.splitlines():
            if match := _SAMPLE.match(line):
                try:
                    values[match[1], frozenset(_LABEL.findall(match[2] or ""))] = float(match[3])
                except ValueError:
                    continue
        return cls(values)

    def total(self, name: str, **labels: str) -> float | None:
        """The sum over all samples with this name and these labels; None when there are none."""
        wanted = set(labels.items())
        matching = [value for (given, has), value in self.values.items() if given == name and wanted <= has]
        return sum(matching) if matching else None


async def scrape(client: httpx.AsyncClient, admin_url: str) -> Samples | None:
    """Read the metrics of a process; None without an answer in time."""
    try:
        response = await client.get(f"{admin_url.rstrip('/')}/metrics", timeout=_TIMEOUT_S)
        response.raise_for_status()
    except (httpx.HTTPError, httpx.InvalidURL):
        return None
    return Samples.parse(response.text)
