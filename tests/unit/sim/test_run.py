"""Simulated deployments: times that can be computed by hand, equal runs, faults, pools that grow."""

import random
import signal
import statistics
from dataclasses import replace

import pytest

from tests.unit.sim.kit import (
    CONTROL_S,
    ENCODE_S,
    ENCODE_TOKEN_S,
    FAMILY,
    LINK,
    PREPARE_S,
    PROMPT_TOKEN_S,
    SEQUENCE_S,
    STEP_S,
    deployment,
)
from triptych.domain.media import MediaInfo, Modality
from triptych.domain.stage import Role
from triptych.sim.outcome import Outcome, waterfall
from triptych.sim.run import simulate
from triptych.sim.scenario import Fault
from triptych.testing.fakes import FAKE_MODEL
from triptych.workload.report import Record
from triptych.workload.requests import TEMPLATE_TOKENS, Distribution, Mix, Plan, Planned, Size, synthetic

pytestmark = pytest.mark.slow

IMAGE = Size(224, 224)
IMAGE_TOKENS = 64
MIX = Mix(Distribution.parse("0:0.3,1:0.4,3:0.3"), Distribution.parse("64"), Distribution.parse("20,60"), IMAGE)
PLACEMENTS = (
    {Role.E: 2, Role.PD: 1},
    {Role.E: 1, Role.P: 1, Role.D: 1},
    {Role.EPD: 2},
    {Role.EP: 1, Role.D: 1},
    {Role.P: 1, Role.ED: 1},
)


def mixed(rate: float = 3.0, duration_s: float = 20.0, seed: int = 1) -> Plan:
    return synthetic(MIX, rate=rate, duration_s=duration_s, burstiness=1.0, rng=random.Random(seed))


def answered(outcome: Outcome) -> bool:
    return not any(record.error for record in outcome.records) and all(
        record.tokens == record.planned.output_tokens for record in outcome.records
    )


def test_a_request_alone_takes_what_its_steps_take() -> None:
    plan = Plan([Planned(1.0, 100, (IMAGE, IMAGE), 11)], 10.0)
    outcome = simulate(deployment({Role.E: 2, Role.PD: 1}), plan)
    [record] = outcome.records
    prompt = 100 + TEMPLATE_TOKENS + 2 * IMAGE_TOKENS
    nbytes = FAMILY.outputs(MediaInfo(Modality.IMAGE, "png", 224, 224, 0, bytes(32)), FAKE_MODEL.dtype)[0].nbytes
    encode_s = PREPARE_S + ENCODE_S + ENCODE_TOKEN_S * IMAGE_TOKENS
    pull_s = 2 * CONTROL_S + LINK.latency_s + 2 * nbytes / LINK.bytes_per_s
    prefill_s = STEP_S + PROMPT_TOKEN_S * prompt
    calls_s = (
        2 * CONTROL_S + 2 * CONTROL_S + 2 * CONTROL_S + 2 * CONTROL_S
    )  # to the router, the encoders, the text instance, and back
    assert record.ttft_s == pytest.approx(encode_s + pull_s + prefill_s + calls_s, abs=0.002)
    assert record.tpot_s == pytest.approx(STEP_S + SEQUENCE_S, rel=0.02)
    assert record.prompt_tokens == prompt
    busy = {use.name: use.busy_s for use in outcome.instances}
    assert busy["encoder-1"]["prepare"] == pytest.approx(PREPARE_S / 4), "of four cores"
    assert busy["text-1"]["step"] == pytest.approx(prefill_s + 10 * (STEP_S + SEQUENCE_S))


def test_the_queue_of_an_encoder_is_as_long_as_theory_says() -> None:
    """Poisson arrivals and equal items that are encoded one by one: M/D/1, mean wait rho * s / (2 * (1 - rho))."""
    service_s, rho = ENCODE_S + ENCODE_TOKEN_S * IMAGE_TOKENS, 0.7
    mix = Mix(Distribution.parse("1"), Distribution.parse("8"), Distribution.parse("1"), IMAGE)
    plan = synthetic(mix, rate=rho / service_s, duration_s=100.0, burstiness=1.0, rng=random.Random(3))
    apart = deployment({Role.E: 1, Role.PD: 4}, encoder={"batches": {"max_batch_items": 1}})
    outcome = simulate(apart, plan)
    assert answered(outcome)
    waits = [timeline.encode_s - PREPARE_S - service_s for timeline in outcome.timelines if timeline is not None]
    expected_s = rho * service_s / (2 * (1 - rho))
    assert statistics.mean(waits[200:]) == pytest.approx(expected_s, rel=0.2)


@pytest.mark.parametrize("sizes", PLACEMENTS, ids=lambda sizes: "+".join(role.value for role in sizes))
def test_every_placement_answers_all_requests(sizes: dict[Role, int]) -> None:
    outcome = simulate(deployment(sizes), mixed())
    assert answered(outcome)
    steps = waterfall(outcome)
    assert steps["image"]["encode"] > PREPARE_S
    assert steps["text"]["encode"] == 0
    means = {kind: [record.ttft_s for record in outcome.records if record.planned.kind == kind] for kind in steps}
    for kind, times in means.items():
        assert sum(steps[kind].values()) == pytest.approx(statistics.mean(time or 0 for time in times), rel=0.02)
    assert {sample.sizes[role.value] for sample in outcome.samples for role in sizes} == set(sizes.values())


def test_the_same_seed_gives_the_same_run() -> None:
    cluster, plan = deployment({Role.E: 2, Role.P: 1, Role.D: 1}), mixed()
    first, again = (replace(simulate(cluster, plan, seed=7), took_s=0.0) for _ in range(2))
    assert first == again
    other = simulate(cluster, plan, seed=8)
    assert [record.planned for record in other.records] == [record.planned for record in first.records]


def test_more_load_never_makes_requests_faster() -> None:
    cluster = deployment({Role.E: 2, Role.PD: 1})
    means = []
    for rate in (1.0, 4.0, 10.0):
        outcome = simulate(cluster, mixed(rate, duration_s=20.0))
        means.append(statistics.mean(record.end_s for record in outcome.records))
    assert means == sorted(means)


def test_an_encoder_that_is_killed_costs_no_answer() -> None:
    faults = [Fault(5.0, "encoder-1", "kill"), Fault(12.0, "encoder-1", "start")]
    outcome = simulate(deployment({Role.E: 2, Role.PD: 1}, faults=faults), mixed(6.0))
    assert answered(outcome)
    assert [(round(decision.at_s, 3), decision.text.split()[0]) for decision in outcome.decisions] == [
        (5.0, "kill"),
        (12.0, "start"),
    ]
    first, second = (use for use in outcome.instances if use.name == "encoder-1")
    assert (first.start_s, first.end_s, second.start_s) == pytest.approx((0.0, 5.0, 12.0), abs=1e-3)


def test_an_image_beside_a_running_answer_waits_for_a_step_not_for_the_answer() -> None:
    plan = Plan([Planned(0.0, 20, (), 200), Planned(1.0, 20, (IMAGE,), 2)], 5.0)
    outcome = simulate(deployment({Role.EPD: 1}), plan)
    answer, image = outcome.records
    assert answer.end_s > 3
    assert image.ttft_s is not None
    assert image.ttft_s < 0.2


def test_nothing_is_busy_for_longer_than_it_is_there() -> None:
    faults = [Fault(3.0, "text-1", "kill"), Fault(4.0, "text-1", "start"), Fault(6.0, "hybrid-1", "kill")]
    outcome = simulate(deployment({Role.EPD: 2, Role.PD: 1}, faults=faults), mixed(8.0, duration_s=10.0))
    assert len(outcome.instances) == 4
    for use in outcome.instances:
        assert all(0 <= spent_s <= use.lasted_s + 1e-6 for spent_s in use.busy_s.values()), use
    for sample in outcome.samples:
        assert all(0 <= share <= 1 + 1e-6 for share in sample.busy.values()), sample


def test_one_that_hung_and_was_started_again_serves() -> None:
    faults = [Fault(1.0, "text-1", "hang"), Fault(2.0, "text-1", "kill"), Fault(3.0, "text-1", "start")]
    outcome = simulate(deployment({Role.E: 1, Role.PD: 1}, faults=faults), mixed(4.0, duration_s=30.0))
    late = [record for record in outcome.records if record.planned.arrival_s > 12]
    assert late
    assert not any(record.error for record in late)


def test_a_killed_instance_is_started_again_where_the_pool_manager_scales() -> None:
    manager = {"autoscale": True, "scaler": "127.0.0.1:1", "control": {"pool_sizes": ("E=1-2", "PD=1-2")}}
    scaled = deployment({Role.E: 1, Role.PD: 1}, manager=manager, scales=True, faults=[Fault(5.0, "text-1", "kill")])
    outcome = simulate(scaled, mixed(2.0, duration_s=60.0))
    assert any(decision.text.startswith("start text-1: ") for decision in outcome.decisions)
    assert not any(record.error for record in outcome.records if record.planned.arrival_s > 40)


def test_requests_that_take_too_long_time_out() -> None:
    outcome = simulate(deployment({Role.E: 1, Role.PD: 1}), mixed(40.0, duration_s=5.0), timeout_s=2.0)
    errors = {record.error for record in outcome.records if record.error}
    assert errors
    assert errors <= {"timeout", "HTTP 429", "HTTP 503", "HTTP 504"}


def test_an_interrupted_run_has_the_requests_that_had_ended() -> None:
    ended: list[Record] = []

    def note(record: Record) -> None:
        ended.append(record)
        if len(ended) == 10:
            signal.raise_signal(signal.SIGINT)

    cluster, plan = deployment({Role.E: 2, Role.PD: 1}), mixed()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        outcome = simulate(cluster, plan, note=note)
    finally:
        signal.signal(signal.SIGINT, before)
    assert outcome.interrupted
    assert 10 <= len(outcome.records) == len(outcome.timelines) < len(plan.requests)
    whole = simulate(cluster, plan)
    assert not whole.interrupted
    assert {record.planned: record.end_s for record in whole.records}.items() >= {
        record.planned: record.end_s for record in outcome.records
    }.items()
    assert outcome.ended_s < whole.ended_s
    assert {use.name for use in outcome.instances} == {"encoder-1", "encoder-2", "text-1"}


def test_a_pool_grows_with_its_load() -> None:
    manager = {"autoscale": True, "scaler": "127.0.0.1:1", "control": {"pool_sizes": ("E=1-4", "PD=1-2")}}
    scaled = deployment(
        {Role.E: 1, Role.PD: 1}, manager=manager, router={"slo": ("ttft=0.5s", "tbt=0.5s")}, scales=True
    )
    outcome = simulate(scaled, mixed(30.0, duration_s=12.0))
    assert max(sample.sizes["E"] for sample in outcome.samples) > 1
    assert any(decision.text.startswith("start encoder-2: ") for decision in outcome.decisions)
    grown = next(use for use in outcome.instances if use.name == "encoder-2")
    assert 0 < grown.start_s < grown.end_s
