"""Efficiencies of a device from a profile that was measured on it: those with which the roofline comes closest.

Closeness is the sum over rows of the logarithms of predicted over measured times, squared where they are small and
linear beyond, so that a disturbed row counts little. Efficiencies that the rows say nothing about stay. The search is that of Hooke and Jeeves, over logarithms.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from statistics import median
from typing import Any

from triptych.domain.architecture import DecoderArchitecture, EncoderArchitecture
from triptych.domain.device import Efficiency
from triptych.domain.profile import ErrorRow, Profile
from triptych.policy.roofline import Pass, Target, encode_pass, step_pass

_SHARES = ("compute", "attention", "bandwidth")
_TIMES = ("pass_s", "sequence_s", "layer_s", "encode_layer_s")
_MOST_SHARE = 4.0
"""Above 1, where the catalogue's peak is too low, as an assumed one may be."""
_LEAST_SHARE = 1e-4
_LEAST_S, _MOST_S = 1e-7, 10.0
_FIRST_STEP, _LAST_STEP = 0.5, 0.002
_LINEAR_FROM = 0.2
"""Error from which a row counts linearly."""
_LEAST_ROWS = 4
_PRIOR = 0.002
"""How much a doubling of an efficiency counts: what no row depends on stays as it is."""
_EVERY, _OFFSET = 4, 2


class CannotCalibrate(ValueError):
    """A profile from which efficiencies cannot be found. The message says why."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A measured row."""

    table: str
    each: Pass
    seconds: float


@dataclass(frozen=True, slots=True)
class Calibration:
    efficiency: Efficiency
    fitted: tuple[ErrorRow, ...]
    """Errors at the rows that were used, by table."""
    held_out: tuple[ErrorRow, ...]
    """Errors at each fourth row, predicted with efficiencies from the others."""


def encoder_samples(profile: Profile, encoder: EncoderArchitecture, target: Target) -> tuple[Sample, ...]:
    """The rows of items as large as one of ``encoder.items``."""
    by_tokens = {item.tokens: item for item in encoder.items}
    return tuple(
        Sample("encode", encode_pass(encoder, by_tokens[row.item_tokens], row.items, target.dtype), row.seconds)
        for row in sorted(profile.encode)
        if row.item_tokens in by_tokens
    )


def decoder_samples(profile: Profile, decoder: DecoderArchitecture, target: Target) -> tuple[Sample, ...]:
    dtype = target.dtype
    prefill = [
        Sample("prefill", step_pass(decoder, dtype, new=row.new_tokens, cached=row.cached_tokens), row.seconds)
        for row in sorted(profile.prefill)
    ]
    decode = [
        Sample("decode", step_pass(decoder, dtype, decodes=row.batch, context=row.mean_context), row.seconds)
        for row in sorted(profile.decode)
    ]
    return (*prefill, *decode)


def calibrate(samples: Sequence[Sample], target: Target, source: str) -> Calibration:
    """Efficiencies for ``target`` that fit the samples. Raises CannotCalibrate for fewer than 4."""
    if len(samples) < _LEAST_ROWS:
        raise CannotCalibrate(f"{len(samples)} of the measured rows are comparable, {_LEAST_ROWS} are needed")
    held_out = samples[_OFFSET::_EVERY]
    without = [sample for number, sample in enumerate(samples) if number % _EVERY != _OFFSET]
    efficiency = replace(_fit(samples, target), source=source)
    return Calibration(
        efficiency,
        _errors(samples, target.reaching(efficiency)),
        _errors(held_out, target.reaching(_fit(without, target))),
    )


def _fit(samples: Sequence[Sample], target: Target) -> Efficiency:
    start = target.device.efficiency
    names = [*_SHARES, *(name for name in _TIMES if getattr(start, name) > 0)]
    first = [log(getattr(start, name)) for name in names]

    def efficiency(point: Sequence[float]) -> Efficiency:
        found: dict[str, Any] = {name: exp(value) for name, value in zip(names, point, strict=True)}
        return replace(start, **found)

    def distance(point: Sequence[float]) -> float:
        reaching = target.reaching(efficiency(point))
        moved = sum((value - begin) ** 2 for value, begin in zip(point, first, strict=True))
        return _PRIOR * moved + sum(_counted(log(reaching.pass_s(sample.each) / sample.seconds)) for sample in samples)

    bounds = [
        (log(_LEAST_SHARE), log(_MOST_SHARE)) if name in _SHARES else (log(_LEAST_S), log(_MOST_S)) for name in names
    ]
    return efficiency(_search(distance, first, bounds))


def _counted(error: float) -> float:
    size = abs(error)
    return size**2 if size < _LINEAR_FROM else _LINEAR_FROM * (2 * size - _LINEAR_FROM)


def _search(
    distance: Callable[[Sequence[float]], float], start: Sequence[float], bounds: Sequence[tuple[float, float]]
) -> list[float]:
    """Hooke and Jeeves: steps along each axis, then on in the direction of what was gained; smaller steps when nothing is."""

    def explored(point: list[float], best: float, step: float) -> tuple[list[float], float]:
        point = list(point)
        for axis, (least, most) in enumerate(bounds):
            for way in (step, -step):
                tried = [*point[:axis], min(most, max(least, point[axis] + way)), *point[axis + 1 :]]
                if (there := distance(tried)) < best:
                    point, best = tried, there
                    break
        return point, best

    point, step = list(start), _FIRST_STEP
    best = distance(point)
    while step > _LAST_STEP:
        reached, there = explored(point, best, step)
        if there >= best:
            step /= 2
            continue
        while there < best:
            onward = [
                min(most, max(least, 2 * new - old))
                for new, old, (least, most) in zip(reached, point, bounds, strict=True)
            ]
            point, best = reached, there
            reached, there = explored(onward, distance(onward), step)
    return point


def _errors(samples: Iterable[Sample], target: Target) -> tuple[ErrorRow, ...]:
    relative: dict[str, list[float]] = {}
    for sample in samples:
        error = abs(target.pass_s(sample.each) - sample.seconds) / sample.seconds
        relative.setdefault(sample.table, []).append(error)
    return tuple(ErrorRow(table, len(errors), median(errors), max(errors)) for table, errors in relative.items())
