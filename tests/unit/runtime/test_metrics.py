import pytest
from prometheus_client.parser import text_string_to_metric_families

from triptych.runtime.metrics import Metrics, gauge, total


def values(metrics: Metrics) -> dict[str, float]:
    families = text_string_to_metric_families(metrics.render().decode())
    return {f"{s.name}{sorted(s.labels.items())}": s.value for family in families for s in family.samples}


def test_two_registries_are_independent() -> None:
    first, second = Metrics(), Metrics()
    first.counter("things", "Things", ("kind",)).labels("good").inc(2)
    second.counter("things", "Things", ("kind",)).labels("good").inc(3)
    assert values(first)["things_total[('kind', 'good')]"] == 2
    assert values(second)["things_total[('kind', 'good')]"] == 3


def test_a_name_can_be_registered_once() -> None:
    metrics = Metrics()
    metrics.counter("things", "Things")
    with pytest.raises(ValueError, match="things"):
        metrics.counter("things", "Things again")


def test_watched_values_are_read_at_each_scrape_only() -> None:
    metrics, reads = Metrics(), []

    def read() -> tuple[object, ...]:
        reads.append(1)
        return (
            gauge("depth", "Depth", len(reads)),
            gauge("links", "Links", {("tcp",): 2, ("shm",): 1}, ("backend",)),
            total("seen", "Seen", 7),
        )

    metrics.watch(read)  # type: ignore[arg-type]
    assert not reads
    assert values(metrics)["depth[]"] == 1
    assert values(metrics)["depth[]"] == 2
    assert values(metrics)["links[('backend', 'shm')]"] == 1
    assert values(metrics)["seen_total[]"] == 7


def test_names_may_have_colons_as_in_vllm() -> None:
    metrics = Metrics()
    metrics.histogram("vllm:e2e_request_latency_seconds", "Latency", ("model_name",)).labels("m").observe(0.2)
    assert values(metrics)["vllm:e2e_request_latency_seconds_count[('model_name', 'm')]"] == 1


def test_two_sources_of_one_gauge_are_one_family() -> None:
    metrics = Metrics()
    for part, value in (("left", 1), ("right", 2)):
        metrics.watch(lambda part=part, value=value: [gauge("depth", "Depth", {(part,): value}, ("part",))])  # type: ignore[misc]
    found = values(metrics)
    assert (found["depth[('part', 'left')]"], found["depth[('part', 'right')]"]) == (1, 2)
    assert metrics.render().count(b"# TYPE depth gauge") == 1


def test_two_users_of_one_counter_share_it() -> None:
    metrics = Metrics()
    for kind in ("good", "good", "bad"):
        metrics.common_counter("things", "Things", ("kind",)).labels(kind).inc()
    assert values(metrics)["things_total[('kind', 'good')]"] == 2
    assert values(metrics)["things_total[('kind', 'bad')]"] == 1
    with pytest.raises(ValueError, match="things"):
        metrics.counter("things", "Things again")
