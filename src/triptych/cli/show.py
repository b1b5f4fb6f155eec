"""How requests and processes look in a terminal."""

import re
from typing import Any

from rich.bar import Bar
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
_BARS = (
    ("prepare", "blue"),
    ("encode", "magenta"),
    ("pull", "cyan"),
    ("queue", "yellow"),
    ("prefill", "green"),
    ("decode", "bright_green"),
)
_BAR_CELLS = 60
_MOST_BARS = 16


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


def bars(document: dict[str, Any]) -> RenderableType:
    """The request from left to right: a bar per stage, and under the encode stage one per item.

    Durations are all that a timeline has (no clock leaves its process), so stages are drawn one after the other; what
    an item waited is the gap before its bar.
    """
    total_s = max(float(document["total_s"]), 1e-9)
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column(width=_BAR_CELLS)
    table.add_column(justify="right")
    at_s = 0.0

    def row(name: str, begin_s: float, took_s: float, colour: str, note: str = "") -> None:
        bar = Bar(total_s, min(begin_s, total_s), min(begin_s + took_s, total_s), width=_BAR_CELLS, color=colour)
        table.add_row(name, bar, _ms(took_s), note)

    for name, colour in _BARS:
        took_s = float(document[f"{name}_s"])
        if took_s <= 0:
            continue
        row(name, at_s, took_s, colour)
        if name == "encode":
            for item in document["items"][:_MOST_BARS]:
                note = "cached" if item["encoder_cached"] else item["encoder"]
                row(f"  item {item['item'] + 1}", at_s + item["queue_s"], item["encode_s"], "bright_black", note)
            if len(document["items"]) > _MOST_BARS:
                table.add_row(f"  and {len(document['items']) - _MOST_BARS} more")
        at_s += took_s
    return table


def plain_console(*, stderr: bool = False) -> Console:
    """A console that neither marks up nor highlights what others wrote, and is wide enough for tables in a log."""
    console = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = max(console.width, 120)
    return console
