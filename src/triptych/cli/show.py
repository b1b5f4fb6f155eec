"""How requests and processes look in a terminal."""

import re
from typing import Any

from rich.bar import Bar
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_STAGES = (
    ("prepare", "prepare_s", "blue", "router: check, hash, tokenize"),
    ("encode", "encode_s", "magenta", "until the last item had its embedding: calls, waits and repeats included"),
    ("pull", "pull_s", "cyan", "until all of them were in the text instance"),
    ("queue", "queue_s", "yellow", "text instance: what else it waited, before the pull and after"),
    ("prefill", "prefill_s", "green", "until the first token was there"),
    ("decode", "decode_s", "bright_green", "all tokens after it"),
)
"""In the order in which they happen."""
_BAR_CELLS = 60
_MOST_BARS = 16


def printable(text: str) -> str:
    """A model's text without what could steer the terminal."""
    return _CONTROL.sub("", text)


def timeline(document: dict[str, Any]) -> RenderableType:
    """What ``/v1/requests/{id}/timeline`` answered: a line per item, then the stages of the request."""
    parts: list[RenderableType] = []
    if document["items"]:
        parts.append(_items(document["items"]))
    parts.append(_stages(document))
    return Group(*parts)


def _items(items: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("item")
    for name in ("size", "tokens"):
        table.add_column(name, justify="right")
    table.add_column("encoder")
    for name in ("decode, wait", "encode"):
        table.add_column(name, justify="right")
    table.add_column("pulled over")
    for name in ("bytes", "in"):
        table.add_column(name, justify="right")
    for item in items:
        attempts = f" (attempt {item['encode_attempts']})" if item["encode_attempts"] > 1 else ""
        encoded = not item["encoder_cached"]
        pulled = not item["text_cached"]
        table.add_row(
            _name(item),
            f"{item['width']}x{item['height']}" if item["width"] else "-",
            str(item["tokens"]),
            Text(item["encoder"] + attempts, style="cyan"),
            _ms(item["queue_s"]) if encoded else "-",
            _ms(item["encode_s"]) if encoded else "cached",
            item["pull_backend"] if pulled else "cached",
            f"{item['pull_bytes']:,}" if pulled else "-",
            _ms(item["pull_s"]) if pulled else "-",
        )
    return table


def _stages(document: dict[str, Any]) -> Text:
    """Only those that there were; those of cached items take the time of asking for them."""
    line = Text()
    for name, field, _, _ in _STAGES:
        if document[field] > 0:
            line.append(f"{name} ", style="dim").append(f"{_ms(document[field])}   ")
    line.append("= ", style="dim").append(f"{_ms(document['total_s'])}", style="bold")
    line.append(" with the calls between them; first token after ", style="dim").append(_ms(document["ttft_s"]))
    return line.append(", on ", style="dim").append(document["text_instance"], style="cyan")


def _name(item: dict[str, Any]) -> str:
    """Several encoders may have done parts of one item: then each has a line, with its units."""
    part = f" {item['shard']}" if item.get("shard") else ""
    return f"{item['modality']} {item['item'] + 1}{part}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"


def bars(document: dict[str, Any]) -> RenderableType:
    """The request from left to right: a bar per stage with what it is, and under the encode stage one per item.

    Durations are all that a timeline has (no clock leaves its process), so stages are drawn one after the other, and
    an item's bar after what it waited; an item that an encoder had already has none.
    """
    total_s = max(float(document["total_s"]), 1e-9)
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column(width=_BAR_CELLS)
    table.add_column(justify="right")
    table.add_column(style="dim", overflow="fold")
    at_s = 0.0

    def row(name: str, begin_s: float, took_s: float, colour: str, note: str) -> None:
        bar = Bar(total_s, min(begin_s, total_s), min(begin_s + took_s, total_s), width=_BAR_CELLS, color=colour)
        table.add_row(name, bar, _ms(took_s), note)

    for name, field, colour, note in _STAGES:
        took_s = float(document[field])
        if took_s <= 0:
            continue
        cached = name == "encode" and all(item["encoder_cached"] for item in document["items"])
        row(name, at_s, took_s, colour, "asking: everything was encoded before" if cached else note)
        if name == "encode":
            for item in document["items"][:_MOST_BARS]:
                if item["encoder_cached"]:
                    table.add_row(f"  {_name(item)}", "", "cached", item["encoder"])
                else:
                    begin_s = at_s + min(item["queue_s"], max(0.0, took_s - item["encode_s"]))
                    row(f"  {_name(item)}", begin_s, item["encode_s"], "bright_black", item["encoder"])
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
