"""The reports of all routers of one model, added up over time.

Reports may come late, twice, or never, and a restarted router counts from 1 again. Times are on this process's clock: a
report says how old it is.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from triptych.domain.media import Modality
from triptych.domain.mix import Form, Mix
from triptych.domain.slo import CLASSES, TEXT, ChargedStage
from triptych.domain.windows import ClassWindow, CountsT, Judged, Refusals, WindowReport, add_to, summed

SHORT_S, LONG_S = 30.0, 300.0
BURST_S = 5.0
MAX_ROUTERS = 256
_BUCKET_S = 5.0
_REMEMBERED = 256
"""Sequence numbers of a router, behind the highest, that may still come."""
_OLD_EPOCHS = 8
_MAX_INSTANCES = 4096
_MAX_SUMS = 8
_KINDS = frozenset({TEXT, *(modality.value for modality in Modality)})
_MAX_FORMS = 256
"""Of one bucket."""


class Dropped(StrEnum):
    """Why a report was not counted."""

    DUPLICATE = "duplicate"
    OLD = "old"
    """Too old to be of use, or from an earlier process of the router."""
    TOO_MANY = "too many routers"


@dataclass(slots=True)
class _Router:
    epoch: int
    since_s: float
    """Start of its first window, of this process and since it was gone last."""
    heard_s: float
    latest: WindowReport
    highest: int = 0
    seen: set[int] = field(default_factory=set)
    former: deque[int] = field(default_factory=lambda: deque(maxlen=_OLD_EPOCHS))
    covered: dict[int, float] = field(default_factory=dict)
    """Seconds of each bucket that its reports cover: no more than have passed, whatever it says."""
    gone: bool = False
    """Whether the router has left. It is remembered for as long as what it has counted, should it come back."""

    def due_s(self, first_s: float, now_s: float) -> float:
        """Time since ``first_s`` that its reports should cover."""
        return max(0.0, (self.heard_s if self.gone else now_s) - max(first_s, self.since_s))

    def covered_s(self, first_s: float, now_s: float) -> float:
        """Time since ``first_s``, of that which is due, that its reports do cover."""
        buckets = range(_index(max(first_s, self.since_s)), _index(now_s) + 1)
        return min(self.due_s(first_s, now_s), sum(self.covered.get(index, 0.0) for index in buckets))

    def cover(self, seconds: float, end_s: float, now_s: float) -> int:
        """Count a window's time, and return the bucket that its numbers belong to.

        Windows of one router do not overlap: one that seems to was read late (this process was stopped, for example), so
        the time before that is still uncovered is its own.
        """
        last, counted = _index(end_s - 1e-9), None
        for index in range(last, _index(now_s - LONG_S) - 1, -1):
            bucket_s = _BUCKET_S * index
            covered_s = self.covered.get(index, 0.0)
            part_s = min(seconds, end_s - bucket_s, _BUCKET_S - covered_s, now_s - bucket_s - covered_s)
            if part_s > 0:
                self.covered[index] = covered_s + part_s
                seconds -= part_s
                counted = index if counted is None else counted
            if seconds <= 1e-9:
                break
        return last if counted is None else counted


@dataclass(slots=True)
class _Bucket:
    classes: dict[str, ClassWindow] = field(default_factory=dict)
    instances: dict[str, Judged] = field(default_factory=dict)
    refusals: Refusals = Refusals(0, 0)  # noqa: RUF009 - immutable
    forms: list[Form] = field(default_factory=list)


class RouterReports:
    """``accept`` is the only mutator, with ``retain`` for routers that are gone."""

    def __init__(self, *, attainment_s: float = 60.0) -> None:
        """Attainment is that of the last ``attainment_s``, at most ``LONG_S``."""
        self._attainment_s = attainment_s
        self.dropped: Counter[Dropped] = Counter()
        """Reports that were not counted."""
        self._since_s = math.inf
        """Start of the first window of any router."""
        self._oldest = 0
        """Buckets before this one are forgotten."""
        self._routers: dict[str, _Router] = {}
        self._buckets: dict[int, _Bucket] = {}
        self._sums: dict[tuple[int, int], dict[str, ClassWindow]] = {}
        """Sums of buckets that are over, by the first and the one after the last: windows are read much more often."""

    def accept(self, router: str, report: WindowReport, now_s: float) -> Dropped | None:
        """Count a report; or why not."""
        dropped = self._accept(router, report, now_s)
        if dropped is not None:
            self.dropped[dropped] += 1
        return dropped

    def retain(self, routers: Container[str]) -> None:
        """Keep these routers only. Counts of the others stay."""
        for name, router in self._routers.items():
            router.gone = router.gone or name not in routers

    def _accept(self, router: str, report: WindowReport, now_s: float) -> Dropped | None:
        end_s = now_s - report.age_s
        self._trim(now_s)
        if report.age_s > LONG_S:
            return Dropped.OLD
        known = self._routers.get(router)
        if known is None and not self._has_room():
            return Dropped.TOO_MANY
        since_s = end_s - report.duration_s
        if known is None:
            known = self._routers[router] = _Router(report.epoch, since_s, end_s, report)
        elif report.epoch in known.former:
            return Dropped.OLD
        elif report.epoch != known.epoch:
            known.former.append(known.epoch)
            known.epoch, known.since_s, known.highest, known.seen = report.epoch, since_s, 0, set()
        if report.sequence in known.seen:
            return Dropped.DUPLICATE
        if report.sequence <= known.highest - _REMEMBERED:
            return Dropped.OLD
        known.since_s = since_s if known.gone else min(known.since_s, since_s)
        known.gone = False
        known.seen.add(report.sequence)
        if report.sequence > known.highest:
            known.highest, known.heard_s, known.latest = report.sequence, end_s, report
            known.seen = {number for number in known.seen if number > known.highest - _REMEMBERED}
        self._since_s = min(self._since_s, since_s)
        index = known.cover(min(report.duration_s, LONG_S), end_s, now_s)
        if index < _index(now_s):
            self._sums.clear()
        self._count(report, self._buckets.setdefault(index, _Bucket()))
        return None

    def _has_room(self) -> bool:
        """Whether there is room for one more router. One that has left makes room for it."""
        if len(self._routers) >= MAX_ROUTERS:
            oldest_gone = min(
                (name for name, router in self._routers.items() if router.gone), key=self._heard_s, default=None
            )
            if oldest_gone is None:
                return False
            del self._routers[oldest_gone]
        return True

    def _heard_s(self, router: str) -> float:
        return self._routers[router].heard_s

    @staticmethod
    def _count(report: WindowReport, bucket: _Bucket) -> None:
        for named_window in report.classes:
            if named_window.name not in CLASSES:
                continue
            window = named_window.window
            if window.cached_tokens > window.finished_media_tokens:  # else one router would hide the load of the others
                window = replace(window, cached_tokens=window.finished_media_tokens)
            add_to(bucket.classes, named_window.name, window)
        for named in report.instances:
            if named.instance_id in bucket.instances or len(bucket.instances) < _MAX_INSTANCES:
                add_to(bucket.instances, named.instance_id, named.judged)
        bucket.refusals += report.refusals
        forms = [form for form in report.forms if form.kind in _KINDS and form.count]
        bucket.forms = list(Mix.of((*bucket.forms, *forms), _MAX_FORMS).forms)

    def _trim(self, now_s: float) -> None:
        oldest = _index(now_s - LONG_S)
        if oldest == self._oldest:
            return
        self._oldest = oldest
        for index in [bucket for bucket in self._buckets if bucket < oldest]:
            del self._buckets[index]
        for router in self._routers.values():
            for index in [index for index in router.covered if index < oldest]:
                del router.covered[index]
        for name in [name for name, router in self._routers.items() if router.gone and _index(router.heard_s) < oldest]:
            del self._routers[name]

    # --- readers -----------------------------------------------------------------------------------------------------

    def age_s(self, now_s: float) -> float | None:
        """Time since the end of the newest window of any router, seconds; None without routers."""
        return min((now_s - router.heard_s for router in self._present()), default=None)

    def classes(self, window_s: float, now_s: float) -> dict[str, ClassWindow]:
        first, current = _index(now_s - window_s), _index(now_s)
        if (first, current) not in self._sums:
            if len(self._sums) >= _MAX_SUMS:
                self._sums.clear()
            recent = (bucket for index, bucket in self._buckets.items() if first <= index < current)
            self._sums[first, current] = _sum(bucket.classes for bucket in recent)
        now = (bucket for index, bucket in self._buckets.items() if index >= current)
        return _sum((self._sums[first, current], *(bucket.classes for bucket in now)))

    def mix(self, window_s: float, now_s: float) -> Mix:
        """Forms of the requests that came, and of those that were answered."""
        return Mix.of(form for bucket in self._recent(window_s, now_s) for form in bucket.forms)

    def coverage(self, now_s: float) -> float:
        """The share of the routers' time over 30 s that reports cover."""
        return self._coverage(_begin_s(SHORT_S, now_s), now_s)

    def _coverage(self, first_s: float, now_s: float) -> float:
        due_s = sum(router.due_s(first_s, now_s) for router in self._routers.values())
        covered_s = sum(router.covered_s(first_s, now_s) for router in self._routers.values())
        return covered_s / due_s if due_s > 0 else 0.0

    def per_s(
        self, window_s: float, now_s: float, tokens: Callable[[Mapping[str, ClassWindow]], float]
    ) -> float | None:
        """Tokens per second of all routers, scaled up for reports that are missing; None without any report."""
        first_s = _begin_s(window_s, now_s)
        coverage, seconds = self._coverage(first_s, now_s), now_s - max(first_s, self._since_s)
        if coverage <= 0 or seconds <= 0:
            return None
        classes = self.classes(window_s, now_s)
        arrivals = sum(window.arrivals for window in classes.values())
        refused = sum(bucket.refusals.overloaded for bucket in self._recent(window_s, now_s))
        # Requests refused for overload would be load as well: they count like those that were accepted.
        offered = tokens(classes) * (1 + refused / arrivals) if arrivals else 0.0
        return offered / seconds / coverage

    def waiting(self, now_s: float) -> int:
        """Requests without a first token, by the routers' newest reports."""
        return sum(report.waiting for report in self._fresh(now_s))

    def waiting_media(self, now_s: float) -> float:
        """Tokens of embeddings that are not encoded yet, by the routers' newest reports."""
        return float(sum(report.waiting_media_tokens for report in self._fresh(now_s)))

    def waiting_prompts(self, now_s: float) -> float:
        """Tokens of prompts that have all their items and no first token, likewise."""
        return float(sum(report.waiting_prompt_tokens for report in self._fresh(now_s)))

    def announced(self, now_s: float) -> float:
        """Tokens of prompts whose items are not encoded yet: by the mix of the last 30 s."""
        media = self.waiting_media(now_s)
        with_items = [window for window in self.classes(SHORT_S, now_s).values() if window.items]
        arrived = sum(window.media_tokens for window in with_items)
        return media * sum(window.prompt_tokens for window in with_items) / arrived if arrived else 0.0

    def _fresh(self, now_s: float) -> list[WindowReport]:
        """The routers' newest reports."""
        return [router.latest for router in self._present() if now_s - router.heard_s <= 2 * _BUCKET_S]

    def _present(self) -> Iterator[_Router]:
        return (router for router in self._routers.values() if not router.gone)

    def attainment(self, stages: tuple[ChargedStage, ...], now_s: float) -> Judged:
        """Requests that the stages took part in; missed are those that one of them is charged with."""
        taking_part = [
            window
            for window in self.classes(self._attainment_s, now_s).values()
            if window.items or window.missed_encode or stages != (ChargedStage.ENCODE,)
        ]
        judged = sum(window.ttft.count for window in taking_part)
        missed = sum(min(window.ttft.missed, sum(map(window.missed_by, stages))) for window in taking_part)
        return Judged(max(0, judged - missed), missed)

    def between_tokens(self, now_s: float) -> Judged:
        """Requests that were judged by the time between their tokens."""
        return sum((window.tbt for window in self.classes(self._attainment_s, now_s).values()), start=Judged())

    def uncharged(self, now_s: float) -> int:
        """Missed TTFTs that no stage is charged with."""
        return sum(window.missed_uncharged for window in self.classes(self._attainment_s, now_s).values())

    def instances(self, now_s: float) -> dict[str, Judged]:
        return _sum(bucket.instances for bucket in self._recent(self._attainment_s, now_s))

    def _recent(self, window_s: float, now_s: float) -> list[_Bucket]:
        first = _index(now_s - window_s)
        return [bucket for index, bucket in self._buckets.items() if index >= first]

    def validate(self) -> None:
        """Raise AssertionError if an invariant is violated."""
        if len(self._buckets) > 3 + LONG_S / _BUCKET_S:
            raise AssertionError("more buckets are kept than the longest window has")
        if len(self._routers) > MAX_ROUTERS or any(len(router.seen) > _REMEMBERED for router in self._routers.values()):
            raise AssertionError("more routers or sequence numbers are remembered than may come")


def _sum(buckets: Iterable[Mapping[str, CountsT]]) -> dict[str, CountsT]:
    return summed(entry for bucket in buckets for entry in bucket.items())


def _index(at_s: float) -> int:
    return int(at_s // _BUCKET_S)


def _begin_s(window_s: float, now_s: float) -> float:
    """Start of a window, in whole buckets."""
    return _BUCKET_S * _index(now_s - window_s)
