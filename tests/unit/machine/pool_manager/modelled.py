"""A modelled cluster in virtual time: routers report, instances start late, queues grow, and the real machine decides."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from triptych.domain.decision import (
    Acting,
    Bounds,
    DecisionRecord,
    InstancePhase,
    PoolFacts,
    PoolInstance,
    PoolState,
    ScalingStatus,
)
from triptych.domain.stage import Role
from triptych.domain.windows import ClassWindow, Judged, NamedClass, WindowReport
from triptych.machine.pool_manager.demand import Facts
from triptych.machine.pool_manager.pool import PoolLimits, PoolMachine, PoolSettings
from triptych.machine.pool_manager.pool_events import (
    DrainInstance,
    InstancesSeen,
    PoolEvent,
    PoolTick,
    RecordDecision,
    RemoveInstance,
    ScaleTo,
)
from triptych.machine.pool_manager.reports import RouterReports
from triptych.policy.scaling import ScalingLimits

CAPACITY_PER_S = 1000.0
"""Tokens per second of each instance."""
WAIT_OBJECTIVE_S = 1.0


def fixed_facts(classes: Mapping[str, ClassWindow]) -> PoolFacts:
    del classes
    return PoolFacts(CAPACITY_PER_S, WAIT_OBJECTIVE_S)


@dataclass
class Instance:
    instance_id: str
    ready_s: float
    draining: bool = False


@dataclass
class ModelledPool:
    """Instances that work off a queue of tokens. Whoever arrives at a queue that is too long misses its objective."""

    name: str
    role: Role
    start_s: float
    instances: list[Instance] = field(default_factory=list)
    waiting: float = 0.0
    started: int = 0
    scaler_works: bool = True
    size: int = 0

    def ready(self, now_s: float) -> int:
        return sum(instance.ready_s <= now_s and not instance.draining for instance in self.instances)

    def scale_to(self, size: int, now_s: float) -> None:
        if not self.scaler_works:
            return
        self.size = size
        while len(self.instances) < size:
            self.started += 1
            self.instances.append(Instance(f"{self.name}{self.started}", now_s + self.start_s))
        # As every scaler: what is ordered is taken back, and what runs is not touched.
        starting = [instance for instance in self.instances if instance.ready_s > now_s]
        for instance in starting[: max(0, len(self.instances) - size)]:
            self.instances.remove(instance)

    def remove(self, instance_id: str, now_s: float) -> None:
        assert all(instance.draining for instance in self.instances if instance.instance_id == instance_id), (
            "it still works"
        )
        self.instances = [instance for instance in self.instances if instance.instance_id != instance_id]
        self.scale_to(self.size, now_s)

    def seen(self, now_s: float) -> tuple[PoolInstance, ...]:
        return tuple(
            PoolInstance(
                instance.instance_id,
                InstancePhase.DRAINED
                if instance.draining
                else InstancePhase.READY
                if instance.ready_s <= now_s
                else InstancePhase.STARTING,
                age_s=now_s - instance.ready_s + (0 if instance.ready_s <= now_s else self.start_s),
            )
            for instance in self.instances
        )

    def work(self, tokens: float, now_s: float) -> bool:
        """One second with this much new work. Whether what arrived meets its objective."""
        bears = self.ready(now_s) * CAPACITY_PER_S
        self.waiting = max(0.0, self.waiting + tokens - bears)
        return self.waiting <= WAIT_OBJECTIVE_S * bears


@dataclass
class Modelled:
    """``image_tokens`` and ``prompt_tokens`` give the load of each second."""

    image_tokens: Callable[[float], float]
    prompt_tokens: Callable[[float], float]
    scaling: ScalingLimits = ScalingLimits()  # noqa: RUF009 - immutable
    start_s: float = 5.0
    most: int = 16
    initial: int = 1
    advisory: bool = False
    reporting: bool = True
    facts: Facts = fixed_facts
    now_s: float = 0.0
    judged: list[tuple[float, bool]] = field(default_factory=list)
    records: list[DecisionRecord] = field(default_factory=list)
    sizes: list[tuple[float, int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.encoders = ModelledPool("e", Role.E, self.start_s)
        self.texts = ModelledPool("t", Role.PD, self.start_s)
        self.pools = {pool.name: pool for pool in (self.encoders, self.texts)}
        self.reports = RouterReports(attainment_s=self.scaling.attainment_window_s)
        self.machines = {
            pool.name: PoolMachine(
                PoolSettings(pool.name, pool.role, Bounds(1, self.most), self.initial, self.start_s, self.facts),
                self.reports,
                scaling=self.scaling,
                limits=PoolLimits(),
                now_s=0.0,
                acting=Acting.NONE if self.advisory else Acting.ALL,
            )
            for pool in self.pools.values()
        }
        self.sequence = 0
        for pool in self.pools.values():
            pool.scale_to(self.initial, -self.start_s)

    def feed(self, pool: str, event: PoolEvent) -> None:
        there = self.pools[pool]
        for effect in self.machines[pool].handle(event, self.now_s):
            match effect:
                case ScaleTo(size):
                    there.scale_to(size, self.now_s)
                case DrainInstance(name):
                    for instance in there.instances:
                        instance.draining |= instance.instance_id == name
                case RemoveInstance(name):
                    there.remove(name, self.now_s)
                case RecordDecision(record):
                    self.records.append(record)
        self.machines[pool].validate()

    def second(self) -> None:
        self.now_s += 1.0
        images, prompts = self.image_tokens(self.now_s), self.prompt_tokens(self.now_s)
        encoded = self.encoders.work(images, self.now_s)
        answered = self.texts.work(prompts, self.now_s)
        self.judged.append((self.now_s, encoded and answered))
        if self.reporting:
            self.sequence += 1
            window = ClassWindow(
                arrivals=10 if images or prompts else 0,
                items=10 if images else 0,
                done=10 if images or prompts else 0,
                media_tokens=round(images),
                prompt_tokens=round(prompts),
                ttft=Judged(10, 0) if encoded and answered else Judged(0, 10),
                missed_encode=0 if encoded else 10,
                missed_prefill=0 if answered else 10,
            )
            report = WindowReport(
                1,
                self.sequence,
                1.0,
                0.0,
                "m",
                (NamedClass("image-1024", window),),
                waiting_media_tokens=round(self.encoders.waiting),
                waiting_prompt_tokens=round(self.texts.waiting),
            )
            self.reports.accept("r", report, self.now_s)
            self.reports.validate()
        for name, pool in self.pools.items():
            self.feed(name, InstancesSeen(pool.seen(self.now_s)))
            self.feed(name, PoolTick())
        self.sizes.append((self.now_s, self.machines["e"].wanted, self.machines["t"].wanted))

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            self.second()

    def status(self, pool: str) -> ScalingStatus:
        return self.machines[pool].status(self.now_s)

    def state(self, pool: str) -> PoolState:
        return self.status(pool).state

    def changes(self, pool: str) -> list[tuple[float, int]]:
        """Times and new sizes of every change of the wanted size."""
        column = 1 if pool == "e" else 2
        found: list[tuple[float, int]] = []
        before = self.initial
        for row in self.sizes:
            if (size := int(row[column])) != before:
                found.append((row[0], size))
                before = size
        return found

    def attainment(self, begin_s: float, end_s: float) -> float:
        verdicts = [met for at_s, met in self.judged if begin_s < at_s <= end_s]
        return sum(verdicts) / len(verdicts)
