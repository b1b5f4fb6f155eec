"""Costs: predictions with warnings, and inverses that agree with them."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.policy.profiles import DECODER, DECODER_IDENTITY, ENCODER, ENCODER_IDENTITY, MEASURED
from triptych.domain.embedding import DType
from triptych.domain.profile import ErrorRow, LoadRow, Origin, Profile
from triptych.domain.stage import ModelPart, Stage
from triptych.policy.costs import Costs, CostWarning, Estimate, costs_for, disturbances

ENCODE, TEXT = Costs(ENCODER), Costs(DECODER)


def test_each_stage_is_predicted_from_its_table() -> None:
    assert ENCODE.encode_s(300, 3).value == pytest.approx(0.02 + 1e-4 * 900)
    assert ENCODE.prepare_s(nbytes=150_000, pixels=500_000).value == pytest.approx(5e-4 + 1.5e-3)
    assert ENCODE.transfer_s("shm", 3 << 20).value == pytest.approx(0.003)
    assert ENCODE.start_s().value == 5.0
    assert TEXT.prefill_s(1000, 512).value == pytest.approx(0.01 + 0.1 + 0.00512)
    assert TEXT.decode_s(12, 2000).value == pytest.approx(0.01 + 0.012 + 0.024)


def test_within_the_measured_range_there_is_no_warning() -> None:
    for estimate in (ENCODE.encode_s(300, 3), ENCODE.transfer_s("shm", 3 << 20), TEXT.decode_s(12, 2000)):
        assert estimate.warnings == frozenset()


def test_outside_the_range_there_is_a_value_with_a_warning() -> None:
    estimate = TEXT.decode_s(64, 100)
    assert estimate.value > TEXT.decode_s(32, 100).value
    assert estimate.warnings == {CostWarning.OUTSIDE_RANGE}
    assert ENCODE.encode_s(5000).warnings == {CostWarning.OUTSIDE_RANGE}
    assert ENCODE.transfer_s("shm", 1 << 30).warnings == {CostWarning.OUTSIDE_RANGE}


def test_what_was_not_measured_costs_nothing_and_says_so() -> None:
    for estimate in (
        ENCODE.decode_s(1, 1),
        ENCODE.transfer_s("tcp", 1),
        Costs(replace(ENCODER, transfer=())).prefill_s(1),
    ):
        assert estimate == Estimate(0.0, frozenset({CostWarning.NOT_MEASURED}))
    assert ENCODE.decode_steps_s(1, 1, 3) == [0.0] * 3
    unknown = replace(ENCODER, measured=replace(MEASURED, start_s=0.0))
    assert Costs(unknown).start_s().warnings == {CostWarning.NOT_MEASURED}


@pytest.mark.parametrize(
    ("profile", "warning"),
    [
        (replace(ENCODER, measured=replace(MEASURED, drift=-0.11)), CostWarning.DRIFTED),
        (replace(ENCODER, measured=replace(MEASURED, origin=Origin.SYNTHETIC)), CostWarning.SYNTHETIC),
        (replace(ENCODER, errors=(ErrorRow("encode", 3, 0.16, 0.2),)), CostWarning.INACCURATE),
    ],
)
def test_a_profile_with_a_fault_warns_with_every_estimate(profile: Profile, warning: CostWarning) -> None:
    assert Costs(profile).encode_s(300, 3).warnings == {warning}


@given(tokens=st.floats(1, 5000), items=st.floats(1, 64), more_tokens=st.floats(0, 5000), more_items=st.floats(0, 64))
def test_more_items_or_tokens_never_cost_less(
    tokens: float, items: float, more_tokens: float, more_items: float
) -> None:
    less = ENCODE.encode_s(tokens, items).value
    assert ENCODE.encode_s(tokens + more_tokens, items + more_items).value >= less * (1 - 1e-9)
    assert TEXT.prefill_s(tokens + more_tokens, items + more_items).value >= TEXT.prefill_s(tokens, items).value * (
        1 - 1e-9
    )


def level(tokens_per_s: float, p99_s: float, max_batch: int = 4) -> LoadRow:
    return LoadRow(Stage.ENCODE, max_batch, 196, 0, tokens_per_s, p99_s / 3, p99_s / 2, p99_s, p99_s / 3, p99_s**2)


def test_the_measured_load_is_interpolated_between_levels() -> None:
    costs = Costs(replace(ENCODER, load=(level(200, 0.3), level(100, 0.1), level(50, 0.05, max_batch=1))))
    assert costs.measured_load(Stage.ENCODE, 0.2, max_batch=8).value == pytest.approx(150)
    assert costs.measured_load(Stage.ENCODE, 9.0, max_batch=8).value == 200
    assert costs.measured_load(Stage.ENCODE, 0.2, max_batch=1).value == 50
    missed = costs.measured_load(Stage.ENCODE, 0.01, max_batch=8)
    assert missed == Estimate(100, frozenset({CostWarning.OUTSIDE_RANGE}))
    assert costs.measured_load(Stage.DECODE, 1.0, max_batch=8).warnings == {CostWarning.NOT_MEASURED}


def named(profile: Profile, at: str, **changes: object) -> Profile:
    return replace(
        profile,
        identity=replace(profile.identity, **changes),  # type: ignore[arg-type]
        measured=replace(profile.measured, at=at),
    )


def test_the_profile_that_fits_best_is_used_and_differences_are_warnings() -> None:
    other_hardware = named(ENCODER, "2026-12-01", hardware="cpu b")
    other_software = named(ENCODER, "2026-11-01", software="old")
    old, new = named(ENCODER, "2026-11-02"), named(ENCODER, "2026-11-03")
    synthetic = replace(new, measured=replace(new.measured, origin=Origin.SYNTHETIC))

    def chosen(*profiles: Profile) -> tuple[Profile, set[CostWarning]]:
        costs = costs_for(profiles, ENCODER_IDENTITY)
        assert costs is not None
        return costs.profile, set(costs.warnings)

    assert chosen(other_hardware, other_software, old, new, synthetic) == (new, set())
    assert chosen(other_hardware, other_software) == (other_software, {CostWarning.OTHER_SOFTWARE})
    assert chosen(other_hardware, synthetic) == (other_hardware, {CostWarning.OTHER_HARDWARE})
    assert chosen(synthetic) == (synthetic, {CostWarning.SYNTHETIC})


def test_a_profile_of_the_same_engine_fits_better_than_a_newer_one_of_another() -> None:
    by_vllm, by_own = named(ENCODER, "2026-11-02", options={"vllm": ""}), named(ENCODER, "2026-11-03")
    found = costs_for([by_vllm, by_own], replace(ENCODER_IDENTITY, options={"vllm": "--block-size=32"}))
    assert found is not None
    assert found.profile == by_vllm
    assert found.warnings == {CostWarning.OTHER_OPTIONS}


def test_a_profile_with_the_same_arguments_of_vllm_fits_better_than_a_newer_one_with_others() -> None:
    eager, other = {"vllm": "--enforce-eager=True"}, {"vllm": "--quantization=fp8"}
    same = named(ENCODER, "2026-11-02", options=eager, software="old")
    found = costs_for([same, named(ENCODER, "2026-11-03", options=other)], replace(ENCODER_IDENTITY, options=eager))
    assert found is not None
    assert found.profile == same
    assert found.warnings == {CostWarning.OTHER_SOFTWARE}


def test_another_part_dtype_or_degree_never_stands_in() -> None:
    others = (
        named(ENCODER, "", digest="cd" * 32),
        named(ENCODER, "", dtype=DType.BF16),
        named(ENCODER, "", tensor_parallel=2),
        named(ENCODER, "", part=ModelPart.DECODER),
        DECODER,
    )
    assert costs_for(others, ENCODER_IDENTITY) is None
    assert costs_for([], DECODER_IDENTITY) is None


def test_a_disturbed_measurement_shows() -> None:
    assert disturbances(ENCODER) == ()
    drifted = replace(ENCODER, measured=replace(MEASURED, drift=-0.2))
    assert disturbances(drifted) == ("the same work took 20% less time later",)
    rows = (ErrorRow("encode", 1, 0.4, 0.9), ErrorRow("prepare", 2, 0.6, 0.7))
    assert disturbances(replace(ENCODER, errors=rows)) == ("a row of table prepare is 60% from what the others say",)


@given(
    st.integers(0, 64),
    st.integers(1, 9000),
    st.lists(st.tuples(st.integers(2, 3000), st.integers(0, 2000)), max_size=3),
)
def test_a_step_costs_at_least_its_dearest_part_and_at_most_all_of_them(
    decodes: int, context: int, prompts: list[tuple[float, float]]
) -> None:
    parts = [TEXT.decode_s(decodes, context).value] if decodes else []
    parts += [TEXT.prefill_s(new, cached).value for new, cached in prompts]
    step_s = TEXT.step_s(decodes, context, prompts).value
    assert max(parts, default=0.0) <= step_s + 1e-12
    assert step_s <= sum(parts) + 1e-12


def test_a_step_is_one_pass_over_all_rows_with_what_each_adds_to_it() -> None:
    """Of 10 ms and 0.1 ms a row; cached tokens, and decodes beyond what the least context or as many rows of a prompt take."""
    rows_s = 0.01 + 1e-4 * (8 + 256 + 1000)
    cached_s, decodes_s = 1e-5 * 512, (0.01 + 0.008 + 8e-6 * 1024) - (0.01 + 1e-4 * 16)
    assert TEXT.step_s(8, 1024, [(256, 512), (1000, 0)]).value == pytest.approx(rows_s + cached_s + decodes_s)
    assert TEXT.step_s(8, 1024) == TEXT.decode_s(8, 1024)
    assert TEXT.step_s(0, 0, [(256, 512)]) == TEXT.prefill_s(256, 512)
    assert TEXT.step_s(0, 0) == Estimate(0.0)


def test_one_token_after_cached_ones_costs_as_much_as_a_decode() -> None:
    """An answer goes on after another instance. The first token of a prompt is a prompt, and so are two tokens."""
    assert TEXT.step_s(0, 0, [(1, 512)]) == TEXT.decode_s(1, 512)
    assert TEXT.step_s(3, 1024, [(1, 512), (256, 0)]) == TEXT.step_s(4, 896, [(256, 0)])
    for prompt in ((1, 0), (2, 512)):
        assert TEXT.step_s(0, 0, [prompt]) == TEXT.prefill_s(*prompt)


def test_a_step_has_the_warnings_of_its_parts() -> None:
    assert TEXT.step_s(64, 100, [(256, 0)]).warnings == {CostWarning.OUTSIDE_RANGE}
    assert ENCODE.step_s(1, 1, [(5, 0)]) == Estimate(0.0, frozenset({CostWarning.NOT_MEASURED}))
