import pytest

from tests.integration.families.harness import Case
from tests.unit.engine.tiny import encoder_engine
from triptych.engine.image_budget import measured_image_budget

pytestmark = pytest.mark.timeout(180)


def test_the_vision_encoder_of_every_family_is_measured(case: Case) -> None:
    encoder = encoder_engine(case.directory)
    one, one_s = measured_image_budget(encoder, decode_s=0.001, tpot_slo_s=1e-6, most_items=4)
    assert one.tokens > 0
    assert one.nbytes > 0
    assert one_s > 0.001
    two, _ = measured_image_budget(encoder, decode_s=0.001, tpot_slo_s=1e3, most_items=2)
    assert (two.tokens, two.nbytes) == (2 * one.tokens, 2 * one.nbytes)
