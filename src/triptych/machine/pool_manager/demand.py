"""Load, capacity and attainment of one pool, from the reports of its model's routers and the profiles."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from triptych.domain.decision import PoolFacts, PoolLoad, PoolView
from triptych.domain.slo import ChargedStage
from triptych.domain.stage import Role, Stage
from triptych.domain.windows import ClassWindow, Judged
from triptych.machine.pool_manager.reports import BURST_S, LONG_S, SHORT_S, RouterReports
from triptych.policy.scaling import answer_tokens, encode_tokens, prompt_tokens

Facts = Callable[[Mapping[str, ClassWindow]], PoolFacts]
"""Facts of a pool's profile under the mix of a window. Pure."""


class Demand:
    """Demand of one pool. ``observe`` and ``begin_period`` mutate; ``reports`` are those of all routers of the model.

    The role says which misses the pool is charged with, and which tokens are its load. Tokens are of embeddings for
    instances that encode only, of prompts for those that prefill, of answers for others. An instance that encodes and
    prefills is charged with misses of both. One that decodes but does not prefill is charged with those of the time
    between tokens.
    """

    def __init__(self, role: Role, facts: Facts, reports: RouterReports) -> None:
        self._role = role
        self._tokens = (
            encode_tokens if role is Role.E else prompt_tokens if role.serves(Stage.PREFILL) else answer_tokens
        )
        named = ((Stage.ENCODE, ChargedStage.ENCODE), (Stage.PREFILL, ChargedStage.PREFILL))
        self._stages = tuple(charged for stage, charged in named if role.serves(stage))
        self._facts_of = facts
        self._reports = reports
        self._known: PoolFacts | None = None
        """The last facts with a capacity."""
        self._peak_per_s = 0.0

    def observe(self, view: PoolView, now_s: float) -> PoolView:
        """The view with what is known of load, capacity and attainment; ``start_s`` stays where no profile says it."""
        reports = self._reports
        facts = self._facts(now_s)
        if uncharged := reports.uncharged(now_s):
            unknown = f"isolated latencies: {uncharged} missed TTFTs are charged to no stage"
            facts = replace(facts, missing=(*facts.missing, unknown))
        judged = reports.instances(now_s)
        return replace(
            view,
            instances=tuple(
                replace(instance, judged=judged.get(instance.instance_id, Judged())) for instance in view.instances
            ),
            load=self._load(facts.wait_objective_s or 0.0, now_s),
            report_age_s=reports.age_s(now_s),
            facts=facts,
            attainment=self._attainment(now_s),
            start_s=view.start_s if facts.start_s is None else facts.start_s,
        )

    def begin_period(self) -> None:
        """The peak of the load is taken from now on."""
        self._peak_per_s = 0.0

    def _facts(self, now_s: float) -> PoolFacts:
        """Facts under the mix of the last 30 s, else of the last 300 s. A pool without requests has its last capacity."""
        classes = self._reports.classes(SHORT_S, now_s)
        facts = self._facts_of(classes)
        if facts.capacity_per_s is None:
            classes = self._reports.classes(LONG_S, now_s)
            facts = self._facts_of(classes)
        if facts.capacity_per_s is not None:
            self._known = facts
        elif self._known is not None and not any(window.arrivals for window in classes.values()):
            return self._known
        return facts

    def _load(self, patience_s: float, now_s: float) -> PoolLoad | None:
        reports, tokens = self._reports, self._tokens
        short = reports.per_s(SHORT_S, now_s, tokens)
        if short is None:
            return None
        burst = reports.per_s(BURST_S, now_s, tokens) or 0.0
        absorbed = burst * BURST_S / (BURST_S + patience_s)  # what waits no longer than that is served meanwhile
        self._peak_per_s = max(self._peak_per_s, short, absorbed)
        waiting, announced = self._queued(now_s)
        return PoolLoad(
            burst_per_s=burst,
            short_per_s=short,
            long_per_s=reports.per_s(LONG_S, now_s, tokens) or 0.0,
            peak_per_s=self._peak_per_s,
            waiting=waiting,
            coverage=reports.coverage(now_s),
            announced=announced,
        )

    def _queued(self, now_s: float) -> tuple[float, float]:
        """Tokens that wait here, and those of requests that are still in an earlier stage."""
        reports, role = self._reports, self._role
        if role is Role.E:
            return reports.waiting_media(now_s), 0.0
        encodes, prefills = role.serves(Stage.ENCODE), role.serves(Stage.PREFILL)
        unencoded, encoded = reports.announced(now_s), reports.waiting_prompts(now_s)
        waiting = unencoded * encodes + encoded * prefills
        announced = unencoded * (not encodes) + encoded * (not prefills)
        if not prefills:
            classes = reports.classes(SHORT_S, now_s)
            per_prompt_token = answer_tokens(classes) / max(1.0, prompt_tokens(classes))
            waiting, announced = waiting * per_prompt_token, announced * per_prompt_token
        return waiting, announced

    def _attainment(self, now_s: float) -> Judged:
        """Attainment by TTFT or by the time between tokens. An instance that is charged with both has the worse."""
        by_gaps = self._role.serves(Stage.DECODE) and not self._role.serves(Stage.PREFILL)
        judged = [self._reports.attainment(self._stages, now_s)] if self._stages else []
        judged += [self._reports.between_tokens(now_s)] if by_gaps else []
        return min(judged, key=lambda judged_: 1.0 if judged_.attainment is None else judged_.attainment)
