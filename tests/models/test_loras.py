"""LoRA adapters of models whose parts are not where other models have theirs."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers
from torch import nn

from tests.integration.families.harness import Case, encode_here, finish, renamed
from tests.models.conftest import made
from tests.models.test_parity import ANSWER_TOKENS, clear_question
from tests.unit.engine.loras import make_lora, merge
from triptych.errors import InvalidRequest

pytestmark = pytest.mark.timeout(180)

PREFIX = "base_model.model.model."


def whole_of(directory: Path) -> Any:
    config = transformers.AutoConfig.from_pretrained(directory)
    return getattr(transformers, config.architectures[0]).from_pretrained(directory)


def test_an_adapter_of_the_layers_of_a_model_without_a_language_model_apart_is_applied(tmp_path: Path) -> None:
    """Phi-4-multimodal is published with such adapters for images and for speech."""
    case = made("phi4_multimodal", tmp_path / "model")
    whole = whole_of(case.directory)
    targets = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
    lora = make_lora(
        tmp_path / "lora", nn.Module(), seed=1, targets=targets, encoders={f"{PREFIX}layers.": whole.model.layers}
    )
    merge(whole, lora)
    shutil.copytree(case.directory, tmp_path / "merged")
    whole.save_pretrained(tmp_path / "merged")
    merged = Case(case.tiny, tmp_path / "merged", encode_here)
    question = clear_question(merged, 1, 1)
    engine = case.engine()
    files = engine.loras.read(lora)
    engine.loras.add(files)
    request = case.request("plain", question, ANSWER_TOKENS)
    engine.add(request)
    engine.add(replace(renamed(request, "adapted"), lora=files.digest))
    answers = finish(engine)
    assert answers["adapted"] == merged.answer(question, ANSWER_TOKENS)
    assert answers["adapted"] != answers["plain"]


def test_an_adapter_of_a_projector_that_embeds_tokens_too_is_refused(tmp_path: Path) -> None:
    case = made("gemma3n", tmp_path / "model")
    projector = whole_of(case.directory).model.embed_vision
    lora = make_lora(
        tmp_path / "lora",
        nn.Module(),
        seed=1,
        targets=("embedding_projection",),
        encoders={f"{PREFIX}embed_vision.": projector},
    )
    with pytest.raises(InvalidRequest, match=r"part that only encodes: .*embed_vision"):
        case.engine().loras.read(lora)
