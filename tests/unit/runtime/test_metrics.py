"""Metrics belong to an object; watched values are read at scrape time."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from triptych.runtime.metrics import Metrics, gauge, total


def values(metrics: Metrics) -> dict[str, float]:
    families = text_string_to_metric_families(metrics.render().decode())
    return {f"{s.name}{sorted(s.labels.items())}": s.value for family in families for s in family.samples}


def test_two_registries_know_nothing_of_each_other() -> None:
    one, two = Metrics(), Metrics()
    one.counter("things", "Things", ("kind",)).labels("good").inc(2)
    two.counter("things", "Things", ("kind",)).labels("good").inc(3)
    assert values(one)["things_total[('kind', 'good')]"] == 2
    assert values(two)["things_total[('kind', 'good')]"] == 3


def test_a_name_is_taken_once() -> None:
    metrics = Metrics()
    metrics.counter("things", "Things")
    with pytest.raises(ValueError, match="things"):
        metrics.counter("things", "Things again")


def test_what_is_watched_is_read_at_each_scrape_and_not_before() -> None:
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


def test_names_may_have_colons_as_dashboards_for_vllm_want_them() -> None:
    metrics = Metrics()
    metrics.histogram("vllm:e2e_request_latency_seconds", "Latency", ("model_name",)).labels("m").observe(0.2)
    assert values(metrics)["vllm:e2e_request_latency_seconds_count[('model_name', 'm')]"] == 1


def test_what_two_parts_of_a_process_tell_of_one_name_is_one_family() -> None:
    metrics = Metrics()
    for part, value in (("left", 1), ("right", 2)):
        metrics.watch(lambda part=part, value=value: [gauge("depth", "Depth", {(part,): value}, ("part",))])  # type: ignore[misc]
    found = values(metrics)
    assert (found["depth[('part', 'left')]"], found["depth[('part', 'right')]"]) == (1, 2)
    assert metrics.render().count(b"# TYPE depth gauge") == 1


def test_what_two_parts_of_a_process_count_together_is_one_counter() -> None:
    metrics = Metrics()
    for kind in ("good", "good", "bad"):
        metrics.common_counter("things", "Things", ("kind",)).labels(kind).inc()
    assert values(metrics)["things_total[('kind', 'good')]"] == 2
    assert values(metrics)["things_total[('kind', 'bad')]"] == 1
    with pytest.raises(ValueError, match="things"):
        metrics.counter("things", "Things again")
