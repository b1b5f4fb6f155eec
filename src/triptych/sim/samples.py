"""Samples of a run: what instances serve, what waits, and how busy they are."""

from collections.abc import Iterable, Mapping
from typing import Protocol

from triptych.domain.instance import InstanceLoad
from triptych.domain.stage import ModelPart, Role, Stage

from .outcome import Busy, Sample
from .scenario import InstanceKind

_SAMPLES = 200
"""Samples of a run, taken at equal intervals of its duration, and on until its end."""
_SHORTEST_S = 0.1
"""Shortest interval between two."""
_LETTERS = {stage: stage.value[0].upper() for stage in Stage}
_WORK: Mapping[ModelPart, tuple[Busy, ...]] = {
    ModelPart.ENCODER: ("prepare", "encode"),
    ModelPart.DECODER: ("step", "copy", "beside", "pull"),
}


class Sampled(Protocol):
    """An instance, which may be down."""

    @property
    def is_up(self) -> bool: ...
    @property
    def name(self) -> str: ...
    @property
    def role(self) -> Role: ...
    @property
    def kind(self) -> InstanceKind: ...

    def load(self) -> InstanceLoad: ...

    def until(self, now_s: float) -> dict[Busy, float]:
        """Seconds by kind of work until now."""
        ...


class Sampler:
    """Owner of a run's samples."""

    def __init__(self, duration_s: float) -> None:
        """``duration_s``: during which requests come."""
        self.every_s = max(duration_s / _SAMPLES, _SHORTEST_S)
        """Between two."""
        self.samples: list[Sample] = []
        self._before: dict[str, dict[Busy, float]] = {}

    def sample(self, instances: Iterable[Sampled], now_s: float, since_s: float) -> None:
        """Take one, ``since_s`` after the beginning."""
        sizes: dict[str, int] = {}
        pending: dict[str, int] = {}
        busy: dict[Busy, list[float]] = {}
        for instance in instances:
            spent, before = instance.until(now_s), self._before.get(instance.name, {})
            self._before[instance.name] = spent
            if not instance.is_up:
                continue
            stages = instance.load().stages
            serving = "".join([letter for stage, letter in _LETTERS.items() if stage in stages])
            sizes[serving or instance.role.value] = sizes.get(serving or instance.role.value, 0) + 1
            for stage, load in stages.items():
                pending[stage.value] = pending.get(stage.value, 0) + load.pending
            for part in instance.kind.profiles:
                for work in _WORK[part]:
                    if work == "beside" and work not in spent:  # without a host nothing is charged for it
                        continue
                    workers = instance.kind.prepare_cores if work == "prepare" else 1
                    share = (spent.get(work, 0.0) - before.get(work, 0.0)) / self.every_s / workers
                    busy.setdefault(work, []).append(share)
        self.samples.append(
            Sample(since_s, sizes, pending, {work: sum(shares) / len(shares) for work, shares in busy.items()})
        )
