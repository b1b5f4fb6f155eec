"""Capacity of a replica: within the objectives, and no further than they allow."""

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.policy.profiles import DECODER, ENCODER
from triptych.domain.profile import DecodeRow, EncodeRow, LoadRow, PrefillRow, dump_profile, parse_profile
from triptych.domain.stage import Role, Stage
from triptych.policy.capacity import (
    Capacity,
    ItemClass,
    Load,
    RequestClass,
    TextLimits,
    encode_capacity,
    text_capacity,
)
from triptych.policy.costs import Costs, CostWarning

ENCODE, TEXT = Costs(ENCODER), Costs(DECODER)
LIMITS = TextLimits(max_sequences=32, token_budget=2048)
MIX = [RequestClass(prompt_tokens=512, output_tokens=65)]


def text(ttft_s: float, tbt_s: float, mix: list[RequestClass] = MIX, limits: TextLimits = LIMITS) -> Capacity:
    return text_capacity(TEXT, mix, ttft_slo_s=ttft_s, tbt_slo_s=tbt_s, limits=limits)


def test_an_encoder_with_a_lax_objective_reaches_the_throughput_of_its_best_batch() -> None:
    found = encode_capacity(ENCODE, [ItemClass(200)], 60.0, max_items=8)
    peak = 8 / (0.02 + 8 * 0.02)
    assert 0.97 * peak < found.per_s < peak
    assert found.batch == 8
    assert found.tokens_per_s == pytest.approx(200 * found.per_s)
    assert found.latency_s <= 60.0


def test_a_tight_objective_leaves_small_batches_and_low_utilization() -> None:
    found = encode_capacity(ENCODE, [ItemClass(200)], 5 * 0.04, max_items=8)
    lax = encode_capacity(ENCODE, [ItemClass(200)], 60.0, max_items=8)
    assert 0 < found.per_s < 0.7 * lax.per_s
    assert found.batch < 8


def test_an_objective_below_one_item_alone_cannot_be_met() -> None:
    found = encode_capacity(ENCODE, [ItemClass(200)], 0.039, max_items=8)
    assert (found.per_s, found.tokens_per_s) == (0, 0)
    assert found.latency_s == pytest.approx(0.04)


def test_preparation_on_few_cores_bounds_an_encoder() -> None:
    item = ItemClass(100, nbytes=10_000_000, pixels=10_000_000)  # 0.11 s on a core, 0.03 s in the encoder
    one_core, four_cores = (encode_capacity(ENCODE, [item], 60.0, max_items=1, prepare_cores=n) for n in (1, 4))
    assert one_core.per_s == pytest.approx(1 / 0.11, rel=0.05)
    assert four_cores.per_s == pytest.approx(1 / 0.03, rel=0.05)
    assert one_core.warnings == {CostWarning.OUTSIDE_RANGE}


def test_bursts_lower_the_capacity() -> None:
    even, poisson, bursts = (
        encode_capacity(ENCODE, [ItemClass(200)], 0.3, max_items=1, load=Load(burstiness=cv2)).per_s
        for cv2 in (0.0, 1.0, 4.0)
    )
    assert even > poisson > bursts > 0


def test_items_of_different_sizes_queue_longer_than_equal_ones_with_the_same_mean() -> None:
    equal, different = (
        encode_capacity(ENCODE, [ItemClass(tokens) for tokens in sizes], 5.0, max_items=1).per_s
        for sizes in ((1050, 1050), (100, 2000))
    )
    assert 0 < different < 0.98 * equal


@given(
    slo_s=st.floats(0.001, 5),
    more_s=st.floats(0, 5),
    tokens=st.lists(st.integers(50, 500), min_size=1, max_size=3),
    max_items=st.integers(1, 40),
    more_items=st.integers(0, 40),
)
def test_an_encoder_bears_more_with_a_laxer_objective_or_larger_batches(
    slo_s: float, more_s: float, tokens: list[int], max_items: int, more_items: int
) -> None:
    mix = [ItemClass(count) for count in tokens]
    found = encode_capacity(ENCODE, mix, slo_s, max_items=max_items)
    laxer = encode_capacity(ENCODE, mix, slo_s + more_s, max_items=max_items)
    larger = encode_capacity(ENCODE, mix, slo_s, max_items=max_items + more_items)
    assert found.per_s <= laxer.per_s * (1 + 1e-6)
    assert found.per_s <= larger.per_s * (1 + 1e-6)
    assert found.latency_s <= slo_s or found.per_s == 0
    assert found.batch <= max_items


TIMES = st.sampled_from((1e-18, 1e-9, 1.0, 1e9, 1e18)) | st.floats(1e-18, 1e18)


@given(times=st.tuples(*[TIMES] * 6), slo_s=TIMES)
def test_whatever_a_profile_that_can_be_read_says_there_is_a_capacity(times: tuple[float, ...], slo_s: float) -> None:
    small, large, batch, short, long, step = times
    encoder = replace(ENCODER, encode=(EncodeRow(1, 1, small), EncodeRow(2**50, 1, large), EncodeRow(9, 8, batch)))
    decoder = replace(
        DECODER, prefill=(PrefillRow(1, 0, short), PrefillRow(2**50, 7, long)), decode=(DecodeRow(1, 1, step),)
    )
    encode, generate = (Costs(parse_profile(dump_profile(profile))) for profile in (encoder, decoder))
    items = encode_capacity(encode, [ItemClass(50), ItemClass(2**40)], slo_s, max_items=8)
    prompts = text_capacity(generate, MIX, ttft_slo_s=slo_s, tbt_slo_s=slo_s, limits=LIMITS)
    assert items.per_s >= 0
    assert prompts.per_s >= 0
    assert items.latency_s > 0
    assert prompts.latency_s > 0


def test_a_text_instance_without_answers_is_a_queue_of_prompts() -> None:
    found = text(60.0, 1.0, [RequestClass(prompt_tokens=512, output_tokens=1)])
    assert found.per_s == pytest.approx(1 / (0.01 + 0.0512), rel=0.02)
    assert found.tokens_per_s == pytest.approx(512 * found.per_s)
    assert (found.gap_s, found.batch) == (0.0, 1)


def test_the_gap_between_tokens_bounds_a_text_instance_with_long_answers() -> None:
    answers = [RequestClass(prompt_tokens=64, output_tokens=1025)]
    found = text(60.0, 0.03, answers)
    assert found.gap_s == pytest.approx(0.03, rel=1e-3)
    # Little: as many run as arrive during one answer
    assert found.per_s * 1024 * found.gap_s == pytest.approx(found.batch, abs=1)
    assert text(60.0, 0.06, answers).per_s > found.per_s


def test_objectives_of_a_text_instance_that_cannot_be_met() -> None:
    for found in (text(0.05, 1.0), text(9.0, 0.010)):
        assert found.per_s == 0
        assert 0.06 < found.latency_s < inf
    assert text(9.0, 0.010).gap_s > 0.010


def test_cached_prompts_and_short_ones_cost_less() -> None:
    plain = text(1.0, 0.1)
    cached = text(1.0, 0.1, [RequestClass(prompt_tokens=512, output_tokens=65, cached_tokens=448)])
    mixed = text(1.0, 0.1, [*MIX, RequestClass(prompt_tokens=2048, output_tokens=65)])
    assert mixed.per_s < plain.per_s < cached.per_s


def test_kv_memory_bounds_the_batch() -> None:
    tight = text(9.0, 1.0, limits=replace(LIMITS, kv_tokens=2 * 560))
    assert tight.batch <= 2
    assert 0 < tight.per_s < text(9.0, 1.0).per_s
    assert text(9.0, 1.0, limits=replace(LIMITS, kv_tokens=100)).per_s == 0


@given(
    ttft_s=st.floats(0.01, 5),
    tbt_s=st.floats(0.005, 0.5),
    prompt=st.integers(1, 4000),
    output=st.integers(1, 2000),
    factor=st.floats(1, 4),
)
def test_a_text_instance_bears_more_with_laxer_objectives(
    ttft_s: float, tbt_s: float, prompt: int, output: int, factor: float
) -> None:
    mix = [RequestClass(prompt, output)]
    found = text(ttft_s, tbt_s, mix)
    assert found.per_s <= text(factor * ttft_s, tbt_s, mix).per_s * (1 + 1e-6)
    assert found.per_s <= text(ttft_s, factor * tbt_s, mix).per_s * (1 + 1e-6)
    assert found.per_s == 0 or (found.latency_s <= ttft_s and found.gap_s <= tbt_s)
    assert found.batch <= LIMITS.max_sequences


def test_measured_load_levels_lower_the_capacity_of_every_mix_in_proportion() -> None:
    alone = encode_capacity(ENCODE, [ItemClass(200)], 0.3, max_items=4)
    other = encode_capacity(ENCODE, [ItemClass(400)], 0.3, max_items=4)
    levels = tuple(
        LoadRow(Stage.ENCODE, 4, 200, 0, share * alone.tokens_per_s, 0.1, 0.1, p99_s, 0.1, 0.01)
        for share, p99_s in ((0.25, 0.1), (0.5, 0.3), (1.0, 9.0))
    )
    costs = Costs(replace(ENCODER, load=levels))
    lowered = encode_capacity(costs, [ItemClass(200)], 0.3, max_items=4)
    assert lowered.tokens_per_s == pytest.approx(0.5 * alone.tokens_per_s)
    assert lowered.busy_per_s == pytest.approx(0.5 * alone.busy_per_s)
    assert encode_capacity(costs, [ItemClass(400)], 0.3, max_items=4).per_s == pytest.approx(0.5 * other.per_s)


def test_measured_levels_above_the_model_do_not_raise_it() -> None:
    levels = (LoadRow(Stage.DECODE, 32, 512, 65, 1e9, 0.01, 0.01, 0.01, 0.01, 0.0001),)
    costs = Costs(replace(DECODER, load=levels))
    measured = text_capacity(costs, MIX, ttft_slo_s=1.0, tbt_slo_s=0.1, limits=LIMITS)
    assert measured == text(1.0, 0.1)


def test_an_empty_mix_and_missing_tables_are_errors() -> None:
    with pytest.raises(ValueError, match="the mix is empty"):
        encode_capacity(ENCODE, [], 1.0, max_items=1)
    with pytest.raises(ValueError, match="lacks its tables"):
        encode_capacity(TEXT, [ItemClass(1)], 1.0, max_items=1)
    with pytest.raises(ValueError, match="max_items is 0"):
        encode_capacity(ENCODE, [ItemClass(1)], 1.0, max_items=0)


# --- prefill and decode apart ---------------------------------------------------------------------------------------------


def apart(role: Role, tbt_s: float, mix: list[RequestClass] = MIX, limits: TextLimits = LIMITS) -> Capacity:
    return text_capacity(TEXT, mix, ttft_slo_s=60.0, tbt_slo_s=tbt_s, limits=limits, role=role)


def test_one_that_only_prefills_is_as_one_whose_answers_end_at_once() -> None:
    short = [RequestClass(prompt_tokens=512, output_tokens=1)]
    assert apart(Role.P, 1e-9) == text(60.0, 1e-9, short)
    assert apart(Role.P, 1e-9).per_s > text(60.0, 60.0).per_s


def test_one_that_only_decodes_bears_as_many_answers_as_its_batch_holds() -> None:
    found = apart(Role.D, 60.0)
    step_s = TEXT.decode_s(32, 512 + 33).value
    assert found.per_s == pytest.approx(32 / (64 * step_s), rel=0.03)
    assert found.tokens_per_s == pytest.approx(65 * found.per_s), "in tokens of answers"
    assert found.per_s > text(60.0, 60.0).per_s
    assert (found.batch, found.latency_s) == (32, 0.0)
    cramped = apart(Role.D, 60.0, limits=TextLimits(max_sequences=32, token_budget=2048, kv_tokens=4 * 600))
    assert cramped.batch == 4
    assert cramped.per_s < found.per_s


def test_a_tight_time_between_tokens_bounds_the_sequences_that_run() -> None:
    alone_s = TEXT.decode_s(1, 512).value
    tight, lax = apart(Role.D, 1.2 * alone_s), apart(Role.D, 60.0)
    assert 0 < tight.per_s < lax.per_s
    assert tight.batch < lax.batch
    assert tight.gap_s <= 1.2 * alone_s
    assert apart(Role.D, 0.5 * alone_s).per_s == 0


@given(st.integers(1, 4000), st.integers(2, 500), st.floats(0.001, 1.0))
def test_apart_each_bears_at_least_what_one_instance_with_both_stages_bears(
    prompt: int, output: int, tbt_s: float
) -> None:
    mix = [RequestClass(prompt, output)]
    both = text(60.0, tbt_s, mix)
    for role in (Role.P, Role.D):
        assert apart(role, tbt_s, mix).per_s >= both.per_s * (1 - 1e-6)


def test_measured_load_levels_lower_the_stage_that_they_are_of() -> None:
    row = LoadRow(Stage.DECODE, 32, 512, 65, 10.0, 0.001, 0.002, 1.0, 0.001, 1e-6)
    costs = Costs(replace(DECODER, load=(row,)))
    for role, lowered in ((Role.P, False), (Role.D, True)):
        bounded, free = (
            text_capacity(stage_costs, MIX, ttft_slo_s=60.0, tbt_slo_s=60.0, limits=LIMITS, role=role)
            for stage_costs in (costs, TEXT)
        )
        assert (bounded.per_s < free.per_s) is lowered


def test_where_one_only_decodes_answers_of_one_token_there_is_no_capacity_to_speak_of() -> None:
    with pytest.raises(ValueError, match="nothing in this mix costs time"):
        apart(Role.D, 60.0, [RequestClass(prompt_tokens=512, output_tokens=1)])
