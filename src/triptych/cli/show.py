"""How requests and processes look in a terminal."""

import re
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_STAGES = (
    ("prepare", "prepare_s"),
    ("encode", "encode_s"),
    ("queue", "queue_s"),
    ("pull", "pull_s"),
    ("prefill", "prefill_s"),
    ("decode", "decode_s"),
    ("first token", "ttft_s"),
    ("total", "total_s"),
)


def printable(text: str) -> str:
    """A model's text without what could steer the terminal."""
    return _CONTROL.sub("", text)


def timeline(document: dict[str, Any]) -> RenderableType:
    """What ``/v1/requests/{id}/timeline`` answered: a line per image, then the stages of the request."""
    parts: list[RenderableType] = []
    if document["items"]:
        parts.append(_items(document["items"]))
    parts.append(_stages(document))
    return Group(*parts)


def _items(items: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for name in ("image", "size", "tokens"):
        table.add_column(name, justify="right")
    table.add_column("encoder")
    for name in ("wait", "encode"):
        table.add_column(name, justify="right")
    table.add_column("pulled over")
    for name in ("bytes", "in"):
        table.add_column(name, justify="right")
    for item in items:
        attempts = f" (attempt {item['encode_attempts']})" if item["encode_attempts"] > 1 else ""
        table.add_row(
            str(item["item"] + 1),
            f"{item['width']}x{item['height']}",
            str(item["tokens"]),
            Text(item["encoder"] + attempts, style="cyan"),
            _ms(item["queue_s"]),
            "cached" if item["encoder_cached"] else _ms(item["encode_s"]),
            "cached" if item["text_cached"] else item["pull_backend"],
            f"{item['pull_bytes']:,}",
            _ms(item["pull_s"]),
        )
    return table


def _stages(document: dict[str, Any]) -> Text:
    line = Text()
    for name, field in _STAGES:
        line.append(f"{name} ", style="dim").append(f"{_ms(document[field])}   ")
    line.append("on ", style="dim").append(document["text_instance"], style="cyan")
    return line


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"


def plain_console(*, stderr: bool = False) -> Console:
    """A console that neither marks up nor highlights what others wrote, and is wide enough for tables in a log."""
    console = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = max(console.width, 120)
    return console
