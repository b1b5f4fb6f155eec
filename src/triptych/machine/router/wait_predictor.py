"""Predicts how long a request would wait, from what waits at each stage of this router and how fast that is served.

A rate is measured while requests queue, as only then it is the stage's and not that of the arrivals. Work is counted in
tokens (of media at the encoders, of prompts at the text instances), so that it adds up over requests of any size.
Fed directly, like ``AttainmentRecorder``; what is said of a request that is unknown or over has no effect.
"""

from collections import Counter, deque
from dataclasses import dataclass

from triptych.domain.stage import Stage

_QUEUE = 4
"""Requests that wait together, from which on they are a queue."""
_LEAST_S = 1.0
_LEAST_SERVED = 4
"""A rate is measured over at least this time and this many requests ..."""
_MOST_SERVED = 64
"""... and over the last of these, so that it follows the mix of requests and the number of instances."""
_REMEMBERED_S = 60.0
"""For how long the rate of a queue that has ended counts."""
_WEIGHT = 0.1
"""Of the latest request in the mean time of an answer."""


class _Queue:
    """What waits at one stage."""

    def __init__(self) -> None:
        self.waiting = 0
        self.work: Counter[int] = Counter()
        """By priority."""
        self._since_s: float | None = None
        """Since when there has been a queue."""
        self._served: deque[tuple[float, int]] = deque(maxlen=_MOST_SERVED)
        """When requests of this queue were served, and their work."""
        self._known: tuple[float, float] | None = None
        """When the rate was measured last, and the work per second."""

    def enter(self, priority: int, work: int, now_s: float) -> None:
        self.waiting += 1
        self.work[priority] += work
        if self._since_s is None and self.waiting >= _QUEUE:
            self._since_s = now_s
            self._served.clear()

    def leave(self, priority: int, work: int, now_s: float, *, served: bool) -> None:
        self.waiting -= 1
        self.work[priority] -= work
        if not self.work[priority]:
            del self.work[priority]
        if self._since_s is None:
            return
        if served:
            self._served.append((now_s, work))
            self._measure(self._since_s, now_s)
        if self.waiting < _QUEUE // 2:
            self._since_s = None

    def _measure(self, since_s: float, now_s: float) -> None:
        times, work = len(self._served), sum(work for _, work in self._served)
        if times == _MOST_SERVED:
            since_s, first = self._served[0]
            work -= first
        if times >= _LEAST_SERVED and now_s - since_s >= _LEAST_S:
            self._known = now_s, work / (now_s - since_s)

    def wait_s(self, priority: int, now_s: float) -> float:
        """How long what goes before a request of this priority will take; 0 if the rate is not known."""
        if self._known is None or not self.work:
            return 0.0
        measured_s, per_s = self._known
        if self._since_s is None and now_s - measured_s > _REMEMBERED_S:
            self._known = None
            return 0.0
        ahead = sum(work for other, work in self.work.items() if other <= priority)
        return ahead / per_s if per_s > 0 else 0.0


@dataclass(slots=True)
class _Running:
    class_name: str
    priority: int
    work: dict[Stage, int]
    stage: Stage | None


class WaitPredictor:
    """Owner of what waits for its first token, by stage."""

    def __init__(self) -> None:
        self._queues = {Stage.ENCODE: _Queue(), Stage.PREFILL: _Queue()}
        self._running: dict[int, _Running] = {}
        self._answer_s: dict[str, float] = {}
        """By request class, the mean time from the first token to the last."""

    # --- steps of a request ------------------------------------------------------------------------------------------

    def prepared(
        self, number: int, class_name: str, *, priority: int, media_tokens: int, prompt_tokens: int, now_s: float
    ) -> None:
        """A request waits for encoders, or without media for a text instance."""
        work = {Stage.ENCODE: media_tokens, Stage.PREFILL: max(1, prompt_tokens)}
        one = self._running[number] = _Running(class_name, priority, work, None)
        self._enter(one, Stage.ENCODE if media_tokens else Stage.PREFILL, now_s)

    def dispatched(self, number: int, now_s: float) -> None:
        """All its items are encoded, and a text instance gets it."""
        one = self._running.get(number)
        if one is not None and one.stage is Stage.ENCODE:
            self._leave(one, now_s, served=True)
            self._enter(one, Stage.PREFILL, now_s)

    def answering(self, number: int, now_s: float) -> None:
        """Its first token has arrived."""
        if (one := self._running.get(number)) is not None:
            self._leave(one, now_s, served=True)

    def over(self, number: int, answer_s: float | None, now_s: float) -> None:
        """``answer_s`` is the time from its first token to its last; None if it was not answered."""
        one = self._running.pop(number, None)
        if one is None:
            return
        self._leave(one, now_s, served=answer_s is not None)
        if answer_s is not None:
            mean_s = self._answer_s.get(one.class_name, answer_s)
            self._answer_s[one.class_name] = mean_s + _WEIGHT * (answer_s - mean_s)

    def _enter(self, one: _Running, stage: Stage, now_s: float) -> None:
        one.stage = stage
        self._queues[stage].enter(one.priority, one.work[stage], now_s)

    def _leave(self, one: _Running, now_s: float, *, served: bool) -> None:
        if one.stage is not None:
            self._queues[one.stage].leave(one.priority, one.work[one.stage], now_s, served=served)
            one.stage = None

    # --- predictions -------------------------------------------------------------------------------------------------

    def wait_s(self, priority: int, now_s: float, *, media: bool) -> float:
        """How long a new request would wait at its stages, of which that of the encoders is for ``media`` only.

        0 while nothing is known.
        """
        text_s = self._queues[Stage.PREFILL].wait_s(priority, now_s)
        return text_s + self._queues[Stage.ENCODE].wait_s(priority, now_s) if media else text_s

    def answer_s(self, class_name: str) -> float:
        """How long an answer to a request of this class takes from its first token to its last; 0 if unknown."""
        return self._answer_s.get(class_name, 0.0)

    @property
    def least_answer_s(self) -> float:
        """The shortest of these times over all classes; 0 if none is known."""
        return min(self._answer_s.values(), default=0.0)

    def validate(self) -> None:
        """Raise AssertionError if an invariant is violated."""
        for stage, queue in self._queues.items():
            here = [one for one in self._running.values() if one.stage is stage]
            work: Counter[int] = Counter()
            for one in here:
                work[one.priority] += one.work[stage]
            assert queue.waiting == len(here), f"{stage.value}: requests do not add up"  # noqa: S101 - invariant
            assert queue.work == work, f"{stage.value}: work does not add up"  # noqa: S101 - invariant
