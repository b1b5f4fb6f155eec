"""What the reports of a model's routers and the profiles say of one pool: its load, its capacity and its attainment."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from triptych.domain.decision import PoolFacts, PoolLoad, PoolView
from triptych.domain.slo import ChargedStage
from triptych.domain.stage import Role, Stage
from triptych.domain.windows import ClassWindow, Judged
from triptych.machine.pool_manager.reports import BURST_S, LONG_S, SHORT_S, RouterReports
from triptych.policy.scaling import encode_tokens, prompt_tokens

Facts = Callable[[Mapping[str, ClassWindow]], PoolFacts]
"""What the profile says of a pool under the mix of a window. Pure."""


class Demand:
    """``seen`` and ``begin_period`` mutate; ``reports`` are those of all routers of the model.

    The role says which misses the pool is charged with (an instance that encodes and prefills, with both), and which tokens
    are its load: of embeddings for instances that encode only, of prompts for all others.
    """

    def __init__(self, role: Role, facts: Facts, reports: RouterReports) -> None:
        named = ((Stage.ENCODE, ChargedStage.ENCODE), (Stage.PREFILL, ChargedStage.PREFILL))
        self._stages = tuple(charged for stage, charged in named if role.serves(stage))
        self._facts_of = facts
        self._reports = reports
        self._known: PoolFacts | None = None
        """The last facts with a capacity."""
        self._peak_per_s = 0.0

    def seen(self, view: PoolView, now_s: float) -> PoolView:
        """The view with what is known of load, capacity and attainment; ``start_s`` stays where no profile says it."""
        reports = self._reports
        facts = self._facts(now_s)
        missing = facts.missing
        if uncharged := reports.uncharged(now_s):
            missing += (f"isolated latencies: {uncharged} missed TTFTs are charged to no stage",)
        judged = reports.instances(now_s)
        return replace(
            view,
            instances=tuple(replace(one, judged=judged.get(one.instance_id, Judged())) for one in view.instances),
            load=self._load(facts.wait_objective_s or 0.0, now_s),
            report_age_s=reports.age_s(now_s),
            capacity_per_s=facts.capacity_per_s,
            wait_objective_s=facts.wait_objective_s,
            attainment=reports.attainment(self._stages, now_s),
            missing=missing,
            start_s=view.start_s if facts.start_s is None else facts.start_s,
        )

    def begin_period(self) -> None:
        """The peak of the load is taken from now on."""
        self._peak_per_s = 0.0

    def _facts(self, now_s: float) -> PoolFacts:
        """Under the mix of the last 30 s, else of the last 300 s; a pool without requests has its last capacity."""
        classes = self._reports.classes(SHORT_S, now_s)
        facts = self._facts_of(classes)
        if facts.capacity_per_s is None:
            classes = self._reports.classes(LONG_S, now_s)
            facts = self._facts_of(classes)
        if facts.capacity_per_s is not None:
            self._known = facts
        elif self._known is not None and not any(one.arrivals for one in classes.values()):
            return self._known
        return facts

    def _load(self, patience_s: float, now_s: float) -> PoolLoad | None:
        stages, reports = self._stages, self._reports
        tokens = encode_tokens if stages == (ChargedStage.ENCODE,) else prompt_tokens
        short = reports.per_s(SHORT_S, now_s, tokens)
        if short is None:
            return None
        burst = reports.per_s(BURST_S, now_s, tokens) or 0.0
        absorbed = burst * BURST_S / (BURST_S + patience_s)  # what waits no longer than that is served meanwhile
        self._peak_per_s = max(self._peak_per_s, short, absorbed)
        return PoolLoad(
            burst_per_s=burst,
            short_per_s=short,
            long_per_s=reports.per_s(LONG_S, now_s, tokens) or 0.0,
            peak_per_s=self._peak_per_s,
            waiting=reports.waiting(stages, now_s),
            coverage=reports.coverage(now_s),
            announced=0.0 if ChargedStage.ENCODE in stages else reports.announced(now_s),
        )
