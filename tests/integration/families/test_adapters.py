"""An encoder holds encoder and projector and no more, for every family: checked in bytes of parameters."""

import pytest
import torch
import transformers as untyped_transformers

from tests.integration.families.harness import Case
from tests.unit.engine.tiny import parameter_nbytes
from triptych.domain.embedding import DType
from triptych.domain.stage import ModelPart
from triptych.engine.checkpoint import open_checkpoint
from triptych.engine.weight_loading import load_part

pytestmark = pytest.mark.timeout(180)


def test_encoder_and_text_engine_together_load_each_parameter_once(case: Case) -> None:
    checkpoint = open_checkpoint(case.directory)
    cpu = torch.device("cpu")
    parts = {part: load_part(checkpoint, part, dtype=DType.F32, device=cpu) for part in ModelPart}
    names = {part: {name for name, _ in model.named_parameters()} for part, model in parts.items()}
    assert not names[ModelPart.ENCODER] & names[ModelPart.DECODER]
    encoder, text = (parameter_nbytes(parts[part]) for part in (ModelPart.ENCODER, ModelPart.DECODER))
    assert encoder > 0
    assert not any(
        part in name for name in names[ModelPart.ENCODER] for part in ("language_model.", "lm_head.", "text_model.")
    )
    cls = getattr(untyped_transformers, checkpoint.architecture)
    whole = cls.from_pretrained(case.directory, dtype=torch.float32)
    assert encoder + text == parameter_nbytes(whole)
