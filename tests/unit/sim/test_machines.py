"""The machines fidelity decides as the services do: the same requests are served by the same instances, in the same order and batches.

Times are equal within ``TOLERANCE_S``: the services add up the same durations in another order, and many steps of decoding are
interpolated at once.
"""

import math
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, Literal

import pytest

from tests.unit.sim.kit import IMAGE, MIX, PROFILES, deployment, plan
from triptych.domain.profile import Profile
from triptych.domain.scaling import Kind
from triptych.domain.stage import ModelPart, Role, Stage
from triptych.domain.timeline import Timeline
from triptych.engine.decoder.options import EngineOptions
from triptych.sim import run as services
from triptych.sim.limits import NotSimulated
from triptych.sim.machines import run as machines
from triptych.sim.network import Hosts, LinkSpeed
from triptych.sim.outcome import Outcome, Span
from triptych.sim.queues import run as queues
from triptych.sim.scenario import Deployment, Fault
from triptych.sim.shared_device import Sharing
from triptych.workload.report import Record
from triptych.workload.requests import Distribution, Plan, Size

TOLERANCE_S = 1e-9
PLACEMENTS: Mapping[str, tuple[Mapping[Role, int], float]] = {
    "E+PD": ({Role.E: 2, Role.PD: 1}, 20.0),
    "EPD": ({Role.EPD: 2}, 24.0),
    "E+P+D": ({Role.E: 1, Role.P: 1, Role.D: 1}, 26.0),
    "EP+D": ({Role.EP: 1, Role.D: 1}, 18.0),
    "P+ED": ({Role.P: 1, Role.ED: 1}, 14.0),
    "all": (dict.fromkeys(Role, 1), 60.0),
}
"""Instances, and about how many requests of ``MIX`` they bear per second."""
PREDICTED = {"policies": {"encoder_routing": "predicted", "text_routing": "predicted"}}
RANDOM = {"policies": {"encoder_routing": "power-of-two", "text_routing": "power-of-two"}}


def uneven(cluster: Deployment) -> Deployment:
    """Roles run on hardware of different speeds: of two instances that are done at one time, tasks decide in services who is first."""
    kinds = {}
    for pool, kind in cluster.kinds.items():
        slower = 1 + math.sqrt(list(Role).index(pool.role) + 2) / 100
        kinds[pool] = replace(kind, profiles={part: _slower(kind.profiles[part], slower) for part in kind.profiles})
    return replace(cluster, kinds=kinds)


def _slower(profile: Profile, factor: float) -> Profile:
    rows: dict[str, Any] = {
        kind: tuple(row._replace(seconds=row.seconds * factor) for row in getattr(profile, kind))
        for kind in ("encode", "prepare", "prefill", "decode")
    }
    return replace(profile, identity=replace(profile.identity, hardware=f"synthetic {factor:.4f}"), **rows)


def both(cluster: Deployment, requests: Plan, *, timeout_s: float = 300.0, seed: int = 3) -> tuple[Outcome, Outcome]:
    ways = (services.simulate, machines.simulate)
    cluster = uneven(cluster)
    first, second = (way(cluster, requests, seed=seed, timeout_s=timeout_s, keeps_spans=True) for way in ways)
    return first, second


def decided(timeline: Timeline | None, record: Record) -> Any:
    """A timeline without its times. Of an answer that was given up, tokens are not counted up to then."""
    if timeline is None:
        return None
    if record.error:
        timeline = replace(timeline, completion_tokens=0)
    items = [
        tuple(getattr(item, field.name) for field in fields(item) if field.type is not float) for item in timeline.items
    ]
    return items, [
        getattr(timeline, field.name) for field in fields(timeline) if field.name != "items" and field.type is not float
    ]


def lasted(timeline: Timeline | None) -> list[float]:
    if timeline is None:
        return []
    parts: list[Any] = [timeline, *timeline.items]
    return [getattr(part, field.name) for part in parts for field in fields(part) if field.type is float]


def done(spans: list[Span]) -> list[tuple[str, str, float, float, int]]:
    """What instances did, in its order: batches, steps, preparations, copies and pulls, but for what took no time.

    Copies between the same two steps are one: which of those that are ready at one time is first, tasks decide in services.
    """
    found: list[tuple[str, str, float, float, int]] = []
    for span in sorted(spans, key=lambda span: (span.instance, span.work, span.start_s)):
        if span.end_s <= span.start_s + TOLERANCE_S:
            continue
        before = found[-1] if found else ("", "", 0.0, 0.0, 0)
        follows = before[:2] == (span.instance, span.work) and span.start_s <= before[3] + TOLERANCE_S
        if follows and span.work == "copy":
            found[-1] = (*before[:3], span.end_s, before[4] + span.size)
            continue
        found.append((span.instance, span.work, span.start_s, span.end_s, span.size))
    return sorted(found, key=lambda span: (span[0], span[1], round(span[2], 7), round(span[3], 7), span[4]))


def work_of(outcome: Outcome) -> Counter[tuple[str, str]]:
    """Items, tokens and bytes by instance and kind of work."""
    sizes: Counter[tuple[str, str]] = Counter()
    for span in outcome.spans:
        sizes[span.instance, span.work] += span.size
    return sizes


def close(values: list[float]) -> Any:
    return pytest.approx(values, rel=0, abs=TOLERANCE_S)


def assert_equal(first: Outcome, second: Outcome) -> None:
    for before, after, timeline, other in zip(
        first.records, second.records, first.timelines, second.timelines, strict=True
    ):
        assert replace(after, ttft_s=None, end_s=0.0) == replace(before, ttft_s=None, end_s=0.0)
        assert decided(other, before) == decided(timeline, before)
        assert lasted(other) == close(lasted(timeline))
        assert [after.ttft_s or 0.0, after.end_s] == close([before.ttft_s or 0.0, before.end_s])
    did, does = done(list(first.spans)), done(list(second.spans))
    assert [(instance, work, size) for instance, work, _, _, size in does] == [
        (instance, work, size) for instance, work, _, _, size in did
    ]
    assert [time_s for span in does for time_s in span[2:4]] == close([time_s for span in did for time_s in span[2:4]])
    assert second.moved_bytes == first.moved_bytes
    assert [sample.pending for sample in second.samples] == [sample.pending for sample in first.samples]
    assert [sample.sizes for sample in second.samples] == [sample.sizes for sample in first.samples]
    for use, other_use in zip(first.instances, second.instances, strict=True):
        assert other_use.name == use.name
        assert other_use.busy_s == pytest.approx(use.busy_s, rel=0, abs=1e-6)
    assert second.ended_s == pytest.approx(first.ended_s, rel=0, abs=TOLERANCE_S)


@pytest.mark.parametrize("name", ["E+PD", "EPD", "E+P+D"])
def test_both_fidelities_do_the_same(name: str) -> None:
    sizes, capacity = PLACEMENTS[name]
    assert_equal(*both(deployment(sizes), plan(0.8 * capacity, 40)))


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.5, 0.9])
@pytest.mark.parametrize("name", PLACEMENTS)
def test_every_role_does_the_same(name: str, share: float) -> None:
    sizes, capacity = PLACEMENTS[name]
    assert_equal(*both(deployment(sizes), plan(share * capacity, 60, seed=2)))


@pytest.mark.extended
@pytest.mark.timeout(600)
@pytest.mark.parametrize("router", [{}, PREDICTED, RANDOM], ids=["least-loaded", "predicted", "power-of-two"])
@pytest.mark.parametrize("share", [0.5, 0.9])
@pytest.mark.parametrize("name", PLACEMENTS)
def test_many_requests_are_served_alike(name: str, share: float, router: dict[str, Any]) -> None:
    """2,000 requests of each placement under the router's defaults, fewer of the other cases."""
    sizes, capacity = PLACEMENTS[name]
    number = 800 if router or share < 0.9 else 2000
    first, second = both(deployment(sizes, router=router), plan(share * capacity, number, seed=3))
    assert_equal(first, second)
    assert work_of(second) == work_of(first)


@pytest.mark.extended
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(40))
def test_any_deployment_does_the_same(seed: int) -> None:
    """Roles, sizes, settings, policies, costs of messages and loads are drawn."""
    rng = random.Random(seed)
    sizes = {role: rng.randint(1, 2) for role in rng.sample(list(Role), rng.randint(2, 6))}
    if not all(any(role.serves(stage) for role in sizes) for stage in Stage):
        sizes[Role.EPD] = 1
    placements = ["least-loaded", "least-requests", "power-of-two", "predicted", "round-robin"]
    policies = {
        "encoder_routing": rng.choice(placements),
        "text_routing": rng.choice(placements),
        "ordering": rng.choice(["slo", "deadline", "first-come"]),
        "kv_transfer": rng.choice(["never", "by-need", "always"]),
    }
    text = {
        "kv_bytes_per_step": rng.choice([1 << 20, 1 << 24]),
        "kv_arena_bytes": rng.choice([1 << 24, 1 << 30]),
        "image_cache_bytes": rng.choice([1 << 18, 1 << 28]),
        "encode_share": rng.choice([0.25, 0.5, 1.0]),
        "encode_patience_s": rng.choice([0.0, 0.5]),
        "engine": {"max_sequences": rng.choice([2, 8, 32]), "token_budget": rng.choice([64, 256, 2048])},
    }
    encoder = {"arena_bytes": rng.choice([1 << 26, 1 << 30]), "batches": {"max_batch_items": rng.choice([1, 8])}}
    cluster = deployment(sizes, text=text, encoder=encoder, router={"policies": policies})
    cluster = replace(cluster, control_s=rng.choice([0.0, 0.0003, 0.01]))
    mix = replace(MIX, size=rng.choice([IMAGE, Size(672, 448)]))
    requests = plan(rng.choice([2.0, 8.0, 20.0, 40.0]), 100, seed, mix)
    assert_equal(*both(cluster, requests, timeout_s=rng.choice([300.0, 3.0]), seed=seed))


@pytest.mark.slow
@pytest.mark.parametrize("router", [PREDICTED, RANDOM, {"policies": {"ordering": "first-come"}}])
def test_every_policy_does_the_same(router: dict[str, Any]) -> None:
    assert_equal(*both(deployment({Role.E: 3, Role.PD: 2}, router=router), plan(36.0, 80)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["E+PD", "EPD", "E+P+D"])
def test_overload_is_the_same_until_callers_leave(name: str) -> None:
    sizes, capacity = PLACEMENTS[name]
    first, second = both(deployment(sizes), plan(3 * capacity, 140), timeout_s=2.0)
    assert {record.error for record in first.records} & {"timeout", "HTTP 429"}
    assert_equal(first, second)


@pytest.mark.slow
@pytest.mark.parametrize("network", [None, LinkSpeed(1e8)])
def test_pulls_between_and_within_hosts_take_the_same_links(network: LinkSpeed | None) -> None:
    cluster = deployment({Role.E: 3, Role.PD: 3}, hosts=Hosts(2, network), router=PREDICTED)
    first, second = both(cluster, plan(40.0, 80))
    assert any("within its host" in link for link in first.moved_bytes)
    assert any("host-1" in link for link in first.moved_bytes) == (network is not None)
    assert_equal(first, second)


@pytest.mark.slow
def test_items_are_split_over_encoders_alike() -> None:
    large = replace(MIX, images=Distribution.parse("0:0.3,1:0.7"), size=Size(1344, 1344))
    first, second = both(deployment({Role.E: 4, Role.PD: 1}), plan(4.0, 40, mix=large))
    assert any(item.shard for timeline in first.timelines if timeline is not None for item in timeline.items)
    assert_equal(first, second)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["E+PD", "E+P+D"])
def test_vllms_order_is_the_same(name: str) -> None:
    """By arrival, where Triptych's own engine goes by what is due."""
    sizes, capacity = PLACEMENTS[name]
    requests = plan(1.2 * capacity, 60)

    def with_engine(engine: Literal["triptych", "vllm"]) -> Deployment:
        cluster = deployment(sizes)
        options = EngineOptions(engine=engine, max_sequences=4, token_budget=128)
        texts = {role: text.model_copy(update={"engine": options}) for role, text in cluster.texts.items()}
        return replace(cluster, texts=texts)

    first, second = both(with_engine("vllm"), requests)
    assert_equal(first, second)
    own, _ = both(with_engine("triptych"), requests)
    assert [record.ttft_s for record in own.records] != [record.ttft_s for record in first.records]


@pytest.mark.slow
def test_a_role_on_two_kinds_of_devices_has_a_pool_on_each() -> None:
    """Half of the text instances are twice as slow, and have the names of their tier."""
    slow = Kind(Role.PD, "slow")
    cluster = deployment({Kind(Role.E): 2, Kind(Role.PD, "fast"): 1, slow: 1})
    kind = cluster.kinds[slow]
    profiles = {part: _slower(profile, 2.0) for part, profile in kind.profiles.items()}
    cluster = replace(cluster, kinds={**cluster.kinds, slow: replace(kind, device="old", profiles=profiles)})
    first, second = both(cluster, plan(12.0, 80))
    assert_equal(first, second)
    uses = {use.name: use.device for use in first.instances}
    assert uses == {"encoder-1": "device", "encoder-2": "device", "text-fast-1": "device", "text-slow-1": "old"}
    served = Counter(timeline.text_instance for timeline in first.timelines if timeline is not None)
    assert served["text-fast-1"] > served["text-slow-1"] > 0
    approximate = queues.simulate(cluster, plan(12.0, 80))
    assert all(record.ok for record in (*first.records, *approximate.records))
    assert all(use.busy_s["step"] > 0 for use in approximate.instances if use.role == "PD")


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["by-need", "always"])
def test_keys_and_values_are_transferred_by_the_same_rule(rule: str) -> None:
    router = {"policies": {"kv_transfer": rule}}
    first, second = both(deployment({Role.E: 1, Role.PD: 3}, router=router), plan(30.0, 80))
    assert any(timeline.prefill_instance for timeline in first.timelines if timeline is not None)
    assert_equal(first, second)


@pytest.mark.slow
def test_large_keys_and_values_take_turns_with_steps() -> None:
    """Segments of 8 MiB are copied between steps, one or two at a time."""
    cluster = deployment(
        {Role.E: 1, Role.P: 1, Role.D: 1, Role.ED: 1},
        text={"kv_arena_bytes": 1 << 30, "image_cache_bytes": 1 << 30, "engine": {"kv_cache_bytes": 1 << 34}},
        encoder={"arena_bytes": 1 << 30},
    )
    decoder = PROFILES[ModelPart.DECODER]
    large = replace(decoder, measured=replace(decoder.measured, kv_token_nbytes=1 << 19))
    kinds = {
        role: replace(
            kind,
            profiles={part: large if part is ModelPart.DECODER else profile for part, profile in kind.profiles.items()},
        )
        for role, kind in cluster.kinds.items()
    }
    assert_equal(*both(replace(cluster, kinds=kinds), plan(8.0, 50)))


@pytest.mark.slow
def test_long_prompts_are_computed_in_the_same_chunks() -> None:
    """And steps are shorter than messages take, so that several tokens come with one."""
    engine = {"engine": {"token_budget": 256, "max_sequences": 32}}
    long = replace(MIX, text_tokens=Distribution.parse("2000,50"))
    cluster = replace(deployment({Role.E: 1, Role.P: 1, Role.D: 1, Role.PD: 1}, text=engine), control_s=0.04)
    assert_equal(*both(cluster, plan(8.0, 100, mix=long)))


@pytest.mark.slow
def test_little_memory_is_shared_out_the_same() -> None:
    """Requests wait for arenas, for the cache of pulled embeddings, for KV memory and for places in the batch."""
    small = {"image_cache_bytes": 1 << 16, "kv_arena_bytes": 1 << 20, "engine": {"max_sequences": 4}}
    cluster = deployment({Role.E: 1, Role.P: 1, Role.D: 1}, text=small, encoder={"arena_bytes": 1 << 16})
    assert_equal(*both(cluster, plan(30.0, 80)))


@pytest.mark.parametrize(
    ("cluster", "said"),
    [
        (deployment({Role.E: 1, Role.PD: 1}, faults=[Fault(1.0, "text-1", "kill")]), "faults"),
        (deployment({Role.E: 1, Role.PD: 1}, scales=True), "autoscaling"),
        (deployment({Role.E: 1, Role.PD: 1}, encoders_share=Sharing(Role.PD, 0.5)), "encoders-on"),
        (deployment({Role.EPD: 1, Role.PD: 1}, router={"policies": {"lending": "idle"}}), "lending"),
        (deployment({Role.E: 1, Role.PD: 1}, router={"policies": {"dispatch": "prefix"}}), "dispatch"),
        (deployment({Role.E: 1, Role.PD: 1}, text={"stream_interval_s": 0.1}), "stream-interval-s"),
    ],
)
def test_what_only_services_have_is_refused_before_anything_runs(cluster: Deployment, said: str) -> None:
    with pytest.raises(NotSimulated, match=rf"{said}.*: use --fidelity services"):
        machines.simulate(cluster, plan(1.0, 5))
