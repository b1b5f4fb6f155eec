"""Terminal output of requests and processes."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.bar import Bar
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, JustifyMethod, RenderableType, RenderResult
from rich.segment import Segment
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
"""Stages of a timeline, in order of time."""
_WIDEST_BAR, _NARROWEST_BAR = 60, 16
"""Widths of a bar, terminal cells."""
_GAP = 2
_ADDRESS_CELLS = {"address": 21, "admin port": 23}
"""Cells of an address that are not wrapped, by the name of the column."""
_EXPLAINED_FROM = 70
"""Terminal width below which bars have no explanations."""
_ALL_OF_ITEMS_FROM = 95
_MOST_BARS = 16


def timeline(document: dict[str, Any]) -> RenderableType:
    """The answer of ``/v1/requests/{id}/timeline``: a line per item, then the stages of the request."""
    parts: list[RenderableType] = []
    if document["items"]:
        parts.append(_Items([_item_cells(item) for item in document["items"]]))
    parts.append(_stages(document))
    return Group(*parts)


@dataclass(frozen=True, slots=True)
class _Column:
    name: str
    justify: JustifyMethod = "left"
    from_width: int = 0
    """Terminal width below which this column is left out: the least important go first."""
    whole: bool = True
    style: str = ""


_ITEM_COLUMNS = (
    _Column("item"),
    _Column("size", "right", _ALL_OF_ITEMS_FROM),
    _Column("tokens", "right", _EXPLAINED_FROM),
    _Column("encoder", whole=False, style="cyan"),
    _Column("decode, wait", "right"),
    _Column("encode", "right"),
    _Column("pulled over", from_width=_EXPLAINED_FROM),
    _Column("bytes", "right", _ALL_OF_ITEMS_FROM),
    _Column("in", "right"),
)


@dataclass(frozen=True, slots=True)
class _Items:
    """A line per item, with as many columns as fit; names and times are never truncated."""

    rows: Sequence[tuple[str, ...]]

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> RenderResult:
        shown = [index for index, column in enumerate(_ITEM_COLUMNS) if options.max_width >= column.from_width]
        table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, _GAP, 0, 0))
        for column in (_ITEM_COLUMNS[index] for index in shown):
            least = max(map(len, column.name.split()))  # a title may wrap
            table.add_column(column.name, justify=column.justify, overflow="fold", min_width=least)
        for cells in self.rows:
            table.add_row(
                *(Text(cells[i], no_wrap=_ITEM_COLUMNS[i].whole, style=_ITEM_COLUMNS[i].style) for i in shown)
            )
        yield table


def _item_cells(item: dict[str, Any]) -> tuple[str, ...]:
    """Cells in the order of ``_ITEM_COLUMNS``."""
    attempts = f" (attempt {item['encode_attempts']})" if item["encode_attempts"] > 1 else ""
    hedged = " (hedged)" if item.get("hedge_won") else ""
    encoded = not item["encoder_cached"]
    pulled = not item["text_cached"]
    return (
        _name(item),
        f"{item['width']}x{item['height']}" if item["width"] else "-",
        str(item["tokens"]),
        item["encoder"] + attempts + hedged,
        _ms(item["queue_s"]) if encoded else "-",
        _ms(item["encode_s"]) if encoded else "cached",
        item["pull_backend"] if pulled else "cached",
        f"{item['pull_bytes']:,}" if pulled else "-",
        _ms(item["pull_s"]) if pulled else "-",
    )


def _stages(document: dict[str, Any]) -> Text:
    """The stages that took place; for cached items they are the time of the lookup."""
    line = Text()
    for name, field, _, _ in _STAGES:
        if document[field] > 0:
            line.append(f"{name} ", style="dim").append(f"{_ms(document[field])}   ")
    line.append("= ", style="dim").append(f"{_ms(document['total_s'])}", style="bold")
    line.append(" with the calls between them; first token after ", style="dim").append(_ms(document["ttft_s"]))
    line.append(", on ", style="dim")
    if document.get("prefill_instance"):
        line.append(document["prefill_instance"], style="cyan").append(", transferred to ", style="dim")
        line.append(document["text_instance"], style="cyan").append(
            f" in {_ms(document['kv_transfer_s'])}", style="dim"
        )
    else:
        line.append(document["text_instance"], style="cyan")
    if document.get("continuations"):
        lost = "a router" if document.get("continued_tokens") else "another"
        line.append(f" after {lost} was lost, with a pause of ", style="dim").append(_ms(document["interrupted_s"]))
    if document.get("preemptions"):
        line.append(", preempted for ", style="dim").append(_ms(document["preempted_s"]))
    return line


def _name(item: dict[str, Any]) -> str:
    """The item's name; a part of an item split over several encoders has its range of units."""
    part = f" {item['shard']}" if item.get("shard") else ""
    return f"{item['modality']} {item['item'] + 1}{part}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"


@dataclass(frozen=True, slots=True)
class _Row:
    """A line of ``bars``. Without a length it has ``said`` in place of a duration and no bar."""

    name: str
    begin_s: float = 0.0
    took_s: float | None = None
    colour: str = ""
    said: str = ""
    note: str = ""

    @property
    def time(self) -> str:
        return self.said if self.took_s is None else _ms(self.took_s)

    def bar(self, total_s: float, cells: int) -> RenderableType:
        if self.took_s is None:
            return ""
        begin_s, end_s = min(self.begin_s, total_s), min(self.begin_s + self.took_s, total_s)
        return Bar(total_s, begin_s, end_s, width=cells, color=self.colour)


@dataclass(frozen=True, slots=True)
class _Bars:
    """Rows for any width: bars shrink first, then notes are left out; names and times are never truncated."""

    rows: Sequence[_Row]
    total_s: float

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> RenderResult:
        explained = options.max_width >= _EXPLAINED_FROM
        left = options.max_width - 2 * _GAP
        left -= max((cell_len(row.name) for row in self.rows), default=0)
        left -= max((cell_len(row.time) for row in self.rows), default=0)
        if explained:
            left -= _GAP + max((cell_len(row.note) for row in self.rows), default=0)
        cells = min(_WIDEST_BAR, max(_NARROWEST_BAR if explained else 1, left))
        table = Table.grid(padding=(0, _GAP, 0, 0))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(width=cells)
        table.add_column(justify="right", no_wrap=True)
        if explained:
            table.add_column(style="dim", overflow="fold")
        for row in self.rows:
            line = [row.name, row.bar(self.total_s, cells), row.time]
            table.add_row(*line, *([row.note] if explained else []))
        yield table


def bars(document: dict[str, Any]) -> RenderableType:
    """Bars of a request, from left to right: one per stage, and one per item under the encode stage.

    A timeline has durations only, as no clock leaves its process. So stages are drawn one after the other, and an
    item's bar after its wait. A cached item has none.
    """
    rows: list[_Row] = []
    at_s = 0.0
    for name, field, colour, note in _STAGES:
        took_s = float(document[field])
        if took_s <= 0:
            continue
        cached = name == "encode" and all(item["encoder_cached"] for item in document["items"])
        rows.append(_Row(name, at_s, took_s, colour, note="asking: everything was encoded before" if cached else note))
        if name == "encode":
            rows += _item_rows(document["items"], at_s, took_s)
        at_s += took_s
    return _Bars(rows, max(float(document["total_s"]), 1e-9))


def _item_rows(items: list[dict[str, Any]], at_s: float, stage_s: float) -> Iterator[_Row]:
    for item in items[:_MOST_BARS]:
        name, encoder = f"  {_name(item)}", item["encoder"]
        if item["encoder_cached"]:
            yield _Row(name, said="cached", note=encoder)
        else:
            begin_s = at_s + min(item["queue_s"], max(0.0, stage_s - item["encode_s"]))
            yield _Row(name, begin_s, item["encode_s"], "bright_black", note=encoder)
    if len(items) > _MOST_BARS:
        yield _Row(f"  and {len(items) - _MOST_BARS} more")


def folding_table(*columns: str) -> Table:
    """A table without lines whose cells wrap, the last column's first."""
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, _GAP, 0, 0))
    for column in columns:
        whole = _ADDRESS_CELLS.get(column)
        table.add_column(column, overflow="fold", min_width=whole, max_width=None if column == columns[-1] else 30)
    return table


class _PlainConsole(Console):
    """Leaves control characters out of all texts, which may come from models, services and other users."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(_CONTROL.sub("", segment.text), segment.style)


def plain_console(*, stderr: bool = False) -> Console:
    """A console without markup and highlighting, wide enough for tables in a log, which control characters cannot reach."""
    console = _PlainConsole(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = max(console.width, 120)
    return console
