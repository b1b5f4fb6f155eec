"""Outcome of a simulated run: the records of its requests, and what the instances did meanwhile."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Self

from triptych.domain.timeline import Timeline
from triptych.workload.report import Record
from triptych.workload.requests import Kind

Busy = Literal["prepare", "encode", "step", "copy", "beside", "pull"]
"""What an instance does for a time: what engines do (``engine.delay.Work``), what its service takes beside that, and transfers to it."""


@dataclass(frozen=True, slots=True)
class Span:
    """An activity of an instance, seconds since the start."""

    instance: str
    work: Busy
    start_s: float
    end_s: float
    size: int
    """Pixels or samples, items, tokens or bytes."""

    def since(self, start_s: float) -> Self:
        """With times that count from ``start_s``."""
        return replace(self, start_s=self.start_s - start_s, end_s=self.end_s - start_s)


@dataclass(frozen=True, slots=True)
class InstanceUse:
    """An instance from its start to its end, or the run's."""

    name: str
    role: str
    """The instance's first role."""
    device: str
    devices: int
    """Devices that it takes: its tensor-parallel degree."""
    start_s: float
    end_s: float
    busy_s: Mapping[Busy, float]
    """How long it was busy with each kind of work; of preparation, the mean of its cores."""

    def since(self, start_s: float) -> Self:
        """With times that count from ``start_s``."""
        return replace(self, start_s=self.start_s - start_s, end_s=self.end_s - start_s)

    @property
    def lasted_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def hardware(self) -> str:
        """The devices, in words."""
        return self.device if self.devices == 1 else f"{self.devices} x {self.device}"

    @property
    def busy_shares(self) -> Mapping[Busy, float]:
        """Share of its time with each kind of work."""
        return {work: spent_s / max(self.lasted_s, 1e-9) for work, spent_s in self.busy_s.items()}


@dataclass(frozen=True, slots=True)
class Sample:
    """The cluster at one time."""

    at_s: float
    sizes: Mapping[str, int]
    """Instances by the stages that they serve."""
    pending: Mapping[str, int]
    """Items or requests by stage: those that wait and those that run."""
    busy: Mapping[Busy, float]
    """Share of the instances that do this kind of work which were busy since the sample before."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A change by the pool manager or a fault of the scenario, and why."""

    at_s: float
    text: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run: a rate and a seed."""

    rate: float
    """Requests per second that were asked for, or that a trace has."""
    seed: int
    records: Sequence[Record]
    timelines: Sequence[Timeline | None]
    """Of each record, where the router knows it."""
    instances: Sequence[InstanceUse]
    samples: Sequence[Sample]
    decisions: Sequence[Decision]
    moved_bytes: Mapping[str, int]
    """By link."""
    ended_s: float
    """When the last request was over, or the run was interrupted."""
    took_s: float
    """CPU time of the simulation, seconds of this machine."""
    host_s: float = 0.0
    """CPU time that everything took of the host; 0 without one."""
    spans: Sequence[Span] = field(default=(), repr=False)
    """Activities of instances, if that was asked for."""
    interrupted: bool = False
    """Ended by Ctrl-C: ``records`` are those of the requests that had ended."""

    def device_hours(self) -> Counter[str]:
        """By device, hours times devices that instances had."""
        hours: Counter[str] = Counter()
        for use in self.instances:
            hours[use.device] += use.devices * use.lasted_s / 3600  # type: ignore[assignment]  # Counter allows floats
        return hours


STEPS = ("encode", "send", "pull", "queue", "prefill")
"""The steps of a request to its first token, in their order, as ``waterfall`` has them."""


def waterfall(outcome: Outcome) -> dict[Kind, dict[str, float]]:
    """Mean seconds of each step to the first token, by kind of request.

    ``encode`` goes from the prepared prompt to the last ticket, with preparation of the items, queues and retries; ``send`` is what the router and its
    calls add; ``queue`` is the wait for the engine at the text instance.
    """
    sums: dict[Kind, Counter[str]] = {}
    counts: Counter[Kind] = Counter()
    for record, timeline in zip(outcome.records, outcome.timelines, strict=True):
        if timeline is None or record.ttft_s is None or not record.ok:
            continue
        kind = record.planned.kind
        counts[kind] += 1
        known = {
            "encode": timeline.encode_s,
            "pull": timeline.pull_s,
            "queue": timeline.queue_s,
            "prefill": timeline.prefill_s,
        }
        known["send"] = max(0.0, record.ttft_s - sum(known.values()))
        sums.setdefault(kind, Counter()).update(known)
    return {kind: {step: steps[step] / counts[kind] for step in STEPS} for kind, steps in sums.items()}
