"""What is expected of a request, by which it is ordered in queues: its objective, and what it takes alone. As the router computes it."""

from collections.abc import Mapping, Sequence

from triptych.domain.slo import Expected, Metric, Slo
from triptych.domain.stage import ModelPart
from triptych.policy.attainment import arrival
from triptych.policy.costs import Costs
from triptych.policy.pool_facts import Profiles, isolated

from ..prepare import Shape  # noqa: TID252 - of the simulator

_GRID_TOKENS = 32
"""Prompts are counted up to multiples of this, so that few are priced anew."""


class Expectations:
    """Those of requests that are alike are kept."""

    def __init__(self, slo: Sequence[str], costs: Mapping[ModelPart, Costs], *, encoders: int) -> None:
        """``slo``: the router's objectives."""
        self._slo = Slo.parse(slo)
        self._profiles = Profiles(costs.get(ModelPart.ENCODER), costs.get(ModelPart.DECODER))
        self._encoders = encoders
        self._known: dict[tuple[int, int], Expected] = {}

    def of(self, shape: Shape, prompt_tokens: int) -> Expected:
        """``shape``: one of ``Prompts``, which keeps it."""
        tokens = -(-prompt_tokens // _GRID_TOKENS) * _GRID_TOKENS
        key = id(shape), tokens
        if (expected := self._known.get(key)) is None:
            class_name, counts = arrival(shape.items, tokens)
            alone = isolated(self._profiles, counts, encoders=self._encoders)
            objective = self._slo.objective(class_name, Metric.TTFT)
            limit_s = None if objective is None else objective.seconds(Metric.TTFT, alone)
            expected = self._known[key] = Expected(limit_s, alone)
        return expected
