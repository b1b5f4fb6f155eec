"""The router's gauges, read at every scrape."""

from collections.abc import Iterable, Mapping
from typing import Protocol

from prometheus_client.core import Metric

from triptych.domain.instance import ModelInfo
from triptych.domain.membership import MembershipSnapshot
from triptych.machine.router.instances import Instances
from triptych.machine.router.lenders import LendingCounts
from triptych.runtime.managed_membership import membership_gauges
from triptych.runtime.metrics import Metrics, gauge, longest_wait, total

from .attainment import Attainment


class State(Protocol):
    """The router's current numbers."""

    @property
    def running(self) -> int: ...

    @property
    def media_bytes(self) -> int: ...

    @property
    def cluster(self) -> "ClusterState": ...

    @property
    def attainment(self) -> Attainment: ...


class ClusterState(Protocol):
    @property
    def waiting_for_credits(self) -> int: ...

    @property
    def waiting_for_kv(self) -> int: ...

    @property
    def outstanding_credits(self) -> int: ...

    @property
    def lending(self) -> LendingCounts: ...

    def longest_waits_s(self) -> dict[int, float]: ...

    def instances_by_state(self) -> dict[tuple[str, ...], int]: ...

    def in_backoff(self) -> dict[tuple[str, ...], int]: ...

    @property
    def retries_left(self) -> float: ...

    @property
    def instances(self) -> Instances: ...

    @property
    def prefix_leases(self) -> Mapping[str, int]: ...

    @property
    def membership(self) -> MembershipSnapshot: ...

    @property
    def membership_fault(self) -> str: ...

    @property
    def model(self) -> ModelInfo | None: ...


def watch(metrics: Metrics, state: State) -> None:
    """Read ``state`` at every scrape."""

    def read() -> Iterable[Metric]:
        cluster = state.cluster
        yield gauge("triptych_requests_running", "Running requests", state.running)
        yield gauge("triptych_router_media_bytes", "Bytes of items kept for running requests", state.media_bytes)
        yield gauge(
            "triptych_requests_waiting_for_credits",
            "Requests waiting for room in the encoders' arenas",
            cluster.waiting_for_credits,
        )
        yield gauge(
            "triptych_requests_waiting_for_kv_memory",
            "Requests whose prompts wait until there is KV memory where their answers go on",
            cluster.waiting_for_kv,
        )
        yield longest_wait(
            "triptych_router_longest_wait_seconds",
            "Longest wait of requests that wait for credits now",
            cluster.longest_waits_s(),
        )
        yield gauge("triptych_credits_outstanding", "Credits in use", cluster.outstanding_credits)
        yield gauge(
            "triptych_instances", "Instances by role and state", cluster.instances_by_state(), ("role", "state")
        )
        yield gauge(
            "triptych_instances_in_backoff",
            "Instances that get no work at a stage, or one item or request at a time, as they fail",
            cluster.in_backoff(),
            ("stage", "reason"),
        )
        yield gauge("triptych_retry_budget", "Items that may be encoded again now", cluster.retries_left)
        yield gauge(
            "triptych_embedding_hints",
            "Embeddings that encoders are believed to hold",
            len(cluster.instances.directory),
        )
        yield total(
            "triptych_embedding_hints_followed",
            "Items sent where their embedding was believed to be, by what came of it",
            {(outcome,): count for outcome, count in cluster.instances.directory.followed.items()},
            ("outcome",),
        )
        yield total(
            "triptych_kv_prefix_leases",
            "Segments of prompts' prefixes that were asked for at other instances",
            {(outcome,): count for outcome, count in cluster.prefix_leases.items()},
            ("outcome",),
        )
        yield from _lending(cluster.lending)
        yield from membership_gauges(cluster.membership.version, cluster.membership_fault)
        yield from state.attainment.metrics("" if cluster.model is None else cluster.model.model_id)

    metrics.watch(read)


def _lending(counts: LendingCounts) -> Iterable[Metric]:
    yield gauge(
        "triptych_lenders",
        "Encoders that can lend, by whether they take text requests now",
        {(state.value,): number for state, number in counts.lenders.items()},
        ("state",),
    )
    yield gauge("triptych_requests_lent", "Text requests at these encoders now, from this router", counts.requests)
    yield total(
        "triptych_lent_requests",
        "Text requests given to encoders that lend, by where they come from",
        {(how,): number for how, number in counts.lent.items()},
        ("how",),
    )
    yield total(
        "triptych_lent_requests_taken_back",
        "Text requests without a token that were given to another instance again",
        {(reason,): number for reason, number in counts.taken_back.items()},
        ("reason",),
    )
