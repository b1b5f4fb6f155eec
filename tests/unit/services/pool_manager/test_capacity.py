"""What the manager knows of its pools from profiles, what instances say they run, and routers' objectives."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pytest

from tests.unit.policy.profiles import DECODER, DECODER_IDENTITY, ENCODER, ENCODER_IDENTITY
from triptych.domain.decision import (
    Bounds,
    Decision,
    InstancePhase,
    PoolFacts,
    PoolInstance,
    PoolLoad,
    PoolView,
    Why,
)
from triptych.domain.instance import InstanceLimits, InstanceLoad, LimitsReport, ServedPart
from triptych.domain.membership import MemberKind
from triptych.domain.pool import MemberCondition, MemberStatus, PoolStatus, Registration
from triptych.domain.scaling import PoolName
from triptych.domain.stage import Role
from triptych.domain.windows import ClassWindow
from triptych.engine.delay import synthetic_decoder_profile, synthetic_encoder_profile
from triptych.policy.scaling import ScalingLimits, decide, encode_tokens, prompt_tokens
from triptych.runtime.profiles import KnownProfiles
from triptych.services.pool_manager.capacity import Capacities

E, PD, EPD = (PoolName("m", role) for role in (Role.E, Role.PD, Role.EPD))
ENCODER_PART = ServedPart(ENCODER_IDENTITY, 8, prepare_cores=4)
DECODER_PART = ServedPart(DECODER_IDENTITY, 16, token_budget=512)
IMAGES = ClassWindow(
    arrivals=100,
    items=200,
    media_tokens=40_000,
    media_bytes=20_000_000,
    pixels=40_000_000,
    prompt_tokens=50_000,
    output_tokens=2_000,
    done=100,
)
MIX = {"image-1024": IMAGES, "text": ClassWindow(arrivals=50, prompt_tokens=5_000, output_tokens=1_000, done=50)}


def member(name: str, role: Role | None, *parts: ServedPart, slo: Sequence[str] = (), model: str = "m") -> MemberStatus:
    kind = MemberKind.ROUTER if role is None else MemberKind.INSTANCE
    told = Registration(kind, name, 1, f"{name}:1", model, role=role, parts=parts, slo=tuple(slo))
    return MemberStatus(told, MemberCondition.ACTIVE, suspected=False, load=InstanceLoad({}), since_s=1.0, heard_s=0.0)


def pool(*members: MemberStatus) -> PoolStatus:
    return PoolStatus(members[0].registration.model, members[0].registration.role, members)


ROUTERS = pool(member("r", None, slo=("ttft=5x", "tbt=5x")))
ENCODERS, TEXTS = pool(member("e", Role.E, ENCODER_PART)), pool(member("t", Role.PD, DECODER_PART))
HYBRIDS = pool(member("h", Role.EPD, ENCODER_PART, DECODER_PART))


def capacities(*pools: PoolStatus, profiles: Sequence[object] = (ENCODER, DECODER)) -> Capacities:
    made = Capacities(KnownProfiles(profiles))  # type: ignore[arg-type]
    made.observe(pools)
    return made


@pytest.mark.parametrize(("name", "pools"), [(E, (ENCODERS,)), (PD, (TEXTS,)), (EPD, (HYBRIDS,))])
def test_every_kind_of_pool_has_a_capacity_from_the_profiles_of_its_parts(
    name: PoolName, pools: tuple[PoolStatus, ...]
) -> None:
    facts = capacities(*pools, ROUTERS).facts(name)(MIX)
    assert facts.capacity_per_s is not None
    assert facts.capacity_per_s > 0
    assert facts.wait_objective_s is not None
    assert facts.start_s == 5.0  # as measured
    assert facts.missing == ()


def test_a_hybrid_loads_the_weights_of_both_parts_before_it_serves() -> None:
    encoder = replace(ENCODER, measured=replace(ENCODER.measured, load_s=2.0))
    made = capacities(HYBRIDS, ENCODERS, ROUTERS, profiles=(encoder, DECODER))
    assert made.facts(EPD)({}).start_s == 7.0
    assert made.facts(E)({}).start_s == 5.0
    switching = [pool(member(role.value, role, ENCODER_PART, DECODER_PART)) for role in (Role.E, Role.D)]
    made = capacities(*switching, ROUTERS, profiles=(encoder, DECODER))
    for role in (Role.E, Role.D):
        assert made.facts(PoolName("m", role))({}).start_s == 7.0, "it can switch, and has both"


def test_a_pool_of_one_stage_of_text_has_the_facts_of_that_stage() -> None:
    prefill, decode = (pool(member(role.value, role, DECODER_PART)) for role in (Role.P, Role.D))
    made = capacities(prefill, decode, ENCODERS, TEXTS, ROUTERS)
    of_p, of_d, of_pd = (made.facts(PoolName("m", role))(MIX) for role in (Role.P, Role.D, Role.PD))
    assert of_p.capacity_per_s is not None
    assert of_d.capacity_per_s is not None
    assert of_p.capacity_per_s != of_pd.capacity_per_s != of_d.capacity_per_s
    assert of_p.start_s == of_d.start_s == of_pd.start_s
    silent = capacities(pool(member("d", Role.D)), ROUTERS).facts(PoolName("m", Role.D))(MIX).missing
    assert "parts of the model: the instances do not say which they run" in silent


def test_an_objective_in_seconds_is_divided_by_the_other_pools_profile() -> None:
    routers = pool(member("r", None, slo=("ttft=1s",)))
    assert capacities(ENCODERS, TEXTS, routers).facts(E)(MIX).capacity_per_s is not None
    assert "profile of the language model" in capacities(ENCODERS, routers).facts(E)(MIX).missing


def test_another_model_has_other_profiles_and_objectives() -> None:
    other = replace(ENCODER_PART, identity=replace(ENCODER_IDENTITY, digest="cd" * 32))
    made = capacities(ENCODERS, ROUTERS, pool(member("o", Role.E, other, model="n")))
    assert made.facts(PoolName("n", Role.E))(MIX).missing == ("profile of the encoder",)
    assert made.facts(E)(MIX).capacity_per_s is not None


def test_what_is_missing_is_named() -> None:
    assert capacities(ENCODERS, ROUTERS, profiles=()).facts(E)(MIX).missing == ("profile of the encoder",)
    assert capacities(ENCODERS).facts(E)(MIX).missing == ("an objective for TTFT",)
    silent = capacities(pool(member("e", Role.E)), ROUTERS).facts(E)(MIX).missing
    assert "parts of the model: the instances do not say which they run" in silent


def test_other_hardware_is_better_than_nothing_and_is_named() -> None:
    other = replace(ENCODER_PART, identity=replace(ENCODER_IDENTITY, hardware="cpu b"))
    facts = capacities(pool(member("e", Role.E, other)), ROUTERS).facts(E)(MIX)
    assert facts.capacity_per_s is not None
    assert facts.missing == ("exact costs: measured on other hardware",)


def test_a_mixed_pool_counts_like_its_commonest_instance_and_says_so() -> None:
    small = replace(ENCODER_PART, max_batch=1)
    mixed = pool(member("a", Role.E, ENCODER_PART), member("b", Role.E, small), member("c", Role.E, small))
    facts = capacities(mixed, ROUTERS).facts(E)(MIX)
    same = capacities(pool(member("c", Role.E, small)), ROUTERS).facts(E)(MIX)
    assert facts.capacity_per_s == same.capacity_per_s
    assert any("other instances" in missing for missing in facts.missing)
    routers = pool(*(member(str(factor), None, slo=(f"ttft={factor}x",)) for factor in (5, 6)))
    assert any("some routers" in missing for missing in capacities(ENCODERS, routers).facts(E)(MIX).missing)


def test_a_pool_that_lost_its_instances_keeps_its_capacity() -> None:
    made = capacities(ENCODERS, ROUTERS)
    made.observe([PoolStatus("m", Role.E, ())])
    assert made.facts(E)(MIX).capacity_per_s is not None


def test_limits_that_make_no_sense_do_no_harm() -> None:
    strange = pool(member("h", Role.EPD, replace(ENCODER_PART, max_batch=0), replace(DECODER_PART, max_batch=0)))
    assert capacities(strange, ROUTERS).facts(EPD)(MIX) != PoolFacts()


# --- advice -------------------------------------------------------------------------------------------------------------


def test_the_best_batch_and_degree_follow_from_the_profiles() -> None:
    faster = replace(
        ENCODER,
        identity=replace(ENCODER_IDENTITY, tensor_parallel=2),
        encode=tuple(row._replace(seconds=row.seconds / 4) for row in ENCODER.encode),
    )
    alone = capacities(ENCODERS, TEXTS, ROUTERS).advice(E, MIX)
    assert len(alone) == 1
    assert "tensor-parallel degree 1" in alone[0]
    assert "now batches have up to 8" in alone[0]
    both = capacities(ENCODERS, TEXTS, ROUTERS, profiles=(ENCODER, faster, DECODER)).advice(E, MIX)
    assert "tensor-parallel degree 2" in both[0]
    texts = capacities(ENCODERS, TEXTS, ROUTERS).advice(PD, MIX)
    assert "tensor-parallel degree 1" in texts[0]
    assert "now batches have up to 16" in texts[0]


def test_a_host_is_filled_with_a_text_instance_and_encoders() -> None:
    made = Capacities(KnownProfiles((ENCODER, DECODER)), host_devices=8)
    made.observe((ENCODERS, TEXTS, ROUTERS))
    assert made.advice(E, MIX)[1] == "a host of 8 devices holds 1 text instance and 7 encoders"


@pytest.mark.parametrize("name", [E, PD, EPD])
def test_without_profiles_or_requests_there_is_no_advice(name: PoolName) -> None:
    assert capacities(ENCODERS, TEXTS, HYBRIDS, ROUTERS, profiles=()).advice(name, MIX) == ()
    assert capacities(ENCODERS, TEXTS, HYBRIDS, ROUTERS).advice(name, {}) == ()
    assert capacities().advice(name, MIX) == ()


# --- decisions with these facts -----------------------------------------------------------------------------------------


# An image of 400 tokens takes 0.2 s to encode; a prompt 8 ms and 0.025 ms per token.
SLOW_ENCODER = synthetic_encoder_profile(pass_s=0.02, token_s=0.18 / 400, load_s=5.0)
FAST_DECODER = synthetic_decoder_profile(step_s=0.008, sequence_s=0.0002, prefill_token_s=0.000025, load_s=5.0)


def load(tokens_per_s: float, waiting: float = 0.0) -> PoolLoad:
    return PoolLoad(tokens_per_s, tokens_per_s, tokens_per_s, tokens_per_s, waiting, 1.0)


def decided(
    name: PoolName, classes: dict[str, ClassWindow], *, instances: int, waiting: float = 0.0, window_s: float = 30.0
) -> Decision:
    """The decision on a pool of so many instances after a window with these requests."""
    encoder = replace(ENCODER_PART, identity=SLOW_ENCODER.identity)
    decoder = replace(DECODER_PART, identity=FAST_DECODER.identity)
    pools = [pool(member(str(role), role, encoder, decoder)) for role in (Role.E, Role.PD, Role.EPD)]
    facts = capacities(*pools, ROUTERS, profiles=(SLOW_ENCODER, FAST_DECODER)).facts(name)(classes)
    tokens = encode_tokens if name.role is Role.E else prompt_tokens
    assert facts.start_s is not None
    view = PoolView(
        str(name),
        instances,
        Bounds(1, 64),
        tuple(PoolInstance(str(number), InstancePhase.READY) for number in range(instances)),
        load(tokens(classes) / window_s, waiting),
        report_age_s=0.5,
        facts=facts,
        start_s=facts.start_s,
    )
    return decide(view, ScalingLimits())


def burst(images: int, *, positions: int) -> dict[str, ClassWindow]:
    """30 s of 60 requests for text, and of requests with an image of 400 tokens, each with so many positions in the
    prompt.
    """
    texts = ClassWindow(arrivals=60, prompt_tokens=60 * 50, output_tokens=600, done=60)
    shown = ClassWindow(
        arrivals=images,
        items=images,
        media_tokens=400 * images,
        prompt_tokens=(50 + positions) * images,
        output_tokens=5 * images,
        done=images,
    )
    return {"image-1024": shown, "text": texts} if images else {"text": texts}


CROSS_ATTENTION, DECODER_ONLY = 1, 400


@pytest.mark.parametrize("positions", [CROSS_ATTENTION, DECODER_ONLY])
def test_an_image_burst_grows_the_encoders(positions: int) -> None:
    decision = decided(E, burst(300, positions=positions), instances=1)
    assert decision.why is Why.LOAD
    assert decision.needed is not None
    assert decision.needed >= 4
    assert decision.target == decision.needed


def test_an_image_burst_leaves_the_text_pool_of_a_cross_attention_model_as_it_is() -> None:
    decision = decided(PD, burst(300, positions=CROSS_ATTENTION), instances=1)
    assert (decision.target, decision.why) == (1, Why.STEADY)


def test_an_image_burst_grows_the_text_pool_of_a_decoder_only_model_less_than_its_encoders() -> None:
    before, after = (decided(PD, burst(images, positions=DECODER_ONLY), instances=1) for images in (20, 300))
    assert before.needed == 1
    assert after.needed is not None
    assert after.needed > 1
    encoders = decided(E, burst(300, positions=DECODER_ONLY), instances=1)
    assert encoders.needed is not None
    assert encoders.needed > after.needed


def test_a_burst_on_hybrids_needs_instances_for_both_kinds_of_work() -> None:
    mix = burst(300, positions=DECODER_ONLY)
    encoders, texts, hybrids = (decided(name, mix, instances=1).needed for name in (E, PD, EPD))
    assert encoders is not None
    assert texts is not None
    assert hybrids is not None
    assert max(encoders, texts) < hybrids <= encoders + texts


def test_a_queue_that_breaks_the_objective_grows_a_pool_whose_load_alone_would_not() -> None:
    mix = burst(50, positions=CROSS_ATTENTION)
    calm, queued = (decided(E, mix, instances=1, waiting=waiting) for waiting in (0.0, 400.0 * 200))
    assert (calm.target, calm.why) == (1, Why.STEADY)
    assert queued.target > 1
    assert queued.why is Why.WAIT


def test_members_that_all_differ_cost_no_more_than_equal_ones() -> None:
    """Comparing each with each once took the manager 3 s of every second with 4096 members."""
    members = [member(f"t{number}", Role.PD, DECODER_PART) for number in range(1000)]
    different = [
        replace(member, registration=replace(member.registration, kv_tokens=number))
        for number, member in enumerate(members)
    ]
    counted = [calls_of(partial(Capacities(KnownProfiles()).observe, (pool(*of),))) for of in (members, different)]
    assert counted[1] <= 1.1 * counted[0]


def calls_of(function: Callable[[], object]) -> int:
    """Python functions that are called."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        del frame, argument
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(before)
    return calls


def limited(status: MemberStatus, limits: InstanceLimits) -> MemberStatus:
    return replace(status, load=replace(status.load, limits=LimitsReport(limits, 1)))


LONG = {"text": ClassWindow(arrivals=50, prompt_tokens=5_000, output_tokens=20_000, done=50)}
"""Answers that are decoded in batches."""
LOOSE = pool(member("r", None, slo=("ttft=100x", "tbt=20x")))


def texts(sequences: int) -> PoolStatus:
    """Instances that were started with another limit than they have now."""
    return pool(limited(member("t", Role.PD, DECODER_PART), InstanceLimits(max_sequences=sequences, token_budget=512)))


def test_a_pool_bears_what_it_does_with_the_limits_that_its_instances_have_now() -> None:
    found = [
        capacities(ENCODERS, pools, LOOSE).facts(PD)(LONG).capacity_per_s for pools in (TEXTS, texts(16), texts(1))
    ]
    before, same, now = found
    assert before == same
    assert now is not None
    assert before is not None
    assert now < before


def test_a_better_batch_is_found_for_the_limits_of_now() -> None:
    change = capacities(ENCODERS, texts(1), LOOSE).better_batch(PD, LONG)
    assert change is not None
    assert change.now == 1
    assert change.best > 1
    assert capacities(ENCODERS, texts(change.best), LOOSE).better_batch(PD, LONG) is None
    assert capacities(HYBRIDS, ROUTERS).better_batch(EPD, MIX) is None, "its batches share a device"
    assert capacities(ENCODERS, texts(1), LOOSE, profiles=()).better_batch(PD, LONG) is None


def test_a_better_degree_needs_a_profile_of_it() -> None:
    assert capacities(ENCODERS, TEXTS, ROUTERS).better_degree(PD, MIX) is None
    fast = DECODER.faster(4.0, hardware=DECODER_IDENTITY.hardware)
    divided = replace(fast, identity=replace(fast.identity, tensor_parallel=2))
    change = capacities(ENCODERS, TEXTS, ROUTERS, profiles=(ENCODER, DECODER, divided)).better_degree(PD, MIX)
    assert change is not None
    assert (change.now, change.best) == (1, 2)
    assert capacities(HYBRIDS, ROUTERS, profiles=(ENCODER, DECODER, divided)).better_degree(EPD, MIX) is None
