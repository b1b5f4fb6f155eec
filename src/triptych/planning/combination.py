"""Ways to divide stages among roles, and what all numbers of the same instances have in common.

The time for which a request keeps a pool busy is that of one instance over their number, and linear in the share of the stages that a
special role takes. So the rate that no queue bears follows from the numbers in a microsecond: a budget has millions of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from triptych.domain.stage import Role, Stage
from triptych.workload.report import Objectives

from .calibration import UNVERIFIED, Calibration, kinds_text
from .demand import Demand
from .pools import Instance


@dataclass(frozen=True, slots=True)
class Method:
    """A way to divide stages among pools: each has one, but for those that a special pool shares with a general one.

    The two may have the same role, on different devices: then they share all of its stages.
    """

    roles: tuple[Role, ...]
    """Of each pool."""
    shared: tuple[Role, Role] | None = None
    """The special and the general role. The special one takes so much of the stages of both that they are equally busy."""

    @property
    def shared_stages(self) -> frozenset[Stage]:
        return frozenset() if self.shared is None else self.shared[0].stages & self.shared[1].stages

    @property
    def shared_places(self) -> tuple[int, int] | None:
        """Where the special and the general role are among the roles."""
        if self.shared is None:
            return None
        special, general = self.shared
        return self.roles.index(special), len(self.roles) - 1 - self.roles[::-1].index(general)

    def mixed(self, place: int) -> "Method":
        """The same with two pools of the role at a place. It is a method without shared stages."""
        role = self.roles[place]
        return Method((*self.roles[: place + 1], *self.roles[place:]), (role, role))


METHODS = (
    Method((Role.EPD,)),
    Method((Role.E, Role.PD)),
    Method((Role.EP, Role.D)),
    Method((Role.P, Role.ED)),
    Method((Role.E, Role.P, Role.D)),
    Method((Role.E, Role.EPD), (Role.E, Role.EPD)),
    Method((Role.PD, Role.EPD), (Role.PD, Role.EPD)),
    Method((Role.E, Role.EP, Role.D), (Role.E, Role.EP)),
    Method((Role.P, Role.EP, Role.D), (Role.P, Role.EP)),
    Method((Role.E, Role.P, Role.ED), (Role.E, Role.ED)),
    Method((Role.P, Role.D, Role.ED), (Role.D, Role.ED)),
)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is wanted of the requests of a demand."""

    demand: Demand
    objectives: Objectives
    attainment: float
    control_s: float
    """Time of a message between two processes."""
    calibration: Calibration = UNVERIFIED
    """By which times of clusters on the same kinds of devices are multiplied."""


Line = tuple[float, float]
"""Seconds where the special role takes nothing of the shared stages, and how many more where it takes all."""
Counts = tuple[int, ...]
"""Instances of each pool, in the order of the method's roles."""


class Combination:
    """A method with the instances of each of its pools, whatever their number."""

    def __init__(self, method: Method, instances: Sequence[Instance], wanted: Wanted) -> None:
        """``instances`` are in the order of the method's roles."""
        self.method, self.instances, self.wanted = method, tuple(instances), wanted
        self._shared_stages = method.shared_stages
        self._shared_places = method.shared_places
        placed = list(enumerate(self.instances))
        self._links = [list(self._link_lines(place, instance)) for place, instance in placed]
        self._busy = [
            [*self._own_lines(place, instance), *lines]
            for (place, instance), lines in zip(placed, self._links, strict=True)
        ]
        prices = [instance.offer.usd_per_hour for instance in self.instances]
        self._prices = None if None in prices else [price or 0.0 for price in prices]
        self._degrees = [instance.offer.degree for instance in self.instances]
        self._split: tuple[tuple[int, float, float], ...] = ()
        """Of the special and the general role: its place, and the seconds of a request in the shared stages and in others."""
        if self._shared_places is not None:
            self._split = tuple(map(self._split_of, self._shared_places))

    @cached_property
    def factors(self) -> tuple[float, float]:
        """By which times to a first token are to be multiplied, and those between tokens."""
        kinds = kinds_text(instance.offer.device for instance in self.instances)
        calibration = self.wanted.calibration
        return calibration.factor(kinds, "ttft"), calibration.factor(kinds, "tpot")

    def usd_per_hour(self, counts: Counts) -> float | None:
        """None where a device has no price."""
        if self._prices is None:
            return None
        return sum(count * price for count, price in zip(counts, self._prices, strict=True))

    def devices(self, counts: Counts) -> int:
        return sum(count * degree for count, degree in zip(counts, self._degrees, strict=True))

    # --- how stages are divided ---------------------------------------------------------------------------------------

    def special_share(self, counts: Counts) -> float:
        """The share of the shared stages that the special role takes."""
        if not self._split:
            return 0.0
        (special, alike, own), (general, others_alike, others_own) = self._split
        busier = (others_alike + others_own) / counts[general] - own / counts[special]
        each = alike / counts[special] + others_alike / counts[general]
        return min(1.0, max(0.0, busier / each)) if each else 0.5

    def served(self, place: int, stage: Stage, special_share: float) -> float:
        """The share of all requests whose stage the pool at this place serves."""
        constant, slope = self._line(place, stage, 1.0)
        return constant + slope * special_share

    # --- what a request takes -----------------------------------------------------------------------------------------

    def peak_per_s(self, counts: Counts) -> float:
        """The rate that no queue bears, whatever the latencies: at which some devices, cores or links are always busy."""
        share, busiest_s = self.special_share(counts), 1e-12
        for count, lines in zip(counts, self._busy, strict=True):
            for constant, slope in lines:
                if (taken_s := (constant + slope * share) / count) > busiest_s:
                    busiest_s = taken_s
        return 1 / busiest_s

    def busy_s(self, counts: Counts) -> list[float]:
        """Seconds for which a request keeps each pool busy."""
        return _highest(self._busy, counts, self.special_share(counts))

    def link_s(self, counts: Counts) -> list[float]:
        """Time that the transfers of a request take of the links of one instance of each pool, in the busier direction."""
        return _highest(self._links, counts, self.special_share(counts))

    def _line(self, place: int, stage: Stage, value: float) -> Line:
        """``value`` for each request whose stage the pool at this place serves."""
        if not self.method.roles[place].serves(stage):
            return 0.0, 0.0
        if self._shared_places is None or place not in self._shared_places or stage not in self._shared_stages:
            return value, 0.0
        return (0.0, value) if place == self._shared_places[0] else (value, -value)

    def _own_lines(self, place: int, instance: Instance) -> Sequence[Line]:
        """Of the devices, and of the cores that prepare."""
        stages = [self._line(place, stage, seconds) for stage, seconds in instance.seconds.items()]
        cores = self._line(place, Stage.ENCODE, instance.prepare_mean_s / instance.offer.kind.prepare_cores)
        return (sum(constant for constant, _ in stages), sum(slope for _, slope in stages)), cores

    def _link_lines(self, place: int, instance: Instance) -> Sequence[Line]:
        needs, rate = self.wanted.demand.needs, instance.offer.kind.link.bytes_per_s
        role = self.method.roles[place]
        lines = [(0.0, 0.0)]
        if role.serves(Stage.ENCODE) != role.serves(Stage.PREFILL):
            embeddings = sum(need.share * need.embedding_nbytes for need in needs)
            lines.append(self._line(place, _first(role, Stage.ENCODE, Stage.PREFILL), embeddings / rate))
        if role.serves(Stage.PREFILL) != role.serves(Stage.DECODE):
            tokens = sum(need.share * need.prompt_tokens for need in needs)
            nbytes = tokens * instance.kv_token_nbytes
            lines.append(self._line(place, _first(role, Stage.PREFILL, Stage.DECODE), nbytes / rate))
        return lines

    def _split_of(self, place: int) -> tuple[int, float, float]:
        seconds = self.instances[place].seconds
        alike = sum(taken for stage, taken in seconds.items() if stage in self._shared_stages)
        return place, alike, sum(seconds.values()) - alike


def _first(role: Role, stage: Stage, other: Stage) -> Stage:
    """The one of both that the role serves."""
    return stage if role.serves(stage) else other


def _highest(lines: Sequence[Sequence[Line]], counts: Counts, share: float) -> list[float]:
    return [
        max(constant + slope * share for constant, slope in of_role) / count
        for of_role, count in zip(lines, counts, strict=True)
    ]
