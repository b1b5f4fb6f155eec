"""Architectures from ``config.json`` against the parameters and the counted operations of tiny models of every family."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.integration.families.harness import TinyFamily, all_tiny_families, transformers
from tests.unit.engine.tiny import text_engine
from triptych.domain.embedding import DType
from triptych.domain.stage import ModelPart
from triptych.engine.checkpoint import Checkpoint, open_checkpoint
from triptych.engine.families.registry import adapters_of
from triptych.engine.media.item import LocalDecoding
from triptych.engine.weight_loading import HEADS, LANGUAGE_MODELS, load_part
from triptych.families.architecture import Architecture
from triptych.families.base import as_in_request
from triptych.families.model_files import ModelFiles

pytestmark = pytest.mark.timeout(180)

TINIES = all_tiny_families()
CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=TINIES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[TinyFamily, Checkpoint]:
    tiny = TINIES[request.param]
    directory = tmp_path_factory.mktemp(tiny.name)
    tiny.make(directory)
    return tiny, open_checkpoint(directory)


def parameters_of(model: torch.nn.Module) -> int:
    """Parameters; tied ones count once."""
    return sum({parameter.data_ptr(): parameter.numel() for parameter in model.parameters()}.values())


@torch.inference_mode()
def counted(run: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return int(counter.get_total_flops())


def test_an_encoder_has_these_parameters_and_operations(made: tuple[TinyFamily, Checkpoint]) -> None:
    tiny, checkpoint = made
    architecture = Architecture.load(checkpoint.files)
    model = load_part(checkpoint, ModelPart.ENCODER, dtype=DType.F32, device=CPU)
    model.set_attn_implementation("eager")  # its products are counted
    adapter = adapters_of(checkpoint).encoder(model, checkpoint)
    rng = random.Random(1)
    for modality, _ in [*tiny.targets, *tiny.targets]:
        item = tiny.item(rng, modality)
        (info,) = as_in_request(checkpoint.family, [item.info])
        features = adapter.prepare(LocalDecoding().item(item.media, info, None))
        encoder = architecture.encoder([info], DType.F32)
        (cost,) = encoder.items
        assert cost.work.flops == counted(lambda: adapter.encode([features]))  # noqa: B023  # called at once
        assert cost.nbytes == sum(spec.nbytes for spec in checkpoint.family.outputs(info, DType.F32))
        assert encoder.parameters == parameters_of(model)


def test_a_decoder_has_these_parameters_operations_and_kv_bytes(made: tuple[TinyFamily, Checkpoint]) -> None:
    _, checkpoint = made
    decoder = Architecture.load(checkpoint.files).decoder
    engine = text_engine(checkpoint)
    assert decoder.parameters * DType.F32.itemsize == engine.weights_nbytes
    assert engine.kv is not None
    kind = engine.kv.kind
    assert decoder.kv_token_nbytes(DType.F32) == kind.position_nbytes
    cls = getattr(transformers, checkpoint.architecture)
    whole = cls.from_pretrained(checkpoint.directory, dtype=torch.float32, attn_implementation="eager").eval()
    language = next(getattr(whole.model, name) for name in LANGUAGE_MODELS if hasattr(whole.model, name))
    head = next(getattr(whole, name) for name in HEADS if hasattr(whole, name))
    for tokens in (1, 13):
        token_ids = torch.full((1, tokens), 100)
        run = lambda: head(language(input_ids=token_ids, use_cache=False)[0][:, -1:])  # noqa: B023, E731
        masked = sum(layers.work(0, tokens**2 - layers.pairs(tokens)).flops for layers in decoder.layers)
        assert decoder.prefill(tokens).flops + masked == counted(run)


@pytest.mark.parametrize(
    ("name", "argument"), [("mllama", "cross_attention_states"), ("whisper", "encoder_hidden_states")]
)
def test_cross_attention_adds_its_layers_to_prompts_with_items(tmp_path: Path, name: str, argument: str) -> None:
    TINIES[name].make(tmp_path)
    decoder = Architecture.load(ModelFiles.load(tmp_path)).decoder
    assert decoder.cross is not None
    cls = getattr(transformers, f"{name.capitalize()}ForConditionalGeneration")
    whole = cls.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    token_ids, states = torch.full((1, 7), 100), torch.zeros(1, 12, decoder.hidden_size)
    language = next(getattr(whole.model, part) for part in LANGUAGE_MODELS if hasattr(whole.model, part))
    without, added = (
        counted(lambda: language(input_ids=token_ids, use_cache=False, **more))  # noqa: B023  # called at once
        for more in ({}, {argument: states})
    )
    assert decoder.cross.work(7, 12, new_states=12).flops == added - without


def test_a_family_is_the_same_from_its_configuration_alone(made: tuple[TinyFamily, Checkpoint]) -> None:
    """Where the processor is the usual one for the encoder; the others of the tiny families have own sizes."""
    _, checkpoint = made
    whole = Architecture.load(checkpoint.files)
    alone = Architecture.load(ModelFiles.of_config(checkpoint.directory / "config.json"))
    assert alone.decoder == whole.decoder
    assert alone.encoder([], DType.F32) == replace(whole.encoder([], DType.F32), items=())
    assert type(alone.family) is type(whole.family)
