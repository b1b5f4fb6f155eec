"""An encoder holds tower and projector and no more, for every family: checked in bytes of parameters."""

import pytest
import torch
import transformers as untyped_transformers

from tests.integration.families.harness import Case
from triptych.domain.embedding import DType
from triptych.engine.checkpoint import open_checkpoint
from triptych.engine.split import Half, load_half, parameter_nbytes

pytestmark = pytest.mark.timeout(180)


def test_the_encoder_half_is_what_the_text_half_is_not(case: Case) -> None:
    checkpoint = open_checkpoint(case.directory)
    cpu = torch.device("cpu")
    halves = {half: load_half(checkpoint, half, dtype=DType.F32, device=cpu) for half in Half}
    names = {half: {name for name, _ in model.named_parameters()} for half, model in halves.items()}
    assert not names[Half.ENCODER] & names[Half.TEXT]
    encoder, text = (parameter_nbytes(halves[half]) for half in (Half.ENCODER, Half.TEXT))
    assert encoder > 0
    assert not any(
        part in name for name in names[Half.ENCODER] for part in ("language_model.", "lm_head.", "text_model.")
    )
    cls = getattr(untyped_transformers, checkpoint.architecture)
    whole = cls.from_pretrained(case.directory, dtype=torch.float32)
    assert encoder + text == parameter_nbytes(whole)
