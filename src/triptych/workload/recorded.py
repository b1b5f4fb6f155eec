"""Recorded requests as JSON lines: sizes, lengths and times of each, and nothing of what it said."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from .requests import (
    MAX_CLIP_S,
    MAX_CLIPS,
    MAX_IMAGES,
    MAX_SIDE_PIXELS,
    MAX_TOKENS,
    Clip,
    Planned,
    Size,
    WorkloadError,
)

_MAX_REASON_CHARS = 200
_MAX_TENANT_CHARS = 64
_LEAST_S, _MAX_FRAMES_PER_S = 0.001, 1000


def line_of(planned: Planned, outcome: str) -> str:
    """One line, with its end. ``outcome`` is what became of the request, for readers."""
    fields: dict[str, Any] = {
        "arrival_s": round(planned.arrival_s, 6),
        "text_tokens": planned.text_tokens,
        "output_tokens": planned.output_tokens,
        "images": [f"{size.width}x{size.height}" for size in planned.images],
        "videos": [
            {
                "size": f"{clip.size.width}x{clip.size.height}",
                "seconds": round(clip.seconds, 3),
                "frames_per_s": clip.frames_per_s,
            }
            for clip in planned.videos
        ],
        "sounds_s": [round(seconds, 3) for seconds in planned.sounds_s],
        "tenant": planned.tenant,
        "outcome": outcome,
    }
    return json.dumps({name: value for name, value in fields.items() if value not in ([], "")}) + "\n"


def size_of(width: int, height: int) -> Size:
    """The nearest size that can be replayed."""
    return Size(*(min(max(side, 1), MAX_SIDE_PIXELS) for side in (width, height)))


def clip_of(size: Size, seconds: float, frames: int) -> Clip:
    """The nearest video that can be replayed."""
    length_s = seconds_of(seconds)
    return Clip(size, length_s, min(max(1, round(frames / length_s)), _MAX_FRAMES_PER_S))


def seconds_of(seconds: float) -> float:
    """The nearest length that can be replayed."""
    return min(max(seconds, _LEAST_S), MAX_CLIP_S)


def parsed(name: str, lines: Iterable[str]) -> Iterator[Planned]:
    """The requests of a file in its order. Raises WorkloadError with the line that is none."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield _planned(json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            reason = f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
            raise WorkloadError(f"{name}, line {number}: {reason[:_MAX_REASON_CHARS]}") from None


def _planned(fields: dict[str, Any]) -> Planned:
    clips = [_Checked(clip) for clip in _several(fields, "videos", MAX_CLIPS)]
    entry = _Checked(fields)
    return Planned(
        arrival_s=entry.number("arrival_s", 0, 1e9),
        text_tokens=entry.whole("text_tokens", 0, MAX_TOKENS),
        images=tuple(Size.parse(size) for size in _several(fields, "images", MAX_IMAGES)),
        output_tokens=max(1, entry.whole("output_tokens", 0, MAX_TOKENS)),
        videos=tuple(
            Clip(
                Size.parse(clip.fields["size"]),
                clip.number("seconds", _LEAST_S, MAX_CLIP_S),
                clip.whole("frames_per_s", 1, _MAX_FRAMES_PER_S),
            )
            for clip in clips
        ),
        sounds_s=tuple(
            _Checked({"sounds_s": seconds}).number("sounds_s", _LEAST_S, MAX_CLIP_S)
            for seconds in _several(fields, "sounds_s", MAX_CLIPS)
        ),
        tenant=str(fields.get("tenant", ""))[:_MAX_TENANT_CHARS],
    )


def _several(fields: dict[str, Any], name: str, most: int) -> list[Any]:
    values = fields.get(name, [])
    if not isinstance(values, list) or len(values) > most:
        raise ValueError(f"{name} is not a list of at most {most}")
    return values


class _Checked:
    """Numbers of an entry. Raises KeyError, and ValueError for what is none or out of bounds."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.fields = fields

    def number(self, name: str, least: float, most: float) -> float:
        value = self.fields[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise ValueError(f"{name} is not a number from {least:g} to {most:g}")
        return float(value)

    def whole(self, name: str, least: int, most: int) -> int:
        value = self.fields[name]
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ValueError(f"{name} is not a whole number from {least} to {most}")
        return value
