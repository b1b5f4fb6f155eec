"""Workloads from files: ServeGen's client profiles, and Azure's LMM inference trace."""

import csv
import gzip
import io
import json
import math
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from triptych.cli.bench.workload import MAX_IMAGES, MAX_SIDE_PIXELS, Distribution, Planned, Size, WorkloadError

PIXELS_PER_TOKEN_SIDE = 28
"""A token of the models behind ServeGen's image workload (Qwen-VL) stands for 28 x 28 pixels."""
DEFAULT_SIZE = Size(336, 336)
_SETTLE_GAPS = 50
"""Mean gaps before a window from which arrivals are drawn: a process that began with it would begin with a burst."""
_WEIGHT = re.compile(r"(\d+)(?:\.\d*)?\s*:\s*([\d.eE+-]+)")
_TRACE_FILE = re.compile(r"chunk-(\d+)-trace\.csv")
_AZURE_COLUMNS = ("TIMESTAMP", "NumImages", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a trace, replayed so that it has ``rate`` requests per second on average (None: as recorded)."""

    start_s: float
    duration_s: float
    rate: float | None = None


def load(path: Path, span: Span, size: Size | None, rng: random.Random) -> list[Planned]:
    """The requests of a directory (ServeGen) or a CSV file (Azure), by arrival. Raises WorkloadError.

    ``size`` overrides the size of images: ServeGen knows their tokens, of which squares are made; Azure knows nothing.
    """
    try:
        planned = _servegen(path, span, size, rng) if path.is_dir() else _azure(path, span, size or DEFAULT_SIZE)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise WorkloadError(f"cannot read {path.name}: {getattr(error, 'strerror', None) or error}") from None
    if not planned:
        raise WorkloadError(f"{path.name} has no request between {span.start_s:g} s and +{span.duration_s:g} s")
    return planned


# --- ServeGen: statistics per client, from which requests are drawn ---------------------------------------------------


@dataclass(frozen=True, slots=True)
class Window:
    """A client's arrivals from ``start_s`` on, until the next window: gaps of a ``Gamma`` or ``Weibull`` distribution."""

    start_s: float
    end_s: float
    rate: float
    family: str
    shape: float
    scale_s: float

    def gap_s(self, rng: random.Random) -> float:
        if self.family == "Gamma":
            return rng.gammavariate(self.shape, self.scale_s)
        return rng.weibullvariate(self.scale_s, self.shape)


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a client's requests are made of during one part of the day."""

    text_tokens: Distribution
    image_tokens: Distribution
    image_count: Distribution
    output_tokens: Distribution

    def request(self, arrival_s: float, size: Size | None, rng: random.Random) -> Planned:
        count = min(self.image_count.draw(rng), MAX_IMAGES)
        images = tuple(size or _square(self.image_tokens.draw(rng)) for _ in range(count))
        return Planned(arrival_s, self.text_tokens.draw(rng), images, max(1, self.output_tokens.draw(rng)))


@dataclass(frozen=True, slots=True)
class Profile:
    """One client. ``sizes`` is by the start of its part of the day, ascending."""

    windows: tuple[Window, ...]
    sizes: tuple[tuple[float, Sizes], ...]

    def sizes_at(self, at_s: float) -> Sizes:
        return next((sizes for start_s, sizes in reversed(self.sizes) if start_s <= at_s), self.sizes[0][1])


def _servegen(directory: Path, span: Span, size: Size | None, rng: random.Random) -> list[Planned]:
    names = sorted((int(match[1]), path) for path in directory.iterdir() if (match := _TRACE_FILE.fullmatch(path.name)))
    if not names:
        raise WorkloadError(f"{directory.name} has no chunk-N-trace.csv: it is not a ServeGen workload")
    profiles = [_profile(path, path.with_name(f"chunk-{number}-dataset.json"), span) for number, path in names]
    return sample(profiles, span, size, rng)


def sample(profiles: list[Profile], span: Span, size: Size | None, rng: random.Random) -> list[Planned]:
    """Draw the requests of all clients within the span; a rate stretches all gaps alike, so that bursts stay bursts."""
    end_s = span.start_s + span.duration_s
    active = [
        (profile, window, max(window.start_s, span.start_s), min(window.end_s, end_s))
        for profile in profiles
        for window in profile.windows
        if window.rate > 0 and window.start_s < end_s and window.end_s > span.start_s
    ]
    recorded = sum(window.rate * (to_s - from_s) for _, window, from_s, to_s in active) / span.duration_s
    stretch = 1.0 if span.rate is None or not recorded else recorded / span.rate
    planned = []
    for profile, window, from_s, to_s in active:
        at_s = from_s - (_SETTLE_GAPS + rng.random()) * stretch / window.rate
        while (at_s := at_s + max(window.gap_s(rng) * stretch, 1e-6)) < to_s:
            if at_s < from_s:
                continue
            planned.append(profile.sizes_at(at_s).request(at_s - span.start_s, size, rng))
    return sorted(planned, key=lambda request: request.arrival_s)


def _profile(trace: Path, dataset: Path, span: Span) -> Profile:
    with trace.open(newline="") as file:
        rows = [row for row in csv.reader(file) if row]
    try:
        starts_s = [float(row[0]) for row in rows]
        step_s = starts_s[1] - starts_s[0] if len(starts_s) > 1 else 600.0
        ends_s = [*starts_s[1:], starts_s[-1] + step_s]
        windows = tuple(_window(row, end_s) for row, end_s in zip(rows, ends_s, strict=True))
    except (ValueError, IndexError) as error:
        raise WorkloadError(f"{trace.name} is not a ServeGen trace: {error}") from None
    try:
        document = json.loads(dataset.read_text())
        parts = sorted((float(start), part) for start, part in document.items())
        first = max((index for index, (start, _) in enumerate(parts) if start <= span.start_s), default=0)
        end_s = max(span.start_s + span.duration_s, parts[first][0] + 1)
        sizes = [(start, _sizes(part)) for start, part in parts[first:] if start < end_s]  # the others take their time
    except (ValueError, KeyError, AttributeError, TypeError, IndexError) as error:
        raise WorkloadError(f"{dataset.name} is not a ServeGen data set: {error!r}") from None
    return Profile(windows, tuple(sizes))


def _window(row: list[str], end_s: float) -> Window:
    start_s, rate, _, family, shape, scale_s = row
    window = Window(float(start_s), end_s, float(rate), family, float(shape or 0), float(scale_s or 0))
    usable = family in ("Gamma", "Weibull") and window.shape > 0 and window.scale_s > 0
    if window.rate > 0 and not (usable and math.isfinite(window.rate * window.shape * window.scale_s)):
        raise ValueError(f"the window at {start_s} s has no usable distribution")
    return window


def _sizes(part: dict[str, Any]) -> Sizes:
    def read(name: str) -> Distribution:
        return Distribution.of([(int(value), float(weight)) for value, weight in _WEIGHT.findall(part[name])])

    return Sizes(read("text_tokens"), read("image_tokens"), read("image_count"), read("output_tokens"))


def _square(tokens: int) -> Size:
    """A square image of about so many tokens."""
    side = max(1, round(math.sqrt(tokens))) * PIXELS_PER_TOKEN_SIDE
    return Size(min(side, MAX_SIDE_PIXELS), min(side, MAX_SIDE_PIXELS))


# --- Azure: one row per request ---------------------------------------------------------------------------------------


def _azure(path: Path, span: Span, size: Size) -> list[Planned]:
    """``ContextTokens`` is the whole prompt: what the images take of it, by their size, is not sent as text again."""
    image_tokens = max(1, size.width * size.height // PIXELS_PER_TOKEN_SIDE**2)
    rows = []
    with _opened(path) as file:
        for at_s, images, context, generated in _azure_rows(path.name, file):
            if at_s >= span.start_s + span.duration_s:
                break
            if at_s >= span.start_s:
                count = min(images, MAX_IMAGES)
                rows.append((at_s - span.start_s, max(1, context - count * image_tokens), count, max(1, generated)))
    stretch = 1.0 if span.rate is None else len(rows) / span.duration_s / span.rate
    return [
        Planned(at_s * stretch, text_tokens, (size,) * count, output_tokens)
        for at_s, text_tokens, count, output_tokens in rows
    ]


def _opened(path: Path) -> io.TextIOBase:
    if path.suffix == ".gz":
        return io.TextIOWrapper(gzip.open(path), encoding="utf-8", newline="")
    return path.open(encoding="utf-8", newline="")


def _azure_rows(name: str, file: io.TextIOBase) -> Iterator[tuple[float, int, int, int]]:
    """Seconds since the first request, images, tokens in, tokens out."""
    reader = csv.DictReader(file)
    missing = [column for column in _AZURE_COLUMNS if column not in (reader.fieldnames or ())]
    if missing:
        raise WorkloadError(f"{name} lacks the columns {', '.join(missing)}")
    first: datetime | None = None
    for number, row in enumerate(reader, start=2):
        try:
            at = datetime.fromisoformat(row["TIMESTAMP"])
            first = first or at
            images, context, generated = (max(0, int(float(row[column]))) for column in _AZURE_COLUMNS[1:])
            yield (at - first).total_seconds(), images, context, generated
        except (ValueError, TypeError, OverflowError) as error:
            raise WorkloadError(f"{name}, line {number}: {error}") from None
