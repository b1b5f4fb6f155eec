"""vLLM's encoder beside Triptych's own: the same embeddings of the same items, without a language model."""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.auto import image_processing_auto

from tests.contract.text_engine_kit import checkpoint
from tests.integration.families.harness import Item, items_of
from tests.vllm.models import KINDS, MODELS, TINIES, ServedModel, video
from triptych.demo import MODEL_ID
from triptych.domain.embedding import DType, Tensor
from triptych.domain.media import Modality, Shard
from triptych.engine.checkpoint import Checkpoint, open_checkpoint
from triptych.engine.compute import ComputeOptions
from triptych.engine.encoder import AdapterEncoderEngine, TransformersEncoderEngine
from triptych.engine.families.here import process_here
from triptych.engine.media.item import LocalItem
from triptych.engine.tensors import from_bytes
from triptych.errors import Cancelled, InvalidMedia
from triptych.families.base import units_of
from triptych.families.model_files import BadModel
from triptych.integrations.vllm.encoder import VllmEncoderEngine
from triptych.integrations.vllm.families import NOT_ENCODED, encoder_adapter
from triptych.integrations.vllm.item_encoder import ItemEncoder, tensors_of
from triptych.policy.sharding import shards_of
from triptych.runtime.process import CannotStart

pytestmark = pytest.mark.timeout(300)

CLOSE = 1e-4
"""Absolute for ``MODELS``; of an embedding's largest value for the others."""
ENCODED: Mapping[str, ServedModel] = {**MODELS, **{name: TINIES[name] for name in TINIES if name not in NOT_ENCODED}}
DTYPES = {DType.F32: np.float32, DType.I32: np.int32}
SEEDS = 6
LANGUAGE = ("language_model", "lm_head", "embed_tokens")
LOADED = {("idefics3", "lm_head"), ("smolvlm", "lm_head")}
"""Parts that vLLM loads all the same."""


@dataclass
class Pair:
    """A pair of engines with one model."""

    name: str
    checkpoint: Checkpoint
    own: TransformersEncoderEngine
    vllm: VllmEncoderEngine

    def assert_equal(self, items: Sequence[Item], shards: Sequence[Shard | None] = (None,)) -> None:
        """The items' embeddings, all in one batch."""
        found, expected = (self._encoded(engine, items, shards) for engine in (self.vllm, self.own))
        for encoded, other in zip(found, expected, strict=True):
            assert [tensor.spec for tensor in encoded] == [tensor.spec for tensor in other]
            for values, reference in zip(map(_values, encoded), map(_values, other), strict=True):
                largest = 1.0 if self.name in MODELS else max(1.0, float(np.abs(reference).max()))
                np.testing.assert_allclose(values, reference, rtol=CLOSE, atol=CLOSE * largest)

    @staticmethod
    def _encoded(
        engine: AdapterEncoderEngine, items: Sequence[Item], shards: Sequence[Shard | None]
    ) -> list[tuple[Tensor, ...]]:
        return engine.encode([engine.prepare(item.media, item.info, shard) for item in items for shard in shards])


class Unwanted(LocalItem):
    stopped = True


def item_encoder(pair: Pair) -> ItemEncoder:
    if not isinstance(pair.vllm._adapter, ItemEncoder):
        pytest.skip("Triptych prepares this model's items")
    return pair.vllm._adapter


def _values(tensor: Tensor) -> np.ndarray[Any, np.dtype[Any]]:
    return np.frombuffer(tensor.data, DTYPES[tensor.spec.dtype]).reshape(tensor.spec.shape)


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name == "demo" else pytest.mark.extended) for name in ENCODED],
)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    model = ENCODED[request.param]
    opened = open_checkpoint(model.make(tmp_path_factory.mktemp(model.name)), process_here)
    own = TransformersEncoderEngine(opened, model_id="m", compute=ComputeOptions())
    with pytest.MonkeyPatch.context() as patch:
        # Images are resized by Pillow, as in Triptych's own engine. Pixels of torchvision differ a little.
        patch.setattr(image_processing_auto, "is_torchvision_available", lambda: False)
        engine = VllmEncoderEngine(opened, "", model_id="m", compute=ComputeOptions())
        yield Pair(model.name, opened, own, engine)
    engine.close()


def test_no_language_model_is_loaded(pair: Pair) -> None:
    (model,) = pair.vllm._executor.collective_rpc("get_model")
    names = [name for name, _ in model.named_parameters()]
    assert names
    unused = [part for part in LANGUAGE if (pair.name, part) not in LOADED]
    assert not [name for name in names if any(part in name for part in unused)]
    assert not [name for name, parameter in model.named_parameters() if parameter.is_meta]


def test_embeddings_equal_those_of_triptychs_own_engine(pair: Pair) -> None:
    for seed in range(SEEDS):
        pair.assert_equal(items_of(ENCODED[pair.name].question(KINDS["mixed"], seed)))


def test_a_large_batch_is_one_pass(pair: Pair) -> None:
    """Of far more tokens than vLLM's scheduler would take at once."""
    questions = [ENCODED[pair.name].question(KINDS["mixed"], seed) for seed in range(16)]
    pair.assert_equal([item for question in questions for item in items_of(question)])


def test_videos_whole_and_in_shards_equal_those_of_triptychs_own_engine(pair: Pair) -> None:
    family = pair.checkpoint.family
    if Modality.VIDEO not in family.replacement_targets or isinstance(pair.vllm._adapter, ItemEncoder):
        pytest.skip("Triptych prepares no videos of this model for vLLM")
    for seed in range(SEEDS):
        clip = video(random.Random(seed))
        pair.assert_equal([clip, *items_of(ENCODED[pair.name].question(KINDS["one"], seed)), clip])
        units = units_of(family, clip.info)
        for parts in {2, len(units)}:
            pair.assert_equal([clip], shards_of(units, parts))


def test_shards_of_images_have_their_rows(pair: Pair) -> None:
    """The whole image is encoded for each."""
    (image, *_) = items_of(ENCODED[pair.name].question(KINDS["mixed"], 0))
    units = units_of(pair.checkpoint.family, image.info)
    if len(units) == 1:
        pytest.skip("this model cuts no images")
    pair.assert_equal([image], shards_of(units, 2))


def test_passes_of_shards_encode_no_more_rows_than_they_keep(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = item_encoder(pair)
    (image, *_) = items_of(ENCODED[pair.name].question(KINDS["mixed"], 0))
    units = units_of(pair.checkpoint.family, image.info)
    if len(units) == 1:
        pytest.skip("this model cuts no images")
    encode, rows = adapter._model.embed_multimodal, []

    def counted(**arguments: Any) -> Any:
        embedded = encode(**arguments)
        rows.append(sum(map(len, embedded)))
        return embedded

    monkeypatch.setattr(adapter._model, "embed_multimodal", counted)
    pair.assert_equal([image], shards_of(units, 2))
    assert rows == [sum(units)] * 2
    rows.clear()
    pair.assert_equal([image, image])
    assert rows == [2 * sum(units)], "whole items are one pass"


def test_an_item_that_vllms_processor_refuses_is_invalid(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = item_encoder(pair)
    (item, *_) = items_of(ENCODED[pair.name].question(KINDS["one"], 0))

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("an odd size")

    monkeypatch.setattr(adapter._processor.info, "parse_mm_data", refuse)
    with pytest.raises(InvalidMedia, match="cannot be processed"):
        pair.vllm.prepare(item.media, item.info)


def test_an_item_that_nobody_waits_for_is_not_prepared(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = item_encoder(pair)
    (item, *_) = items_of(ENCODED[pair.name].question(KINDS["one"], 0))
    monkeypatch.setattr(adapter, "_processor", None)
    with pytest.raises(Cancelled):
        adapter.prepare(Unwanted(item.media, item.info))


def test_videos_that_vllm_samples_otherwise_are_refused_with_the_reason(pair: Pair) -> None:
    adapter = item_encoder(pair)
    clip = video(random.Random(0))
    with pytest.raises(InvalidMedia, match="which samples other frames"):
        adapter.prepare(LocalItem(clip.media, clip.info))


def test_cores_that_prepare_are_those_of_the_processor(pair: Pair) -> None:
    assert pair.vllm.prepare_cores == (1 if isinstance(pair.vllm._adapter, ItemEncoder) else None)


def test_tensors_in_lists_are_part_of_an_item() -> None:
    first, second, third = (torch.full((1,), float(number)) for number in range(3))
    found = tensors_of({"pixels": [first, (second,)], "grid": third, "count": 2})
    assert found == {"pixels.0": first, "pixels.1.0": second, "grid": third}


def test_preparation_is_that_of_triptychs_own_engine(pair: Pair) -> None:
    if isinstance(pair.vllm._adapter, ItemEncoder):
        pytest.skip("vLLM's own processor prepares this model's items")
    assert pair.vllm.processor_digest == pair.own.processor_digest
    assert pair.vllm.model == pair.own.model


def test_an_embedding_of_one_engine_is_never_taken_for_the_others(pair: Pair) -> None:
    assert pair.vllm.version != pair.own.version
    assert "vllm/0.32.0" in pair.vllm.version
    assert " torchvision/" in pair.vllm.version
    assert pair.vllm.version.endswith("device/cpu")
    assert "vllm/0.32.0" in pair.vllm.identity.software


def test_arguments_that_change_embeddings_are_part_of_the_version() -> None:
    engine = VllmEncoderEngine(
        checkpoint(), "--mm-encoder-attn-backend TORCH_SDPA", model_id=MODEL_ID, compute=ComputeOptions()
    )
    try:
        assert " mm_encoder_attn_backend/TORCH_SDPA " in engine.version
    finally:
        engine.close()


def test_bfloat16_rounds_as_it_does_in_triptychs_own_engine() -> None:
    exact = TransformersEncoderEngine(checkpoint(), model_id=MODEL_ID, compute=ComputeOptions())
    engine = VllmEncoderEngine(checkpoint(), "", model_id=MODEL_ID, compute=ComputeOptions(dtype="bfloat16"))
    try:
        (image,) = items_of(MODELS["demo"].question(KINDS["one"], 0))
        ((reference,),) = exact.encode([exact.prepare(image.media, image.info)])
        ((tensor,),) = engine.encode([engine.prepare(image.media, image.info)])
    finally:
        engine.close()
    assert tensor.spec == replace(reference.spec, dtype=DType.BF16)
    found, expected = (from_bytes(data, torch.device("cpu")).float() for data in (tensor, reference))
    assert float((found - expected).abs().max()) < 0.02 * float(expected.abs().max())


def test_a_model_that_vllm_cannot_load_is_one_line_at_start() -> None:
    with pytest.raises(CannotStart, match=r"^engine vllm: \S.*$"):
        VllmEncoderEngine(checkpoint(), "--quantization awq", model_id=MODEL_ID, compute=ComputeOptions())


@pytest.mark.parametrize(
    ("model_type", "architecture", "reason"),
    [
        ("llava_onevision", "LlavaOnevisionForConditionalGeneration", "encoded without tiles"),
        ("voxtral", "VoxtralForConditionalGeneration", "Mistral's own files"),
        ("mllama", "MllamaForConditionalGeneration", "has no model MllamaForConditionalGeneration"),
    ],
)
def test_models_without_parity_are_refused_by_name(model_type: str, architecture: str, reason: str) -> None:
    family: Any = SimpleNamespace(model_type=model_type)
    with pytest.raises(BadModel, match=f"model_type '{model_type}': .*{reason}"):
        encoder_adapter(family, architecture)
