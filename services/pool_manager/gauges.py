"""The pool manager's gauges, read at every scrape."""

from collections.abc import Iterable, Mapping
from typing import Protocol

from prometheus_client.core import Metric

from triptych.domain.decision import PoolState
from triptych.runtime.metrics import Metrics, gauge, total

from .control import Control
from .replanning import Replanning

_POOL = ("model_name", "role")


class State(Protocol):
    """The pool manager's current numbers."""

    @property
    def version(self) -> int: ...

    @property
    def watchers(self) -> int: ...

    @property
    def control(self) -> Control: ...

    @property
    def silences(self) -> Mapping[tuple[str, ...], int]: ...

    def members_by_state(self) -> dict[tuple[str, ...], int]: ...

    def instances_by_stage(self) -> dict[tuple[str, ...], int]: ...

    def switches_pending_s(self) -> dict[tuple[str, ...], float]: ...

    def switches_unserved_s(self) -> dict[tuple[str, ...], float]: ...


def watch(metrics: Metrics, state: State) -> None:
    """Read ``state`` at every scrape."""

    def read() -> Iterable[Metric]:
        control = state.control
        yield gauge("triptych_pool_members", "Members by role and state", state.members_by_state(), ("role", "state"))
        yield total(
            "triptych_pool_member_silences",
            "Members that were not heard of in time, by role and what came of it",
            state.silences,
            ("role", "outcome"),
        )
        yield gauge("triptych_pool_version", "Version of the list of members", state.version)
        yield gauge("triptych_pool_watchers", "Routers and gateways that watch", state.watchers)
        leads, store_fault = control.leading.leads, control.leading.store_fault
        yield gauge("triptych_pool_manager_leads", "1 if this manager decides on sizes", float(leads))
        yield gauge("triptych_pool_store_up", "0 while the store does not answer", float(not store_fault))
        yield gauge("triptych_pool_scaler_up", "0 while the scaler does not answer", float(not control.scaled.fault))
        yield from _stages(state)
        yield from _sizes(control)
        yield from _counts(control)
        if control.replanning is not None:
            yield from _plan(control.replanning)

    metrics.watch(read)


def _stages(state: State) -> Iterable[Metric]:
    of_stage = ("model_name", "stage")
    yield gauge(
        "triptych_pool_serving_instances",
        "Active instances that serve the stage, by their last reports",
        state.instances_by_stage(),
        of_stage,
    )
    yield gauge(
        "triptych_pool_stage_pressure",
        "What the stage is going to hold over what its instances may hold within their objectives; above 1 it is short",
        state.control.pressures(),
        of_stage,
    )
    yield gauge(
        "triptych_pool_switch_pending_seconds",
        "Age of the oldest order to switch that is not obeyed; 0 without one",
        state.switches_pending_s(),
        ("model_name",),
    )
    yield gauge(
        "triptych_pool_switch_unserved_seconds",
        "For how long at most a stage that an order has opened has had work and served nothing; 0 without one",
        state.switches_unserved_s(),
        ("model_name",),
    )


def _sizes(control: Control) -> Iterable[Metric]:
    sizes = {(name.model, name.kind): size for name, size in control.sizes().items()}
    wanted: dict[tuple[str, ...], float] = {
        name: size.decisions[-1].target if control.acting.advisory and size.decisions else size.wanted
        for name, size in sizes.items()
    }
    yield gauge("triptych_pool_wanted_instances", "Size that the pool should have", wanted, _POOL)
    yield gauge(
        "triptych_pool_attainment",
        "Share of requests without a missed TTFT that the pool is charged with, over the attainment window",
        {name: share for name, size in sizes.items() if (share := size.attainment.attainment) is not None},
        _POOL,
    )
    yield gauge(
        "triptych_pool_state",
        "1 for the pool's state",
        {(*name, state.value): float(size.state is state) for name, size in sizes.items() for state in PoolState},
        (*_POOL, "state"),
    )


def _counts(control: Control) -> Iterable[Metric]:
    pools = [((name.model, name.kind), pool) for name, pool in control.pools.items()]
    yield total(
        "triptych_pool_orders",
        "Orders that were sent to the scaler",
        {(*name, *labels): float(number) for name, pool in pools for labels, number in pool.orders.sent.items()},
        (*_POOL, "kind", "outcome"),
    )
    yield total(
        "triptych_pool_start_failures",
        "Instances that ended before they were ready",
        {name: float(pool.start_failures) for name, pool in pools},
        _POOL,
    )
    yield total(
        "triptych_pool_reports_dropped",
        "Reports of routers that were not counted",
        {
            (model, cause.value): float(number)
            for model, reports in control.reports.items()
            for cause, number in reports.dropped.items()
        },
        ("model_name", "cause"),
    )


def _plan(replanning: Replanning) -> Iterable[Metric]:
    model = replanning.plan.model
    yield gauge(
        "triptych_pool_plan_drift",
        "Population stability index between the mix that the placement is for and the present one, by figure",
        {(model, drift.figure): drift.index for drift in replanning.drifts},
        ("model_name", "figure"),
    )
    yield gauge(
        "triptych_pool_plan_gain",
        "By how much the placement that was found last is better than the present one, as a share; 0 if none is by enough",
        {(model,): replanning.gain},
        ("model_name",),
    )
    yield total(
        "triptych_pool_plan_decisions",
        "Searches for a better placement, and moves, by what came of them",
        {(model, outcome.value): float(number) for outcome, number in replanning.outcomes.items()},
        ("model_name", "outcome"),
    )
