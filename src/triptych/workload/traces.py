"""Workloads from files: ServeGen's client profiles, Azure's LMM inference trace, and recordings."""

import csv
import gzip
import io
import math
import random
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from triptych.files import BadFile, check_regular, read_json, read_text
from triptych.workload.recorded import parsed
from triptych.workload.requests import (
    MAX_IMAGES,
    MAX_SIDE_PIXELS,
    Distribution,
    Plan,
    Planned,
    Size,
    WorkloadError,
    check_size,
    gamma_arrivals,
    sources,
    until,
)

PIXELS_PER_TOKEN_SIDE = 28
"""Pixels per side of a token of Qwen-VL, the models behind ServeGen's image workload."""
DEFAULT_SIZE = Size(336, 336)
_LEAST_SHAPE = 0.01
"""Below this shape, requests arrive hundreds at an instant."""
_WEIGHT = re.compile(r"(\d+)(?:\.\d*)?\s*:\s*([\d.eE+-]+)")
_TRACE_FILE = re.compile(r"chunk-(\d+)-trace\.csv")
_MAX_NBYTES = 256 << 20
_MAX_REASON = 200
"""Characters of a fault, which quotes the file."""
_LEAST_S = 1e-3
"""Shortest duration of a recording: of requests that came at once."""
_AZURE_COLUMNS = ("TIMESTAMP", "NumImages", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True)
class Span:
    """The part to replay: start, duration (infinite: to the end), and requests per second (None: as recorded)."""

    start_s: float
    duration_s: float
    rate: float | None = None


def load(path: Path, span: Span, size: Size | None, rng: random.Random) -> Plan:
    """The requests of a directory (ServeGen), a CSV file (Azure) or JSON lines (recorded), by arrival. Raises WorkloadError.

    ``size`` overrides image sizes: ServeGen records their tokens, replayed as squares; Azure records nothing.
    """
    if span.rate is not None and span.duration_s < math.inf:
        check_size(span.rate, span.duration_s)
    try:
        if path.is_dir():
            plan = _servegen(path, span, size, rng)
        else:
            plan = _within(_recorded(path, size) if is_recorded(path) else _azure(path, size or DEFAULT_SIZE), span)
    except BadFile as error:
        raise WorkloadError(f"{path.name} {error}") from None
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        raise WorkloadError(f"cannot read {path.name}: {getattr(error, 'strerror', None) or error}") from None
    if not plan.requests:
        until = "" if span.duration_s == math.inf else f" and +{span.duration_s:g} s"
        raise WorkloadError(f"{path.name} has no request {'between' if until else 'after'} {span.start_s:g} s{until}")
    return plan


def is_recorded(path: Path) -> bool:
    """Whether a trace is a recording (``triptych workload record``), by its name."""
    return path.name.removesuffix(".gz").endswith(".jsonl")


# --- ServeGen: statistics per client, sampled into requests ---------------------------------------------------


@dataclass(frozen=True, slots=True)
class Window:
    """A client's arrivals from ``start_s`` until ``end_s``.

    The gaps between them have the mean of the recorded rate and the shape of the fitted distribution. The scale of the
    fit is not used: in the published workload it contradicts the rate by up to 30,000 times.
    """

    start_s: float
    end_s: float
    rate: float
    family: str
    shape: float

    def arrivals(self, from_s: float, to_s: float, stretch: float, rng: random.Random) -> Iterator[float]:
        """Arrival times with all gaps ``stretch`` times as long: ``(to_s - from_s) * rate / stretch`` on average."""
        mean_s = stretch / self.rate
        if self.family == "Gamma":
            return gamma_arrivals(self.shape, mean_s, from_s, to_s, rng)
        scale_s = mean_s / math.gamma(1 + 1 / self.shape)
        left_s = rng.random() * scale_s * rng.gammavariate(1 + 1 / self.shape, 1.0) ** (1 / self.shape)
        return until(to_s, from_s + left_s, partial(rng.weibullvariate, scale_s, self.shape))


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a client's requests during one part of the day."""

    text_tokens: Distribution
    image_tokens: Distribution
    image_count: Distribution
    output_tokens: Distribution

    def request(self, arrival_s: float, size: Size | None, rng: random.Random) -> Planned:
        text_tokens, output_tokens = self.text_tokens.draw(rng), max(1, self.output_tokens.draw(rng))
        count = min(self.image_count.draw(rng), MAX_IMAGES)
        images = tuple(size or _square(self.image_tokens.draw(rng)) for _ in range(count))
        return Planned(arrival_s, text_tokens, images, output_tokens)


@dataclass(frozen=True, slots=True)
class Profile:
    """Client of a trace. ``sizes`` is sorted by the start of the part of the day."""

    windows: tuple[Window, ...]
    sizes: tuple[tuple[float, Sizes], ...]

    def sizes_at(self, at_s: float) -> Sizes:
        return next((sizes for start_s, sizes in reversed(self.sizes) if start_s <= at_s), self.sizes[0][1])


def _servegen(directory: Path, span: Span, size: Size | None, rng: random.Random) -> Plan:
    names = sorted((int(match[1]), path) for path in directory.iterdir() if (match := _TRACE_FILE.fullmatch(path.name)))
    if not names:
        raise WorkloadError(f"{directory.name} has no chunk-N-trace.csv: it is not a ServeGen workload")
    profiles = [_profile(path, path.with_name(f"chunk-{number}-dataset.json"), span) for number, path in names]
    return Plan(_sample(profiles, span, size, rng), span.duration_s)


def _sample(profiles: list[Profile], span: Span, size: Size | None, rng: random.Random) -> list[Planned]:
    """Sample the requests of all clients within the span; a rate scales all gaps alike, which preserves bursts.

    Each window of a client has draws of its own: with one seed its requests and gaps are the same at every rate.
    """
    end_s = span.start_s + span.duration_s
    active = [
        (profile, window, max(window.start_s, span.start_s), min(window.end_s, end_s))
        for profile in profiles
        for window in profile.windows
        if window.rate > 0 and window.start_s < end_s and window.end_s > span.start_s
    ]
    recorded = sum(window.rate * (to_s - from_s) for _, window, from_s, to_s in active) / span.duration_s
    stretch = 1.0 if span.rate is None or not recorded else recorded / span.rate
    check_size(recorded / stretch, span.duration_s)
    planned: list[Planned] = []
    for (profile, window, from_s, to_s), gaps in zip(active, sources(rng), strict=False):
        draws = sources(gaps)
        times = window.arrivals(from_s, to_s, stretch, gaps)
        planned += [
            profile.sizes_at(at_s).request(at_s - span.start_s, size, draw)
            for at_s, draw in zip(times, draws, strict=False)
        ]
    return sorted(planned, key=lambda request: request.arrival_s)


def _profile(trace: Path, dataset: Path, span: Span) -> Profile:
    try:
        rows = [row for row in csv.reader(read_text(trace, _MAX_NBYTES).splitlines()) if row]
        starts_s = [float(row[0]) for row in rows]
        step_s = starts_s[1] - starts_s[0] if len(starts_s) > 1 else 600.0
        ends_s = [*starts_s[1:], starts_s[-1] + step_s]
        windows = tuple(_window(row, end_s) for row, end_s in zip(rows, ends_s, strict=True))
    except BadFile as error:
        raise WorkloadError(f"{trace.name} {error}") from None
    except (ValueError, IndexError, csv.Error) as error:
        raise WorkloadError(f"{trace.name} is not a ServeGen trace: {str(error)[:_MAX_REASON]}") from None
    try:
        document = read_json(dataset, _MAX_NBYTES)
        parts = sorted((float(start), part) for start, part in document.items())
        first = max((index for index, (start, _) in enumerate(parts) if start <= span.start_s), default=0)
        end_s = max(span.start_s + span.duration_s, parts[first][0] + 1)
        sizes = [(start, _sizes(part)) for start, part in parts[first:] if start < end_s]  # parsing is slow
    except BadFile as error:
        raise WorkloadError(f"{dataset.name} {error}") from None
    except (ValueError, KeyError, AttributeError, TypeError, IndexError, OverflowError) as error:
        raise WorkloadError(f"{dataset.name} is not a ServeGen data set: {repr(error)[:_MAX_REASON]}") from None
    return Profile(windows, tuple(sizes))


def _window(row: list[str], end_s: float) -> Window:
    start_s, rate, _, family, shape, _ = row
    window = Window(float(start_s), end_s, float(rate), family, float(shape or 0))
    usable = family in ("Gamma", "Weibull") and _LEAST_SHAPE <= window.shape < math.inf
    if window.rate > 0 and not (usable and window.rate < math.inf):
        raise ValueError(f"the window at {start_s} s has no usable distribution")
    return window


def _sizes(part: dict[str, Any]) -> Sizes:
    def read(name: str) -> Distribution:
        return Distribution.of([(int(value), float(weight)) for value, weight in _WEIGHT.findall(part[name])])

    return Sizes(read("text_tokens"), read("image_tokens"), read("image_count"), read("output_tokens"))


def _square(tokens: int) -> Size:
    """The square image with about ``tokens`` tokens."""
    side = max(1, round(math.sqrt(tokens))) * PIXELS_PER_TOKEN_SIDE
    return Size(min(side, MAX_SIDE_PIXELS), min(side, MAX_SIDE_PIXELS))


# --- Azure and recordings: one row per request ---------------------------------------------------------------------------------------


def _azure(path: Path, size: Size) -> Iterator[Planned]:
    """The rows of the file. ``ContextTokens`` counts the whole prompt, so the tokens of its images are subtracted from its text."""
    image_tokens = max(1, size.width * size.height // PIXELS_PER_TOKEN_SIDE**2)
    with _opened(path) as file:
        for at_s, images, context, generated in _azure_rows(path.name, file):
            count = min(images, MAX_IMAGES)
            yield Planned(at_s, max(1, context - count * image_tokens), (size,) * count, max(1, generated))


def _recorded(path: Path, size: Size | None) -> Iterator[Planned]:
    """The lines of the file by arrival, as they were written when requests ended."""
    with _opened(path) as file:
        requests = list(parsed(path.name, file))
    for planned in sorted(requests, key=lambda planned: planned.arrival_s):
        yield planned if size is None else replace(planned, images=(size,) * len(planned.images))


def _within(rows: Iterator[Planned], span: Span) -> Plan:
    """The requests within the span; with a rate, as many as it needs, scaled in time to the span's duration.

    Rows that end before the span does are taken to last for another mean gap.
    """
    is_endless = span.duration_s == math.inf
    wanted = None if span.rate is None or is_endless else max(1, round(span.rate * span.duration_s))
    end_s: float | None = None
    kept: list[Planned] = []
    for row in rows:
        at_s = row.arrival_s - span.start_s
        if at_s >= span.duration_s if wanted is None else len(kept) == wanted:
            end_s = at_s
            break
        if at_s >= 0:
            kept.append(replace(row, arrival_s=at_s))
    if not kept:
        return Plan(kept, span.duration_s)
    if span.rate is None and not is_endless:
        check_size(len(kept) / span.duration_s, span.duration_s)
        return Plan(kept, span.duration_s)
    if end_s is None:  # the trace is too short: so is the run
        end_s = kept[-1].arrival_s * (len(kept) + 1) / len(kept)
    end_s = max(_LEAST_S, end_s)
    lasts_s = end_s if span.rate is None else len(kept) / span.rate
    check_size(len(kept) / lasts_s, lasts_s)
    return Plan([replace(row, arrival_s=row.arrival_s * lasts_s / end_s) for row in kept], lasts_s)


def _opened(path: Path) -> io.TextIOBase:
    check_regular(path)
    if path.suffix == ".gz":
        return io.TextIOWrapper(gzip.open(path), encoding="utf-8", newline="")
    return path.open(encoding="utf-8", newline="")


def _azure_rows(name: str, file: io.TextIOBase) -> Iterator[tuple[float, int, int, int]]:
    """Yields seconds since the first request, images, tokens in, tokens out."""
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
