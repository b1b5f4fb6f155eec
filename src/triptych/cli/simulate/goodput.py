"""The goodput of a simulated cluster: for each seed the highest rate that it serves as wanted, and their interval."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from triptych.cli.outcome import CliError
from triptych.workload.interval import CONFIDENCE, Interval
from triptych.workload.report import Objectives
from triptych.workload.search import PRECISION, Bracket, RateSearch


@dataclass(frozen=True, slots=True)
class Goodput:
    """Goodput that the searches of all seeds found."""

    by_seed: Mapping[int, float]
    definition: str

    @property
    def interval(self) -> Interval:
        return Interval.of(list(self.by_seed.values()))

    @property
    def ends(self) -> tuple[float, float] | None:
        """Ends of the interval; no rate is below 0. None with one seed."""
        ends = self.interval.ends
        return None if ends is None else (max(0.0, ends[0]), ends[1])

    @property
    def method(self) -> str:
        return f"Student's t over {len(self.by_seed)} seeds"

    def __str__(self) -> str:
        if (ends := self.ends) is None:
            spread = "no interval, with one seed"
        else:
            spread = f"{ends[0]:.3g} to {ends[1]:.3g} with {CONFIDENCE:.0%} confidence ({self.method})"
        return f"goodput {self.interval.mean:.3g} requests/s, {spread}: {self.definition}"

    def document(self) -> dict[str, Any]:
        return {
            "mean_rps": self.interval.mean,
            "interval_rps": self.ends,
            "confidence": CONFIDENCE,
            "method": self.method,
            "definition": self.definition,
            "by_seed": dict(self.by_seed),
        }


class GoodputSearch:
    """Looks for the goodput with each seed. Once one of them has none, the others end as well."""

    def __init__(
        self, bracket: Bracket, seeds: Sequence[int], objectives: Objectives, attainment: float, warm_up_s: float
    ) -> None:
        """Raises CliError without objectives."""
        if not objectives.any:
            raise CliError("--goodput needs objectives: --slo-ttft-ms, --slo-tpot-ms or both", caller=True)
        self._bracket = bracket
        self._attainment = attainment
        self._searches = {seed: RateSearch(bracket) for seed in seeds}
        self._shares: dict[tuple[int, float], float] = {}
        counted = f" (those of the first {warm_up_s:g} s do not count)" if warm_up_s else ""
        self._definition = (
            f"the highest rate at which at least {attainment:.0%} of the requests{counted} get {objectives}, "
            f"by bisection to {PRECISION:.0%} for each seed, over the same requests at all rates"
        )

    @property
    def first_rate(self) -> float:
        return self._bracket.least

    @property
    def fault(self) -> str:
        """Why there is no goodput; empty while there may be one."""
        for seed, search in self._searches.items():
            if search.good is None and search.too_high is not None:
                return (
                    f"--goodput: even at {search.too_high:g} requests/s, the least rate, {self._share(seed, search.too_high)}: "
                    "begin with a lower one, or set other objectives"
                )
            if search.good == self._bracket.highest:
                return (
                    f"--goodput: no limit is found, as at {search.good:g} requests/s, the highest rate, "
                    f"{self._share(seed, search.good)}: end with a higher one"
                )
        return ""

    def _share(self, seed: int, rate: float) -> str:
        share = self._shares[seed, rate]
        return f"{share:.1%} of the requests of seed {seed} meet the objectives ({self._attainment:.0%} are wanted)"

    def ran(self, seed: int, rate: float, share: float) -> float | None:
        """Take the attainment of a run. Returns the rate to try next with this seed; None if there is none."""
        search = self._searches[seed]
        self._shares[seed, rate] = share
        search.tried(rate, is_good=share >= self._attainment)
        return None if self.fault else search.next_rate

    @property
    def finding(self) -> str:
        """What was found, or why nothing was; empty for a search that was interrupted."""
        found = self.found()
        return self.fault if found is None else str(found)

    def found(self) -> Goodput | None:
        """None unless every search has found its rate."""
        if self.fault or any(search.next_rate is not None for search in self._searches.values()):
            return None
        return Goodput({seed: search.good or 0.0 for seed, search in self._searches.items()}, self._definition)
