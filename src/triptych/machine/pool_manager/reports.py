"""The reports of all routers of one model, added up over time.

Reports may come late, twice, or never, and a restarted router counts from 1 again. Times are on this process's clock: a
report says how old it is.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from triptych.domain.slo import CLASSES, ChargedStage
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
    """When its first window began."""
    heard_s: float
    latest: WindowReport
    highest: int = 0
    seen: set[int] = field(default_factory=set)
    former: deque[int] = field(default_factory=lambda: deque(maxlen=_OLD_EPOCHS))


@dataclass(slots=True)
class _Bucket:
    classes: dict[str, ClassWindow] = field(default_factory=dict)
    instances: dict[str, Judged] = field(default_factory=dict)
    refusals: Refusals = Refusals(0, 0)  # noqa: RUF009 - immutable
    covered_s: float = 0.0


class RouterReports:
    """``accept`` is the only mutator, with ``forget`` for routers that are gone."""

    def __init__(self, *, attainment_s: float = 60.0) -> None:
        """Attainment is that of the last ``attainment_s``, at most ``LONG_S``."""
        self._attainment_s = attainment_s
        self._routers: dict[str, _Router] = {}
        self._buckets: dict[int, _Bucket] = {}
        self._sums: dict[tuple[int, int], dict[str, ClassWindow]] = {}
        """Sums of buckets that are over, by the first and the one after the last: windows are read much more often."""

    def accept(self, router: str, report: WindowReport, now_s: float) -> Dropped | None:
        """Count a report; or why not."""
        end_s = now_s - report.age_s
        if report.age_s > LONG_S:
            return Dropped.OLD
        known = self._routers.get(router)
        if known is None and len(self._routers) >= MAX_ROUTERS:
            return Dropped.TOO_MANY
        if known is None or report.epoch != known.epoch:
            if known is not None and report.epoch in known.former:
                return Dropped.OLD
            since_s = end_s - report.duration_s
            fresh = _Router(report.epoch, since_s, end_s, report)
            if known is not None:
                fresh.former.extend((*known.former, known.epoch))
            known = self._routers[router] = fresh
        if report.sequence in known.seen:
            return Dropped.DUPLICATE
        if report.sequence <= known.highest - _REMEMBERED:
            return Dropped.OLD
        known.seen.add(report.sequence)
        if report.sequence > known.highest:
            known.highest, known.heard_s, known.latest = report.sequence, end_s, report
            known.seen = {one for one in known.seen if one > known.highest - _REMEMBERED}
        known.since_s = min(known.since_s, end_s - report.duration_s)
        if _index(end_s - 1e-9) < _index(now_s):
            self._sums.clear()
        self._add(report, end_s)
        self._trim(now_s)
        return None

    def forget(self, router: str) -> None:
        """A router is gone. What it has counted stays."""
        self._routers.pop(router, None)

    def _add(self, report: WindowReport, end_s: float) -> None:
        bucket = self._buckets.setdefault(_index(end_s - 1e-9), _Bucket())
        for one in report.classes:
            if one.name not in CLASSES:
                continue
            window = one.window
            if window.cached_tokens > window.finished_media_tokens:  # else one router would hide the load of the others
                window = replace(window, cached_tokens=window.finished_media_tokens)
            add_to(bucket.classes, one.name, window)
        for named in report.instances:
            if named.instance_id in bucket.instances or len(bucket.instances) < _MAX_INSTANCES:
                add_to(bucket.instances, named.instance_id, named.judged)
        bucket.refusals += report.refusals
        begin_s = end_s - min(report.duration_s, LONG_S)
        for index in range(_index(begin_s), _index(end_s) + 1):  # a long window covers several buckets
            covered_s = min(end_s, _BUCKET_S * (index + 1)) - max(begin_s, _BUCKET_S * index)
            if covered_s > 0:
                self._buckets.setdefault(index, _Bucket()).covered_s += covered_s

    def _trim(self, now_s: float) -> None:
        oldest = _index(now_s - LONG_S)
        for index in [one for one in self._buckets if one < oldest]:
            del self._buckets[index]

    # --- readers -----------------------------------------------------------------------------------------------------

    def age_s(self, now_s: float) -> float | None:
        """Since the end of the newest window of any router; None without routers."""
        return min((now_s - one.heard_s for one in self._routers.values()), default=None)

    def classes(self, window_s: float, now_s: float) -> dict[str, ClassWindow]:
        first, current = _index(now_s - window_s), _index(now_s)
        if (first, current) not in self._sums:
            if len(self._sums) >= _MAX_SUMS:
                self._sums.clear()
            over = (bucket for index, bucket in self._buckets.items() if first <= index < current)
            self._sums[first, current] = _sum(bucket.classes for bucket in over)
        now = (bucket for index, bucket in self._buckets.items() if index >= current)
        return _sum((self._sums[first, current], *(bucket.classes for bucket in now)))

    def coverage(self, now_s: float) -> float:
        """The share of the routers' time over 30 s that reports cover."""
        due_s = sum(min(SHORT_S, now_s - one.since_s) for one in self._routers.values())
        first_s = _BUCKET_S * _index(now_s - SHORT_S)
        spare_s = max(0.0, now_s - SHORT_S - first_s) * len(self._routers)  # of the oldest bucket
        covered_s = sum(bucket.covered_s for bucket in self._recent(SHORT_S, now_s))
        return min(1.0, covered_s / (due_s + spare_s)) if due_s > 0 else 0.0

    def per_s(
        self, window_s: float, now_s: float, tokens: Callable[[Mapping[str, ClassWindow]], float]
    ) -> float | None:
        """Tokens per second of all routers, scaled up for reports that are missing; None without any report."""
        covered_s = sum(bucket.covered_s for bucket in self._recent(window_s, now_s))
        if covered_s <= 0:
            return None
        classes = self.classes(window_s, now_s)
        arrivals = sum(one.arrivals for one in classes.values())
        refused = sum(bucket.refusals.overloaded for bucket in self._recent(window_s, now_s))
        # Requests refused for overload would be load as well: they count like those that were accepted.
        offered = tokens(classes) * (1 + refused / arrivals) if arrivals else 0.0
        return offered / covered_s * max(1, len(self._routers))

    def waiting(self, stages: tuple[ChargedStage, ...], now_s: float) -> float:
        """Tokens that wait for the stages, by the routers' newest reports: of embeddings for ENCODE alone, else of prompts.

        With both stages, embeddings that wait count as the prompts they belong to, by the mix of the last 30 s.
        """
        if stages == (ChargedStage.ENCODE,):
            return float(sum(one.waiting_media_tokens for one in self._fresh(now_s)))
        prompts = float(sum(one.waiting_prompt_tokens for one in self._fresh(now_s)))
        return prompts + self.announced(now_s) if ChargedStage.ENCODE in stages else prompts

    def announced(self, now_s: float) -> float:
        """Tokens of prompts whose items are not encoded yet: by the mix of the last 30 s."""
        media = float(sum(one.waiting_media_tokens for one in self._fresh(now_s)))
        with_items = [one for one in self.classes(SHORT_S, now_s).values() if one.items]
        arrived = sum(one.media_tokens for one in with_items)
        return media * sum(one.prompt_tokens for one in with_items) / arrived if arrived else 0.0

    def _fresh(self, now_s: float) -> list[WindowReport]:
        """The routers' newest reports."""
        return [one.latest for one in self._routers.values() if now_s - one.heard_s <= 2 * _BUCKET_S]

    def attainment(self, stages: tuple[ChargedStage, ...], now_s: float) -> Judged:
        """Requests that the stages took part in; missed are those that one of them is charged with."""
        taking_part = [
            one
            for one in self.classes(self._attainment_s, now_s).values()
            if one.items or one.missed_encode or stages != (ChargedStage.ENCODE,)
        ]
        judged = sum(one.ttft.count for one in taking_part)
        missed = sum(min(one.ttft.missed, sum(map(one.missed_by, stages))) for one in taking_part)
        return Judged(max(0, judged - missed), missed)

    def uncharged(self, now_s: float) -> int:
        """Missed TTFTs that no stage is charged with."""
        return sum(one.missed_uncharged for one in self.classes(self._attainment_s, now_s).values())

    def instances(self, now_s: float) -> dict[str, Judged]:
        return _sum(bucket.instances for bucket in self._recent(self._attainment_s, now_s))

    def _recent(self, window_s: float, now_s: float) -> list[_Bucket]:
        first = _index(now_s - window_s)
        return [bucket for index, bucket in self._buckets.items() if index >= first]

    def validate(self) -> None:
        """Raise AssertionError if an invariant is violated."""
        if len(self._buckets) > 3 + LONG_S / _BUCKET_S:
            raise AssertionError("more buckets are kept than the longest window has")
        if any(len(one.seen) > _REMEMBERED for one in self._routers.values()):
            raise AssertionError("more sequence numbers are remembered than may come")


def _sum(buckets: Iterable[Mapping[str, CountsT]]) -> dict[str, CountsT]:
    return summed(entry for bucket in buckets for entry in bucket.items())


def _index(at_s: float) -> int:
    return int(at_s // _BUCKET_S)
