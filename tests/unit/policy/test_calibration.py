"""Efficiencies are found again from profiles that were made with them, also from disturbed ones."""

from dataclasses import replace
from random import Random

import pytest

from tests.unit.policy.test_roofline import BF16, CATALOGUE, DECODER, ENCODER, ONE, ORIGINS, TARGET
from triptych.domain.device import Efficiency
from triptych.domain.profile import Profile
from triptych.policy.calibration import CannotCalibrate, calibrate, decoder_samples, encoder_samples
from triptych.policy.roofline import Target, decoder_profile, encoder_profile

TRUE = replace(ONE.efficiency, compute=0.3, attention=0.15, bandwidth=0.55, pass_s=0.004, sequence_s=0.0002)
START = TARGET.reaching(replace(ONE.efficiency, sequence_s=0.00005))


def measured(seed: int | None = None, disturbed: float = 0.0) -> Profile:
    """A profile of a device with other efficiencies, with errors of 5 % and some rows that took three times as long."""
    profile = decoder_profile(DECODER, Target(replace(ONE, efficiency=TRUE), BF16), CATALOGUE.host, ORIGINS)
    rng = Random(seed)

    def noisy(seconds: float) -> float:
        return seconds * rng.gauss(1, 0.05) * (3 if rng.random() < disturbed else 1) if seed is not None else seconds

    return replace(
        profile,
        prefill=tuple(row._replace(seconds=noisy(row.seconds)) for row in profile.prefill[::3]),
        decode=tuple(row._replace(seconds=noisy(row.seconds)) for row in profile.decode[::3]),
    )


def shares(efficiency: Efficiency) -> list[float]:
    return [efficiency.compute, efficiency.bandwidth, efficiency.pass_s, efficiency.sequence_s]


def test_efficiencies_are_found_from_exact_rows() -> None:
    found = calibrate(decoder_samples(measured(), DECODER, START), START, "a test")
    assert shares(found.efficiency) == pytest.approx(shares(TRUE), rel=0.05)
    assert found.efficiency.source == "a test"
    assert {row.table for row in found.fitted} == {"prefill", "decode"}
    assert all(row.worst < 0.05 for row in (*found.fitted, *found.held_out))


def test_disturbed_rows_hardly_change_what_is_found() -> None:
    found = calibrate(decoder_samples(measured(seed=1, disturbed=0.1), DECODER, START), START, "a test")
    assert shares(found.efficiency) == pytest.approx(shares(TRUE), rel=0.25)
    assert all(row.median < 0.08 for row in found.held_out)
    assert any(row.worst > 0.5 for row in found.fitted)


def test_what_no_row_says_stays() -> None:
    """An encoder reads no keys and values, and with many items its weights do not matter."""
    target = Target(replace(ONE, efficiency=replace(TRUE, bandwidth=0.8)), BF16)
    profile = encoder_profile(ENCODER, target, CATALOGUE.host, ORIGINS)
    found = calibrate(encoder_samples(profile, ENCODER, START), START, "a test").efficiency
    assert found.compute == pytest.approx(0.3, rel=0.05)
    assert found.bandwidth == pytest.approx(START.device.efficiency.bandwidth, rel=0.2)
    assert found.encode_layer_s == START.device.efficiency.encode_layer_s == 0


def test_rows_of_other_items_are_left_out_and_too_few_are_refused() -> None:
    profile = encoder_profile(ENCODER, TARGET, CATALOGUE.host, ORIGINS)
    other = replace(ENCODER, items=tuple(replace(item, tokens=item.tokens + 1) for item in ENCODER.items))
    assert not encoder_samples(profile, other, START)
    with pytest.raises(CannotCalibrate, match="0 of the measured rows are comparable, 4 are needed"):
        calibrate((), START, "a test")
