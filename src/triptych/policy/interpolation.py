"""Monotone interpolation of measured tables.

A table is a set of lines: for each value of y, seconds over x. The lines need not have the same points. A larger x or y
never gives a smaller value: where a measured value is below one to its left or on a line below, the larger one holds.
Outside the measured range the last slope continues; below the first point its value holds.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from statistics import median

from triptych.domain.profile import ErrorRow, Profile

_HELD_OUT_EVERY = 4
_FAR = 1e9
"""Lines that cross this far beyond their points are taken to be parallel."""


class Line:
    """Seconds over x, from points with distinct x. Raises ValueError without any."""

    def __init__(self, points: Iterable[tuple[float, float]]) -> None:
        ordered = sorted(points)
        if not ordered:
            raise ValueError("a line without points")
        self._xs = [x for x, _ in ordered]
        self._values: list[float] = []
        for _, value in ordered:
            self._values.append(max(value, self._values[-1]) if self._values else value)

    @property
    def xs(self) -> Sequence[float]:
        return self._xs

    def holds(self, x: float) -> bool:
        """Whether x is within the measured range."""
        return self._xs[0] <= x <= self._xs[-1]

    def at(self, x: float) -> float:
        xs, values = self._xs, self._values
        if x <= xs[0]:
            return values[0]
        if len(xs) == 1:
            return values[0] * x / xs[0] if xs[0] > 0 else values[0]
        right = min(bisect_right(xs, x), len(xs) - 1)
        share = (x - xs[right - 1]) / (xs[right] - xs[right - 1])
        return values[right - 1] + share * (values[right] - values[right - 1])

    def raised(self, other: "Line") -> "Line":
        """The larger of both at each x."""
        xs = sorted({*self._xs, *other.xs})
        places = set(xs)
        for left, right in pairwise((*xs, xs[-1] + 1)):
            before, after = self.at(left) - other.at(left), self.at(right) - other.at(right)
            share = before / (before - after) if before != after else 0.0
            if 0 < share < (1 if right <= xs[-1] else _FAR):
                places.add(left + share * (right - left))  # they cross there
        places.add(2 * max(places) + 1)  # so that the last slope goes on from there
        return Line((x, max(self.at(x), other.at(x))) for x in places)


class Surface:
    """Seconds over x and y, from rows (x, y, seconds) with distinct places. Raises ValueError without any."""

    def __init__(self, rows: Iterable[tuple[float, float, float]]) -> None:
        lines: dict[float, list[tuple[float, float]]] = {}
        for x, y, seconds in rows:
            lines.setdefault(y, []).append((x, seconds))
        if not lines:
            raise ValueError("a surface without rows")
        self._ys = sorted(lines)
        self._measured = [Line(lines[y]) for y in self._ys]
        self._lines = list(accumulate(self._measured, Line.raised))
        """Each raised by those of smaller y."""
        self._points = sorted({x for line in self._lines for x in line.xs})
        """Between two of them every line is straight."""
        self._steepest: list[float] = []
        """At each of these points, the steepest slope between the last two lines up to there."""
        if len(self._ys) > 1:
            last, before = self._lines[-1], self._lines[-2]
            rises = [(last.at(x) - before.at(x)) / (self._ys[-1] - self._ys[-2]) for x in self._points]
            self._steepest = list(accumulate(rises, max))

    @property
    def ys(self) -> Sequence[float]:
        return self._ys

    def holds(self, x: float, y: float) -> bool:
        """Whether (x, y) is within the measured range: of both lines around it."""
        if not self._ys[0] <= y <= self._ys[-1]:
            return False
        right = bisect_right(self._ys, y)
        around = (
            self._measured[right - 1 : right] if self._ys[right - 1] == y else self._measured[right - 1 : right + 1]
        )
        return all(line.holds(x) for line in around)

    def at(self, x: float, y: float) -> float:
        ys = self._ys
        if y <= ys[0]:
            return self._lines[0].at(x)
        if len(ys) == 1:
            value = self._lines[0].at(x)
            return value * y / ys[0] if ys[0] > 0 else value
        right = min(bisect_right(ys, y), len(ys) - 1)
        low, high = self._lines[right - 1].at(x), self._lines[right].at(x)
        slope = (high - low) / (ys[right] - ys[right - 1])
        if y <= ys[right]:
            return low + (y - ys[right - 1]) * slope
        # Lines may come closer with x. Beyond the last one the steepest slope up to x keeps the value monotone.
        if place := bisect_left(self._points, x):
            slope = max(slope, self._steepest[place - 1])
        return high + (y - ys[right]) * slope

    def run(self, x: float, y: float, count: int) -> list[float]:
        """The values at ``x``, ``x + 1`` and so on, as ``at`` has them up to rounding."""
        ys = self._ys
        values: list[float] = []
        while len(values) < count:
            first = x + len(values)
            # Between points of lines, and on no line beyond the last, the value is linear in x.
            place = bisect_right(self._points, first)
            until = self._points[place] if place < len(self._points) else first + count
            inside = min(count - len(values), int(until - first) + 1)
            if inside < 3 or (y > ys[-1] and len(ys) > 1):
                values.append(self.at(first, y))
                continue
            begin, end = self.at(first, y), self.at(first + inside - 1, y)
            slope = (end - begin) / (inside - 1)
            values += [begin + slope * number for number in range(inside)]
        return values

    def along(self, x: float) -> Line:
        """The values over y at this x."""
        ys = self._ys
        return Line((y, self.at(x, y)) for y in ([*ys, 2 * ys[-1]] if ys[-1] > 0 else ys))


def table_rows(profile: Profile) -> Mapping[str, list[tuple[float, float, float]]]:
    """The tables that have rows, as (x, y, seconds).

    For prepare, x is bytes per pixel: a cost that grows with both bytes and pixels is then interpolated exactly. And images of one size
    make a line, where images of several sizes hardly ever have the same bytes per pixel.
    """
    tables: dict[str, list[tuple[float, float, float]]] = {
        "encode": [(row.item_tokens, row.items, row.seconds) for row in profile.encode],
        "prepare": [(row.nbytes / max(1, row.pixels), row.pixels, row.seconds) for row in profile.prepare],
        "prefill": [(row.new_tokens, row.cached_tokens, row.seconds) for row in profile.prefill],
        "decode": [(row.mean_context, row.batch, row.seconds) for row in profile.decode],
    }
    return {name: rows for name, rows in tables.items() if rows}


def held_out_errors(profile: Profile) -> tuple[ErrorRow, ...]:
    """For each table, how far rows are from their interpolation by the others, relative to the measured value.

    Every fourth row that lies between others on its line is held out, or at least one. If lines are too short, it is a row
    that lies between others across them. A table without either has no entry.
    """
    errors = []
    for name, rows in table_rows(profile).items():
        inner = sorted(_between(rows, along=0) or _between(rows, along=1))
        held_out = set(inner[_HELD_OUT_EVERY // 2 :: _HELD_OUT_EVERY] or inner[:1])
        if not held_out:
            continue
        surface = Surface(row for row in rows if row not in held_out)
        relative = [abs(surface.at(x, y) - seconds) / seconds for x, y, seconds in held_out]
        errors.append(ErrorRow(name, len(relative), median(relative), max(relative)))
    return tuple(errors)


def _between(rows: Iterable[tuple[float, float, float]], *, along: int) -> set[tuple[float, float, float]]:
    """The rows that are not at an end of their line, which runs along x (0) or y (1)."""
    lines: dict[float, list[tuple[float, float, float]]] = {}
    for row in sorted(rows, key=lambda row: row[along]):
        lines.setdefault(row[1 - along], []).append(row)
    return {row for line in lines.values() for row in line[1:-1]}
