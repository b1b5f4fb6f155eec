"""Sharded items: any split gives the rows of the whole item, and answers equal ``generate``.

Shards are encoded by separate engines, in batches with other shards, as by encoders in several processes.
"""

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from tests.integration.families.conftest import usual_families
from tests.integration.families.harness import Case, Item, Question, finish, items_of
from tests.unit.engine.tiny import encoder_engine
from triptych.domain.embedding import DType, Tensor
from triptych.domain.engine import EmbeddingInput, EngineRequest
from triptych.domain.media import Modality, Shard
from triptych.engine.encoder import TransformersEncoderEngine
from triptych.families.base import Shardable, as_in_request, count_tokens, shard_outputs, units_of
from triptych.policy.sharding import shards_of, tokens_of
from triptych.transport.merging import merge

pytestmark = pytest.mark.timeout(180)

ANSWER_TOKENS = 8
AUDIO_RATE_HZ = 16_000
MOST_UNITS = 12
DIVIDE = {
    "idefics3",
    "internvl",
    "llava_next",
    "llava_onevision",
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen3_vl",
    "smolvlm",
    "voxtral",
}


@pytest.fixture(scope="module")
def engine(case: Case) -> TransformersEncoderEngine:
    return encoder_engine(case.directory)


def divisible(case: Case) -> list[Item]:
    """Items of several units, including the family's first items."""
    family = case.builder.family
    if not isinstance(family, Shardable):
        assert case.tiny.model_type not in DIVIDE
        pytest.skip("items of this family cannot be cut")
    found: list[Item] = []
    for seed in range(20):
        for modality, _ in case.tiny.targets:
            item = case.tiny.item(random.Random(seed), modality)
            if 2 <= len(units_of(family, item.info)) <= MOST_UNITS:
                found.append(item)
        if len(found) >= 2:
            break
    return found[:2]


def encode(engine: TransformersEncoderEngine, item: Item, shards: Sequence[Shard]) -> list[tuple[Tensor, ...]]:
    return engine.encode([engine.prepare(item.media, item.info, shard) for shard in shards])


def rows(tensors: Sequence[Tensor]) -> list[np.ndarray[tuple[int, ...], np.dtype[np.generic]]]:
    types = {DType.F32: np.float32, DType.I32: np.int32}
    return [np.frombuffer(tensor.data, types[tensor.spec.dtype]).reshape(tensor.spec.shape) for tensor in tensors]


def cuts(units: Sequence[int], seed: int) -> list[tuple[Shard, ...]]:
    """Even splits, every unit alone, and one random split."""
    place = random.Random(seed).randrange(1, len(units))
    anywhere = (Shard(0, place, len(units)), Shard(place, len(units) - place, len(units)))
    return [anywhere, *(shards_of(units, number) for number in {2, 3, len(units)} if number <= len(units))]


@usual_families
def test_any_split_equals_the_whole_item(case: Case, engine: TransformersEncoderEngine) -> None:
    items = divisible(case)
    assert items, "no item has several units"
    for seed, item in enumerate(items):
        whole = rows(engine.encode([engine.prepare(item.media, item.info)])[0])
        units = units_of(case.builder.family, item.info)
        assert sum(units) == count_tokens(case.builder.family, item.info)
        for shards in cuts(units, seed):
            encoded = encode(engine, item, shards)
            for shard, tensors in zip(shards, encoded, strict=True):
                tokens, specs = shard_outputs(case.builder.family, item.info, engine.model.dtype, shard)
                assert tokens == tokens_of(units, shard)
                assert tuple(tensor.spec for tensor in tensors) == specs
            for expected, *parts in zip(whole, *map(rows, encoded), strict=True):
                joined = np.concatenate(parts)
                assert joined.shape == expected.shape
                np.testing.assert_allclose(joined, expected, rtol=1e-4, atol=1e-4)


def test_memory_of_an_item_is_computed_before_decoding(case: Case, engine: TransformersEncoderEngine) -> None:
    for item in divisible(case):
        info = item.info
        stored = 4 * (info.samples_at(AUDIO_RATE_HZ) if info.samples else info.pixels)
        for shard in (None, *cuts(units_of(case.builder.family, info), 0)[0]):
            counted = engine.decoded_nbytes(info, shard)
            if info.modality is Modality.VIDEO:
                assert counted == stored + engine.prepare(item.media, info, shard).features["pixel_values"].nbytes
            else:
                assert counted == stored


def test_audio_counts_with_its_samples_after_resampling(case: Case, engine: TransformersEncoderEngine) -> None:
    for info in (item.info for item in divisible(case) if item.info.modality is Modality.AUDIO):
        slow = replace(info, sample_rate_hz=1000)
        assert engine.decoded_nbytes(slow) == 4 * info.samples * AUDIO_RATE_HZ // 1000


def sharded(case: Case, engine: TransformersEncoderEngine, question: Question) -> tuple[EngineRequest, int]:
    """A request as a text instance builds it when every divisible item was sharded, and the number of shards."""
    request = case.request("one", question, ANSWER_TOKENS)
    inputs: list[EmbeddingInput] = []
    continues: list[bool] = []
    for item, whole in zip(items_of(question), request.embeddings, strict=True):
        units = units_of(case.builder.family, item.info)
        shards = shards_of(units, 3)
        start = whole.start
        for number, (shard, tensors) in enumerate(zip(shards, encode(engine, item, shards), strict=True)):
            named = {tensor.spec.name: tensor for tensor in tensors}
            inputs.append(EmbeddingInput(start, tokens_of(units, shard), named, item.key + bytes([number])))
            continues.append(number > 0)
            start += 1  # only the start of an item counts
    return replace(request, embeddings=merge(inputs, continues)), len(inputs)


@usual_families
def test_answers_with_sharded_items_equal_generate(case: Case, engine: TransformersEncoderEngine) -> None:
    items = divisible(case)
    question: Question = ("a!", items[0], "bc!", items[-1], "d!")
    infos = tuple(item.info for item in items)
    if infos[0].modality is not Modality.IMAGE or as_in_request(case.builder.family, infos) != infos:
        question = ("a!", items[0], "d!")
    request, shards = sharded(case, engine, question)
    assert shards > len(items_of(question)) == len(request.embeddings)
    text = case.engine()
    text.add(request)
    assert finish(text)["one"] == case.answer(question, ANSWER_TOKENS)
