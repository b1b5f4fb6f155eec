"""The router's gauges, read at every scrape."""

from collections.abc import Iterable

from prometheus_client.core import Metric

from triptych.machine.router.lenders import LendingCounts
from triptych.runtime.managed_membership import membership_gauges
from triptych.runtime.metrics import Metrics, gauge, longest_wait, total

from .service import RouterService


def watch(metrics: Metrics, service: RouterService) -> None:
    """Read the service at every scrape."""

    def read() -> Iterable[Metric]:
        cluster = service.cluster
        yield gauge("triptych_requests_running", "Running requests", service.running)
        yield gauge("triptych_router_media_bytes", "Bytes of items kept for running requests", service.media_bytes)
        yield gauge(
            "triptych_requests_waiting_for_credits",
            "Requests waiting for room in the encoders' arenas",
            cluster.machine.waiting,
        )
        yield gauge(
            "triptych_requests_waiting_for_kv_memory",
            "Requests whose prompts wait until there is KV memory where their answers go on",
            cluster.machine.waiting_for_kv,
        )
        yield longest_wait(
            "triptych_router_longest_wait_seconds",
            "Longest wait of requests that wait for credits now",
            cluster.longest_waits_s(),
        )
        yield gauge("triptych_credits_outstanding", "Credits in use", cluster.machine.outstanding)
        yield gauge(
            "triptych_instances", "Instances by role and state", cluster.machine.instances.states(), ("role", "state")
        )
        yield gauge(
            "triptych_instances_in_backoff",
            "Instances that get no work at a stage, or one item or request at a time, as they fail",
            cluster.machine.instances.in_backoff(),
            ("stage", "reason"),
        )
        yield gauge("triptych_retry_budget", "Items that may be encoded again now", cluster.machine.retries_left)
        yield gauge(
            "triptych_embedding_hints",
            "Embeddings that encoders are believed to hold",
            len(cluster.machine.instances.directory),
        )
        yield total(
            "triptych_embedding_hints_followed",
            "Items sent where their embedding was believed to be, by what came of it",
            {(outcome,): count for outcome, count in cluster.machine.instances.directory.followed.items()},
            ("outcome",),
        )
        yield total(
            "triptych_kv_prefix_leases",
            "Segments of prompts' prefixes that were asked for at other instances",
            {(outcome,): count for outcome, count in cluster.prefix_leases.items()},
            ("outcome",),
        )
        yield from _lending(cluster.machine.lending)
        yield from membership_gauges(cluster.membership.version, cluster.membership_fault)
        yield from service.attainment.metrics(
            "" if cluster.machine.instances.model is None else cluster.machine.instances.model.model_id
        )

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
