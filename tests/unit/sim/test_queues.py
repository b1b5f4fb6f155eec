"""The queues fidelity: about the times of the machines, for every role; and what it does not have is refused."""

import random
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from statistics import mean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.sim.kit import (
    CONTROL_S,
    ENCODE_S,
    ENCODE_TOKEN_S,
    IMAGE,
    MIX,
    PREPARE_S,
    PROFILES,
    PROMPT_TOKEN_S,
    STEP_S,
    deployment,
    plan,
)
from triptych.domain.queue_position import QueuePosition
from triptych.domain.stage import ModelPart, Role, Stage
from triptych.sim.limits import NotSimulated
from triptych.sim.machines import run as machines
from triptych.sim.network import Hosts, LinkSpeed
from triptych.sim.outcome import Outcome, waterfall
from triptych.sim.queues import run as queues
from triptych.sim.queues.line import Line
from triptych.sim.scenario import Deployment, Fault
from triptych.workload.report import Objectives, percentile
from triptych.workload.requests import Plan, Planned, Size

PLACEMENTS: Mapping[str, tuple[Mapping[Role, int], float]] = {
    "E+PD": ({Role.E: 4, Role.PD: 2}, 40.0),
    "EPD": ({Role.EPD: 3}, 36.0),
    "E+P+D": ({Role.E: 2, Role.P: 2, Role.D: 2}, 40.0),
    "EP+D": ({Role.EP: 2, Role.D: 2}, 36.0),
    "P+ED": ({Role.P: 2, Role.ED: 2}, 28.0),
    "all": (dict.fromkeys(Role, 1), 60.0),
}
"""Instances, and about how many requests of ``MIX`` they bear per second."""


def latencies(outcome: Outcome) -> tuple[list[float], list[float]]:
    ttfts_s = [record.ttft_s for record in outcome.records if record.ttft_s is not None]
    return ttfts_s, [record.tpot_s for record in outcome.records if record.tpot_s is not None]


def assert_close(cluster: Deployment, rate: float, *, within: float, requests: int = 400) -> None:
    """Medians and 90th percentiles of both latencies, and attainment, beside those of the machines."""
    load = plan(rate, requests)
    exact, about = machines.simulate(cluster, load), queues.simulate(cluster, load)
    for known, found in zip(latencies(exact), latencies(about), strict=True):
        for q in (50, 90):
            assert percentile(found, q) == pytest.approx(percentile(known, q), rel=within)
    objectives = Objectives(*(1.2 * percentile(values, 75) for values in latencies(exact)))
    met, found_met = (sum(map(objectives.met, outcome.records)) / requests for outcome in (exact, about))
    assert found_met == pytest.approx(met, abs=0.05)


@pytest.mark.parametrize("name", ["E+PD", "EPD"])
def test_latencies_are_about_those_of_the_machines(name: str) -> None:
    sizes, capacity = PLACEMENTS[name]
    assert_close(deployment(sizes), 0.6 * capacity, within=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.3, 0.8])
@pytest.mark.parametrize("name", PLACEMENTS)
def test_every_role_has_about_the_latencies_of_the_machines(name: str, share: float) -> None:
    sizes, capacity = PLACEMENTS[name]
    assert_close(deployment(sizes), share * capacity, within=0.1)


def test_requests_that_wait_are_served_once_those_that_were_late_are_gone() -> None:
    """Answers of the first would take longer than anybody waits. Four of them fill the memory of the only instance that decodes."""
    longest = [Planned(0.01 * number, 4000, (), 4000) for number in range(8)]
    short = [Planned(1.2 + 0.02 * number, 400, (), 4) for number in range(8)]
    engine = {"max_sequences": 8, "token_budget": 2048, "kv_cache_bytes": 17_700 << 10}
    cluster = deployment({Role.E: 1, Role.P: 1, Role.D: 1}, text={"engine": engine})
    decoder = PROFILES[ModelPart.DECODER]
    large = replace(decoder, measured=replace(decoder.measured, kv_token_nbytes=1 << 10))
    kinds = {
        pool: replace(kind, profiles={**kind.profiles, ModelPart.DECODER: large}) if pool.role is not Role.E else kind
        for pool, kind in cluster.kinds.items()
    }
    cluster = replace(cluster, kinds=kinds)
    load = Plan([*longest, *short], 5.0)
    outcomes = [simulate(cluster, load, timeout_s=2.0) for simulate in (machines.simulate, queues.simulate)]
    for outcome in outcomes:
        assert [record.error for record in outcome.records if record.planned in longest] == ["timeout"] * 8
        assert [record.error for record in outcome.records if record.planned in short] == [""] * 8


@pytest.mark.parametrize("network", [None, LinkSpeed(1e5)])
def test_pulls_take_the_links_of_hosts(network: LinkSpeed | None) -> None:
    cluster = deployment({Role.E: 3, Role.PD: 3}, hosts=Hosts(2, network))
    load = plan(4.0, 40)
    exact, about = machines.simulate(cluster, load), queues.simulate(cluster, load)
    assert set(about.moved_bytes) == set(exact.moved_bytes)
    slower = mean(latencies(queues.simulate(deployment({Role.E: 3, Role.PD: 3}), load))[0])
    assert (mean(latencies(about)[0]) > 1.1 * slower) == (network is not None), "the network takes time"
    assert mean(latencies(about)[0]) == pytest.approx(mean(latencies(exact)[0]), rel=0.1)


def test_a_request_alone_takes_what_its_stages_take() -> None:
    """Two images are encoded by two encoders at the same time."""
    [request] = Plan([Planned(0.0, 100, (IMAGE, IMAGE), 11)], 1.0).requests
    outcome = queues.simulate(deployment({Role.E: 2, Role.PD: 1}), Plan([request], 1.0))
    exact = machines.simulate(deployment({Role.E: 2, Role.PD: 1}), Plan([request], 1.0))
    [record] = outcome.records
    assert replace(record, ttft_s=None, end_s=0.0) == replace(exact.records[0], ttft_s=None, end_s=0.0)
    assert record.ttft_s == pytest.approx(exact.records[0].ttft_s, abs=1e-5)
    assert record.end_s == pytest.approx(exact.records[0].end_s, abs=1e-5)
    assert record.ttft_s is not None
    tokens = record.prompt_tokens
    alone_s = PREPARE_S + ENCODE_S + 64 * ENCODE_TOKEN_S + STEP_S + PROMPT_TOKEN_S * tokens
    assert alone_s < record.ttft_s < alone_s + 14 * CONTROL_S
    assert waterfall(outcome)["image"] == pytest.approx(waterfall(exact)["image"], abs=2 * CONTROL_S)
    assert outcome.moved_bytes == {link: pytest.approx(nbytes, rel=0.05) for link, nbytes in exact.moved_bytes.items()}


@pytest.mark.parametrize("name", PLACEMENTS)
def test_every_request_is_served_and_the_same_seed_gives_the_same_run(name: str) -> None:
    sizes, capacity = PLACEMENTS[name]
    load = plan(0.9 * capacity, 120)
    first, second = (queues.simulate(deployment(sizes), load, seed=5, keeps_spans=True) for _ in range(2))
    assert replace(first, took_s=0.0) == replace(second, took_s=0.0)
    assert [record.planned for record in first.records] == list(load.requests)
    assert all(record.ok and record.tokens == record.planned.output_tokens for record in first.records)
    assert all(record.ttft_s is not None and 0 < record.ttft_s <= record.end_s for record in first.records)
    assert {use.role for use in first.instances} == {role.value for role in sizes}
    for use in first.instances:
        assert all(0 <= share <= 1 + 1e-9 for share in use.busy_shares.values())
        steps = sorted(
            (span.start_s, span.end_s) for span in first.spans if span.instance == use.name and span.work == "step"
        )
        assert all(before[1] <= after[0] + 1e-9 for before, after in pairwise(steps)), "one step after the other"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_any_deployment_serves_or_refuses_every_request(seed: int) -> None:
    """Roles, sizes, settings, policies and loads are drawn; some have little memory, or little time."""
    rng = random.Random(seed)
    sizes = {role: rng.randint(1, 2) for role in rng.sample(list(Role), rng.randint(2, 6))}
    if not all(any(role.serves(stage) for role in sizes) for stage in Stage):
        sizes[Role.EPD] = 1
    placements = ["least-loaded", "least-requests", "power-of-two", "round-robin"]
    policies = {
        "encoder_routing": rng.choice(placements),
        "text_routing": rng.choice(placements),
        "ordering": rng.choice(["slo", "deadline", "first-come"]),
        "kv_transfer": rng.choice(["never", "by-need", "always"]),
    }
    text = {
        "kv_bytes_per_step": rng.choice([1 << 20, 1 << 24]),
        "kv_arena_bytes": rng.choice([1 << 21, 1 << 30]),
        "encode_share": rng.choice([0.25, 0.5, 1.0]),
        "engine": {"max_sequences": rng.choice([2, 8, 32]), "token_budget": rng.choice([64, 256, 2048])},
    }
    encoder = {"arena_bytes": rng.choice([1 << 18, 1 << 30]), "batches": {"max_batch_items": rng.choice([1, 8])}}
    cluster = deployment(sizes, text=text, encoder=encoder, router={"policies": policies})
    copied = rng.choice([8e9, 2e6])
    cluster = replace(
        cluster, kinds={role: replace(kind, copied_bytes_per_s=copied) for role, kind in cluster.kinds.items()}
    )
    load = plan(rng.choice([2.0, 20.0, 80.0]), 200, seed, replace(MIX, size=rng.choice([IMAGE, Size(1344, 1344)])))
    outcome = queues.simulate(cluster, load, timeout_s=rng.choice([300.0, 3.0, 0.3]), seed=seed)
    assert len(outcome.records) == len(load.requests)
    for record in outcome.records:
        assert record.error in ("", "timeout", "HTTP 400", "HTTP 429"), record
        assert record.ok == (record.tokens == record.planned.output_tokens)


@pytest.mark.parametrize("name", ["E+PD", "EPD", "E+P+D"])
def test_callers_leave_an_overloaded_cluster_and_others_are_served_again(name: str) -> None:
    """After a burst without an end in sight, requests that come later find a cluster without load."""
    sizes, capacity = PLACEMENTS[name]
    burst = plan(10 * capacity, 600)
    later = [replace(request, arrival_s=60.0 + request.arrival_s) for request in plan(0.2 * capacity, 40).requests]
    outcome = queues.simulate(deployment(sizes), Plan([*burst.requests, *later], 100.0), timeout_s=2.0)
    assert len(outcome.records) == len(burst.requests) + len(later)
    assert {record.error for record in outcome.records[: len(burst.requests)]} == {"", "timeout"}
    assert all(record.end_s <= 2.1 for record in outcome.records)
    between = [sample for sample in outcome.samples if 30 < sample.at_s < 60]
    assert between
    assert not any(sum(sample.pending.values()) for sample in between), "nothing is left of the burst"
    alone = queues.simulate(deployment(sizes), Plan(later, 100.0))
    means_s = [mean(latencies(replace(run, records=run.records[-len(later) :]))[0]) for run in (outcome, alone)]
    assert means_s[0] == pytest.approx(means_s[1], rel=0.15)


def test_refused_requests_say_why() -> None:
    too_long = Planned(0.0, 9000, (), 10)
    too_many = Planned(0.1, 10, (IMAGE,) * 65, 10)
    outcome = queues.simulate(deployment({Role.E: 1, Role.PD: 1}), Plan([too_long, too_many], 1.0))
    exact = machines.simulate(deployment({Role.E: 1, Role.PD: 1}), Plan([too_long, too_many], 1.0))
    assert [record.error for record in outcome.records] == [record.error for record in exact.records]
    assert all(record.error for record in outcome.records)


def test_a_plan_without_requests_has_no_records() -> None:
    assert not queues.simulate(deployment({Role.E: 1, Role.PD: 1}), Plan([], 1.0)).records


@pytest.mark.parametrize(
    ("cluster", "said", "other"),
    [
        (deployment({Role.E: 1, Role.PD: 1}, faults=[Fault(1.0, "text-1", "kill")]), "faults", "services"),
        (deployment({Role.E: 1, Role.PD: 1}, scales=True), "autoscaling", "services"),
        (deployment({Role.EPD: 1, Role.PD: 1}, router={"policies": {"lending": "idle"}}), "lending", "services"),
        (
            deployment({Role.E: 1, Role.PD: 1}, router={"policies": {"encoder_routing": "predicted"}}),
            "encoder-routing=predicted",
            "machines",
        ),
        (
            deployment({Role.E: 1, Role.PD: 1}, router={"policies": {"text_routing": "predicted"}}),
            "text-routing=predicted",
            "machines",
        ),
        (
            deployment({Role.E: 1, Role.PD: 1}, scales=True, router={"policies": {"text_routing": "predicted"}}),
            "autoscaling, text-routing=predicted",
            "services",
        ),
    ],
)
def test_what_queues_do_not_have_is_refused_before_anything_runs(cluster: Deployment, said: str, other: str) -> None:
    with pytest.raises(NotSimulated, match=rf"--fidelity queues does not have {said}: use --fidelity {other}"):
        queues.simulate(cluster, plan(1.0, 5))


@pytest.mark.parametrize("simulate", [queues.simulate, machines.simulate])
def test_tenants_are_refused_unless_the_router_does_not_tell_them_apart(simulate: Any) -> None:
    requests = [Planned(0.0, 10, (), 2, tenant="a"), Planned(0.1, 10, (), 2, tenant="b")]
    with pytest.raises(NotSimulated, match=r"several tenants .*--tenants none.*: use --fidelity services"):
        simulate(deployment({Role.EPD: 1}), Plan(requests, 1.0))
    alike = deployment({Role.EPD: 1}, router={"policies": {"tenants": "none"}})
    assert all(record.ok for record in simulate(alike, Plan(requests, 1.0)).records)


# --- the line ---------------------------------------------------------------------------------------------------------


class Entry:
    def __init__(self, position: QueuePosition) -> None:
        self.position = position


POSITIONS = st.builds(
    QueuePosition,
    priority=st.integers(0, 1),
    due_s=st.floats(0, 10),
    arrival=st.integers(0, 1000),
    lost_s=st.one_of(st.just(float("inf")), st.floats(0, 10)),
    aged_s=st.floats(10, 30),
)


@given(st.lists(st.tuples(POSITIONS, st.sampled_from(["stays", "leaves", "goes back"])), max_size=30), st.floats(0, 12))
def test_a_line_gives_entries_in_the_order_of_their_positions(
    entries: list[tuple[QueuePosition, str]], now_s: float
) -> None:
    line: Line[Entry] = Line()
    staying: list[Entry] = []
    for position, does in entries:
        entry = Entry(position)
        line.add(entry, 0.0)
        if does == "leaves":
            assert line.remove(entry)
            assert not line.remove(entry)
            continue
        if does == "goes back" and (first := line.pop(0.0)) is not None:
            line.add(first, 0.0)
        staying.append(entry)
    assert len(line) == len(staying)
    taken = []
    while (taken_next := line.pop(now_s)) is not None:
        taken.append(taken_next)
    expected = sorted(entry.position.at(now_s) for entry in staying)
    assert [entry.position.at(now_s) for entry in taken] == expected
    assert not line
