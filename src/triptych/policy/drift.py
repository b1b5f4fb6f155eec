"""Drift of a mix of requests: the population stability index between the mix that a plan was made for and the present one.

The index of a figure is ``sum((q - p) * ln(q / p))`` over its buckets, with the shares ``p`` before and ``q`` now. Without drift, times
``n * m / (n + m)`` of the numbers of requests, it has a chi-square distribution with one degree of freedom less than buckets (Yurdakul 2018).
"""

from collections import Counter
from collections.abc import Callable, Mapping
from math import log, sqrt

from triptych.domain.mix import Form, Mix
from triptych.domain.replanning import Drift

USUAL_INDEX = 0.2
"""An index of 0.1 to 0.25 is usually taken for a moderate change, more for a large one."""
_UNSEEN = 0.5
"""Requests that each bucket has beside those that were seen, so that an empty one has a share."""
_SURE = 3.0
"""Quantile of the normal distribution for what chance explains."""


def drifts(before: Mix, now: Mix, least_index: float = USUAL_INDEX) -> tuple[Drift, ...]:
    """The drift of each figure: items of a request, pixels of an item, tokens of prompts and of answers. A figure that no request of either mix has is
    left out.
    """
    found, of_now = [], _figures(now)
    for figure, expected in _figures(before).items():
        observed = of_now[figure]
        if expected and observed:
            bound = max(least_index, by_chance(expected, observed))
            found.append(Drift(figure, stability_index(expected, observed), bound))
    return tuple(found)


def stability_index(expected: Mapping[int, int], observed: Mapping[int, int]) -> float:
    """The population stability index of two histograms with the same buckets, neither of them empty. 0 for equal shares."""
    buckets = sorted(expected.keys() | observed.keys())
    before, now = _shares(expected, buckets), _shares(observed, buckets)
    return sum((q - p) * log(q / p) for p, q in zip(before, now, strict=True))


def by_chance(expected: Mapping[int, int], observed: Mapping[int, int]) -> float:
    """The index that requests of one mix, drawn twice, hardly ever exceed (about one time in a thousand)."""
    freedom = max(1, len(expected.keys() | observed.keys()) - 1)
    spread = 2 / (9 * freedom)
    quantile = freedom * (1 - spread + _SURE * sqrt(spread)) ** 3  # of chi-square, by Wilson and Hilferty
    return quantile * (1 / sum(expected.values()) + 1 / sum(observed.values()))


def _shares(counts: Mapping[int, int], buckets: list[int]) -> list[float]:
    whole = sum(counts.values()) + _UNSEEN * len(buckets)
    return [(counts.get(bucket, 0) + _UNSEEN) / whole for bucket in buckets]


def _items(form: Form) -> int | None:
    return form.key[1]


def _pixels(form: Form) -> int | None:
    return form.key[2] if form.items else None


def _prompt_tokens(form: Form) -> int | None:
    return form.key[3]


_ANSWERS = "tokens per answer"
_FIGURES: Mapping[str, Callable[[Form], int | None]] = {
    "items per request": _items,
    "pixels per item": _pixels,
    "tokens per prompt": _prompt_tokens,
}


def _figures(mix: Mix) -> Mapping[str, Mapping[int, int]]:
    """Requests by bucket, of those that have the figure: those that came, but for answers those that ended."""
    found: dict[str, Counter[int]] = {figure: Counter() for figure in (*_FIGURES, _ANSWERS)}
    for form in mix.forms:
        for figure, bucket in _FIGURES.items():
            if form.requests and (at := bucket(form)) is not None:
                found[figure][at] += form.requests
        if form.answered:
            found[_ANSWERS][form.key[4]] += form.answered
    return found
