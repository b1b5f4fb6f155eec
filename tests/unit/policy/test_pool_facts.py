from dataclasses import replace

import pytest

from tests.unit.policy.profiles import DECODER, ENCODER
from triptych.domain.profile import LoadRow
from triptych.domain.slo import Slo
from triptych.domain.stage import Role, Stage
from triptych.domain.windows import ClassWindow
from triptych.policy.capacity import TextLimits
from triptych.policy.costs import Costs
from triptych.policy.pool_facts import EncoderLimits, Profiles, encoder_facts, hybrid_facts, isolated, text_facts

BOTH = Profiles(Costs(ENCODER), Costs(DECODER))
SLO = Slo.parse(["ttft=5x", "tbt=5x"])
LIMITS = TextLimits(max_sequences=16, token_budget=512)
ENCODER_LIMITS = EncoderLimits(max_items=8)
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


def test_encoders_bear_what_they_encode_within_their_share() -> None:
    facts = encoder_facts(BOTH, SLO, MIX, limits=ENCODER_LIMITS)
    # An item of 200 tokens: 1.2 ms to prepare and 40 ms to encode, five times that within the objective.
    alone_s = 0.04 + 1e-9 * 200_000 + 1e-8 * 100_000
    assert facts.wait_objective_s == pytest.approx(4 * alone_s)
    assert facts.capacity_per_s is not None
    assert 200 / 0.04 * 0.5 < facts.capacity_per_s < 200 * 8 / (0.02 + 8 * 0.02)


def test_text_instances_bear_what_they_prefill_and_decode() -> None:
    facts = text_facts(BOTH, SLO, MIX, limits=LIMITS)
    assert facts.capacity_per_s is not None
    assert 0 < facts.capacity_per_s < 10_000
    assert facts.wait_objective_s == pytest.approx(4 * 0.02)  # of the shortest class


def test_a_tighter_objective_means_a_smaller_capacity() -> None:
    loose, tight = (
        encoder_facts(BOTH, Slo.parse([objective]), MIX, limits=ENCODER_LIMITS) for objective in ("ttft=5x", "ttft=2x")
    )
    assert loose.capacity_per_s is not None
    assert tight.capacity_per_s is not None
    assert tight.capacity_per_s < loose.capacity_per_s


def test_a_capacity_far_below_one_request_after_the_other_is_not_believed() -> None:
    """A load level that was measured beside other work lowered that of a text instance to 0.75 tokens/s."""
    level = LoadRow(Stage.PREFILL, 16, 400, 20, 0.75, 0.05, 0.06, 0.07, 0.05, 0.0025)
    disturbed = Profiles(BOTH.encoder, Costs(replace(DECODER, load=(level,))))
    facts = text_facts(disturbed, SLO, MIX, limits=LIMITS)
    assert facts.capacity_per_s is None
    assert [missing for missing in facts.missing if missing.startswith("a plausible capacity: 0.")]


def test_a_queue_is_worked_off_faster_than_the_objectives_permit_load() -> None:
    """A tight objective leaves instances idle for most of the time: that does not make them slower."""
    tight, loose = (text_facts(BOTH, Slo.parse([ttft]), MIX, limits=LIMITS) for ttft in ("ttft=2x", "ttft=50x"))
    assert tight.capacity_per_s is not None
    assert loose.capacity_per_s is not None
    assert tight.busy_per_s == loose.busy_per_s
    assert tight.busy_per_s is not None
    assert tight.capacity_per_s < 0.5 * loose.capacity_per_s < loose.capacity_per_s <= tight.busy_per_s
    items = encoder_facts(BOTH, SLO, MIX, limits=replace(ENCODER_LIMITS, max_items=1))
    assert items.busy_per_s == pytest.approx(200 / 0.04), "one item of 200 tokens after the other"


def test_other_requests_mean_another_capacity() -> None:
    longer = {"image-1024": replace(IMAGES, prompt_tokens=200_000)}
    base, other = (text_facts(BOTH, SLO, mix, limits=LIMITS).capacity_per_s for mix in (MIX, longer))
    assert base != other


def test_seconds_are_divided_in_proportion_to_both_parts() -> None:
    facts = encoder_facts(BOTH, Slo.parse(["ttft=1s"]), {"image-1024": IMAGES}, limits=ENCODER_LIMITS)
    encode_s, prefill_s = 0.04 + 0.0002 + 0.001, 0.01 + 1e-4 * 500
    share_s = encode_s / (encode_s + prefill_s)
    assert facts.wait_objective_s == pytest.approx(share_s - encode_s, rel=0.01)


@pytest.mark.parametrize(
    ("profiles", "slo", "missing"),
    [
        (Profiles(None, BOTH.text), "ttft=5x", "profile of the encoder"),
        (Profiles(BOTH.encoder, None), "ttft=1s", "profile of the language model"),
        (BOTH, "tbt=5x", "an objective for TTFT"),
        (BOTH, "ttft=0.01s", "a size within the objectives: even an idle replica misses them"),
    ],
)
def test_what_an_encoder_lacks_is_named(profiles: Profiles, slo: str, missing: str) -> None:
    facts = encoder_facts(profiles, Slo.parse([slo]), MIX, limits=ENCODER_LIMITS)
    assert facts.capacity_per_s is None
    assert missing in facts.missing


def test_a_factor_needs_the_profile_of_its_own_part_only() -> None:
    assert encoder_facts(Profiles(BOTH.encoder, None), SLO, MIX, limits=ENCODER_LIMITS).capacity_per_s is not None
    assert text_facts(Profiles(None, BOTH.text), SLO, MIX, limits=LIMITS).capacity_per_s is not None


def test_what_a_text_pool_lacks_is_named() -> None:
    assert text_facts(Profiles(), SLO, MIX, limits=LIMITS).missing == ("profile of the language model",)
    nothing_done = {"text": ClassWindow(arrivals=5, prompt_tokens=10)}
    assert text_facts(BOTH, SLO, nothing_done, limits=LIMITS).missing == ("finished requests in the last reports",)
    assert encoder_facts(BOTH, SLO, {}, limits=ENCODER_LIMITS).missing == ("items in the last reports",)


def test_a_rare_class_does_not_decide_for_the_others() -> None:
    rare = {**MIX, "image-more": replace(IMAGES, arrivals=1, items=1, media_tokens=30_000, prompt_tokens=1)}
    assert text_facts(BOTH, SLO, rare, limits=LIMITS).wait_objective_s == pytest.approx(4 * 0.02)


def test_warnings_of_the_profile_are_passed_on() -> None:
    strange = Profiles(Costs(replace(ENCODER, measured=replace(ENCODER.measured, drift=0.5))), None)
    facts = encoder_facts(strange, SLO, MIX, limits=ENCODER_LIMITS)
    assert facts.capacity_per_s is not None
    assert any("speed changed" in missing for missing in facts.missing)


def test_a_hybrid_divides_its_device_between_items_and_prompts() -> None:
    hybrid = hybrid_facts(BOTH, SLO, MIX, encoder=ENCODER_LIMITS, text=LIMITS)
    items, texts = encoder_facts(BOTH, SLO, MIX, limits=ENCODER_LIMITS), text_facts(BOTH, SLO, MIX, limits=LIMITS)
    assert hybrid.capacity_per_s is not None
    assert items.capacity_per_s is not None
    assert texts.capacity_per_s is not None
    media_per_prompt = 40_000 / 55_000
    busy = hybrid.capacity_per_s / texts.capacity_per_s
    busy += media_per_prompt * hybrid.capacity_per_s / items.capacity_per_s
    assert busy == pytest.approx(1)
    assert hybrid.wait_objective_s == pytest.approx(4 * 0.02)  # of requests without images


def test_a_hybrid_without_items_is_a_text_instance() -> None:
    texts = {"text": MIX["text"]}
    expected = text_facts(Profiles(None, BOTH.text), SLO, texts, limits=LIMITS)
    assert hybrid_facts(Profiles(None, BOTH.text), SLO, texts, encoder=ENCODER_LIMITS, text=LIMITS) == expected


def test_a_hybrid_names_what_either_part_lacks() -> None:
    facts = hybrid_facts(Profiles(None, BOTH.text), SLO, MIX, encoder=ENCODER_LIMITS, text=LIMITS)
    assert facts.capacity_per_s is None
    assert "profile of the encoder" in facts.missing
    facts = hybrid_facts(Profiles(BOTH.encoder, None), SLO, MIX, encoder=ENCODER_LIMITS, text=LIMITS)
    assert facts.capacity_per_s is None
    assert "profile of the language model" in facts.missing
    nothing_done = {"image-1024": replace(IMAGES, done=0, output_tokens=0)}
    facts = hybrid_facts(BOTH, SLO, nothing_done, encoder=ENCODER_LIMITS, text=LIMITS)
    assert (facts.capacity_per_s, facts.missing) == (None, ("finished requests in the last reports",))
    late = hybrid_facts(BOTH, Slo.parse(["ttft=0.001s", "tbt=5x"]), MIX, encoder=ENCODER_LIMITS, text=LIMITS)
    assert late.capacity_per_s is None


def test_a_request_alone_takes_what_both_profiles_say() -> None:
    window = ClassWindow(arrivals=1, items=2, media_tokens=400, media_bytes=200_000, pixels=400_000, prompt_tokens=500)
    found = isolated(BOTH, window, encoders=2)
    assert found is not None
    # Each encoder has one of the two items of 200 tokens.
    assert found.encode_s == pytest.approx(0.04 + 1e-9 * 200_000 + 1e-8 * 100_000)
    assert found.prefill_s == pytest.approx(0.01 + 1e-4 * 500)
    assert found.tbt_s == pytest.approx(0.011 + 1e-6 * 500)
    assert found.ttft_s == found.encode_s + found.prefill_s, "the router's own work is not in profiles"


@pytest.mark.parametrize(("encoders", "items"), [(1, 16), (2, 8), (3, 6), (16, 1), (40, 1)])
def test_the_items_of_a_request_alone_share_the_encoders(encoders: int, items: int) -> None:
    """Sixteen images had the objective of one, and so went before every later request with one."""
    assert BOTH.encoder is not None
    many = ClassWindow(arrivals=1, items=16, media_tokens=3200, prompt_tokens=500)
    found = isolated(BOTH, many, encoders=encoders)
    assert found is not None
    assert found.encode_s == pytest.approx(BOTH.encoder.encode_s(200, items).value)


def test_a_latency_alone_needs_the_profiles_of_the_parts_that_work() -> None:
    text = ClassWindow(arrivals=1, prompt_tokens=100)
    assert isolated(Profiles(None, BOTH.text), text) is not None
    assert isolated(Profiles(None, BOTH.text), replace(text, items=1, media_tokens=9)) is None
    assert isolated(Profiles(BOTH.encoder, None), text) is None


# --- prefill and decode apart ---------------------------------------------------------------------------------------------


def test_prefill_and_decode_apart_bear_more_of_their_own_tokens() -> None:
    both, prefill, decode = (text_facts(BOTH, SLO, MIX, limits=LIMITS, role=role) for role in (Role.PD, Role.P, Role.D))
    assert both.capacity_per_s is not None
    assert prefill.capacity_per_s is not None
    assert decode.capacity_per_s is not None
    assert prefill.capacity_per_s > both.capacity_per_s
    assert prefill.wait_objective_s == both.wait_objective_s
    answers = 3_000 / 55_000  # tokens of answers per token of prompts
    assert decode.capacity_per_s > answers * both.capacity_per_s
    assert decode.wait_objective_s is None, "nobody waits there for a first token"


def test_a_decode_pool_without_an_objective_between_tokens_has_no_capacity() -> None:
    assert text_facts(BOTH, Slo.parse(["ttft=5x"]), MIX, limits=LIMITS, role=Role.D).missing == (
        "an objective for TBT",
    )
    assert text_facts(BOTH, Slo.parse(["tbt=5x"]), MIX, limits=LIMITS, role=Role.D).capacity_per_s is not None
    assert text_facts(Profiles(), SLO, MIX, limits=LIMITS, role=Role.D).missing == ("profile of the language model",)


@pytest.mark.parametrize(
    ("role", "alone", "per_token", "wait_s"),
    [(Role.EP, Role.P, 40_000 / 55_000, 4 * 0.02), (Role.ED, Role.D, 40_000 / 3_000, 4 * (0.04 + 12e-4))],
)
def test_one_that_encodes_beside_one_stage_divides_its_device(
    role: Role, alone: Role, per_token: float, wait_s: float
) -> None:
    found = hybrid_facts(BOTH, SLO, MIX, encoder=ENCODER_LIMITS, text=LIMITS, role=role)
    items, text = (
        encoder_facts(BOTH, SLO, MIX, limits=ENCODER_LIMITS),
        text_facts(BOTH, SLO, MIX, limits=LIMITS, role=alone),
    )
    assert found.capacity_per_s is not None
    assert items.capacity_per_s is not None
    assert text.capacity_per_s is not None
    busy = found.capacity_per_s / text.capacity_per_s + per_token * found.capacity_per_s / items.capacity_per_s
    assert busy == pytest.approx(1)
    assert found.wait_objective_s == pytest.approx(wait_s)
