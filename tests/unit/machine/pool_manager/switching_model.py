"""A modelled cluster of encode, prefill and decode instances, whose roles ``SwitchMachine`` decides on: queues, and answers side by side."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

from triptych.domain.stage import Role, Stage
from triptych.machine.pool_manager.switching import SwitchMachine
from triptych.policy.switching import Movable, StageView, Switch, SwitchLimits

ITEM_S, PROMPT_S = 0.46, 0.045
STEP_S, SEQUENCE_S = 0.0095, 0.0038
"""A decode step takes so long, and so much longer with each answer in it."""
BORNE = 0.75
"""Share of the time that an instance can be busy within its objective."""
TBT_S, WAIT_S = 0.05, {Stage.ENCODE: 3.0, Stage.PREFILL: 0.8}
MOST_ANSWERS = int((TBT_S - STEP_S) / SEQUENCE_S)
_TICK_S, _MOVE_S, _WINDOW_S = 0.1, 0.5, 5.0


@dataclass(eq=False, slots=True)
class Asked:
    at_s: float
    items: int
    output_tokens: int
    left: float = 0.0
    """At its stage: seconds of an instance, or tokens."""
    end_s: float = 0.0


def alternating(seed: int, seconds: float, period_s: float, *kinds: tuple[float, int, int]) -> list[Asked]:
    """Poisson arrivals; a kind is requests per second, items, and tokens of answers, and holds for a period."""
    rng, now_s, asked = Random(seed), 0.0, list[Asked]()
    while now_s < seconds:
        per_s, items, tokens = kinds[int(now_s // period_s) % len(kinds)]
        now_s += rng.expovariate(per_s)
        asked.append(Asked(now_s, items, tokens))
    return asked


@dataclass(eq=False, slots=True)
class _Instance:
    name: str
    stage: Stage
    has: list[Asked] = field(default_factory=list)
    ready_s: float = 0.0


class Modelled:
    def __init__(self, sizes: dict[Stage, int], machine: SwitchMachine | None) -> None:
        self.instances = [
            _Instance(f"{stage.value}-{number}", stage) for stage, count in sizes.items() for number in range(count)
        ]
        self.switches: list[tuple[float, Switch]] = []
        self._machine = machine
        self._queues = {Stage.ENCODE: deque[Asked](), Stage.PREFILL: deque[Asked]()}
        self._arrived: list[Asked] = []

    def run(self, asked: Sequence[Asked]) -> float:
        """The mean latency, in seconds."""
        coming, tick = deque(asked), 0
        while coming or any(not request.end_s for request in self._arrived):
            now_s = _TICK_S * tick
            while coming and coming[0].at_s <= now_s:
                request = coming.popleft()
                request.left = ITEM_S * request.items
                self._queues[Stage.ENCODE].append(request)
                self._arrived.append(request)
            for instance in self.instances:
                if now_s >= instance.ready_s:
                    self._work(instance, now_s)
            tick += 1
            if self._machine is not None and tick % round(1 / _TICK_S) == 0:
                for switch in self._machine.handle(self._views(now_s), now_s):
                    self._switch(switch, now_s)
        return sum(request.end_s - request.at_s for request in asked) / len(asked)

    def of(self, stage: Stage) -> list[_Instance]:
        return [instance for instance in self.instances if instance.stage is stage]

    def _work(self, instance: _Instance, now_s: float) -> None:
        if instance.stage is Stage.DECODE:
            for job in list(instance.has):
                job.left -= _TICK_S / (STEP_S + SEQUENCE_S * len(instance.has))
                if job.left <= 0:
                    job.end_s = now_s
                    instance.has.remove(job)
            return
        queue, seconds = self._queues[instance.stage], _TICK_S
        while seconds > 0 and (instance.has or queue):
            instance.has = instance.has or [queue.popleft()]
            request = instance.has[0]
            spent = min(seconds, request.left)
            request.left, seconds = request.left - spent, seconds - spent
            if request.left <= 0:
                instance.has = []
                self._go_on(request, instance.stage)

    def _go_on(self, request: Asked, after: Stage) -> None:
        if after is Stage.ENCODE:
            request.left = PROMPT_S
            self._queues[Stage.PREFILL].append(request)
        else:
            request.left = request.output_tokens
            self._to_decode(request)

    def _to_decode(self, request: Asked) -> None:
        min(self.of(Stage.DECODE), key=lambda instance: len(instance.has)).has.append(request)

    def _views(self, now_s: float) -> list[StageView]:
        recent = [request for request in self._arrived if request.at_s > now_s - _WINDOW_S]
        cost_s = {
            Stage.ENCODE: sum(ITEM_S * request.items for request in recent),
            Stage.PREFILL: PROMPT_S * len(recent),
        }
        views = []
        for stage in Stage:
            there = self.of(stage)
            if stage is Stage.DECODE:
                held = [float(len(instance.has)) for instance in there]
                waiting, holds, arriving, served = 0.0, float(MOST_ANSWERS), 0.0, 0.0
            else:
                held = [sum(item.left for item in instance.has) for instance in there]
                waiting, holds = sum(request.left for request in self._queues[stage]), WAIT_S[stage]
                arriving, served = cost_s[stage] / _WINDOW_S, BORNE
            movable = tuple(
                Movable(instance.name, Role.EPD.stages, part) for instance, part in zip(there, held, strict=True)
            )
            views.append(StageView(stage, len(there), waiting + sum(held), holds, arriving, served, movable))
        return views

    def _switch(self, switch: Switch, now_s: float) -> None:
        self.switches.append((now_s, switch))
        for instance in [instance for instance in self.instances if instance.name in switch.instances]:
            has, instance.has = instance.has, []
            instance.stage, instance.ready_s = switch.target, now_s + _MOVE_S
            for job in has:
                if switch.source is Stage.DECODE:
                    self._to_decode(job)
                else:
                    self._queues[switch.source].appendleft(job)

    def check_bound(self, limits: SwitchLimits) -> None:
        """Raise AssertionError where a pair of stages did not rest, or a stage had no instance."""
        for pair in {switch.pair for _, switch in self.switches}:
            times = [at_s for at_s, switch in self.switches if switch.pair == pair]
            assert all(later - earlier >= limits.switch_rest_s - _TICK_S for earlier, later in pairwise(times))
        assert all(self.of(stage) for stage in Stage)
