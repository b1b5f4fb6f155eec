"""Specifics of Llama 3.2 Vision; its answers are tested with the other families."""

import gc
import random
from pathlib import Path
from typing import Any

import pytest

from tests.integration.families.harness import Case, Encoded, Item, Question, finish, random_image
from tests.integration.families.tiny_mllama import TinyMllama
from tests.unit.engine.tiny import encoder_engine
from triptych.domain.embedding import DType, TensorSpec
from triptych.domain.engine import EngineRequest
from triptych.domain.sampling import SamplingParams
from triptych.engine.decoder.text_engine import TransformersTextEngine
from triptych.engine.families.mllama import MllamaDecoder
from triptych.errors import InvalidRequest

TOKENS = 10


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    directory = tmp_path_factory.mktemp("mllama")
    tiny = TinyMllama()
    tiny.make(directory)
    encoder = encoder_engine(directory)

    def encode(_: Path, items: Any) -> list[Encoded]:
        prepared = [encoder.prepare(item.media, item.info) for item in items]
        return [
            (features.tokens, tuple((tensor.spec, bytes(tensor.data)) for tensor in tensors))
            for features, tensors in zip(prepared, encoder.encode(prepared), strict=True)
        ]

    return Case(tiny, directory, encode)


def images(*sizes: tuple[int, int]) -> list[Item]:
    rng = random.Random(5)
    return [random_image(rng, *size) for size in sizes]


def decoder_of(engine: TransformersTextEngine) -> MllamaDecoder:
    adapter = engine._adapter
    assert isinstance(adapter, MllamaDecoder)
    return adapter


def answer(engine: TransformersTextEngine, request: EngineRequest) -> list[int]:
    engine.add(request)
    return finish(engine)[request.request_id]


def questions() -> dict[str, Question]:
    a, b, c = images((30, 20), (20, 80), (60, 60))
    return {
        "neighbours are seen together": ("ab ", a, b, "cd", c, " h!"),
        "an image first and nothing behind the last": (a, "gh", b),
        "three in a row at the end": ("fgh", a, b, c),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", questions())
@pytest.mark.parametrize("chunk", [3, 512])
def test_answers_equal_generate_for_any_position_of_images(case: Case, name: str, chunk: int) -> None:
    question = questions()[name]
    engine = case.engine(max_sequences=1, token_budget=chunk)
    assert answer(engine, case.request("one", question, TOKENS)) == case.answer(question, TOKENS)


def test_cross_attention_kv_is_computed_once_and_freed_with_its_request(case: Case) -> None:
    question = questions()["neighbours are seen together"]
    engine = case.engine()
    adapter = decoder_of(engine)
    layer: Any = adapter.decoder.layers[1]  # type: ignore[index]  # torch leaves modules untyped
    computed: list[int] = []
    layer.cross_attn.k_proj.register_forward_hook(lambda *seen: computed.append(seen[1][0].numel()))
    engine.add(case.request("one", question, TOKENS))
    used = []
    while engine.has_work:
        engine.step()
        used.append(adapter._cache.used_nbytes)
    states = 3 * 4 * 5  # images, tiles, states per tile
    assert sum(size > 64 for size in computed) == 1, "more than the one dummy state, once"
    assert max(used) == 2 * 2 * states * 2 * 16 * 4  # keys and values, layers, states, heads, head size, bytes
    gc.collect()
    assert adapter._cache.used_nbytes == 0


@pytest.mark.parametrize("nbytes", [0, 50_000])
def test_cross_attention_kv_above_the_limit_is_recomputed_in_each_step(case: Case, nbytes: int) -> None:
    engine = case.engine()
    adapter = decoder_of(engine)
    adapter.keep_at_most(nbytes)
    asked = questions()
    for name, question in asked.items():
        engine.add(case.request(name, question, TOKENS))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
        assert adapter._cache.used_nbytes <= nbytes
    assert finish(engine, outputs) == {name: case.answer(question, TOKENS) for name, question in asked.items()}


def test_prefixes_are_not_shared_between_prompts_with_different_images(case: Case) -> None:
    """Text before an image attends to it, too."""
    a, b = images((30, 20), (20, 80))
    text = "abcdefgh" * 8
    engine = case.engine()
    for name, question in {"one": (text, a, text), "other": (text, b, text), "none": (text,)}.items():
        assert answer(engine, case.request(name, question, TOKENS)) == case.answer(question, TOKENS)


def test_the_placeholder_has_no_logit(case: Case) -> None:
    """Penalties over the prompt skip it; a caller that names it gets an error."""
    request = case.request("one", questions()["neighbours are seen together"], TOKENS)
    placeholder = next(iter(case.builder.family.placeholder_ids))
    engine = case.engine()
    penalized = SamplingParams(
        temperature=0, max_tokens=TOKENS, seed=0, repetition_penalty=1.2, presence_penalty=0.1, ignore_eos=True
    )
    assert len(answer(engine, EngineRequest("one", request.token_ids, request.embeddings, penalized))) == TOKENS
    biased = SamplingParams(temperature=0, max_tokens=TOKENS, seed=0, logit_bias=((placeholder, 1.0),))
    with pytest.raises(InvalidRequest, match=str(placeholder)):
        engine.add(EngineRequest("two", request.token_ids, request.embeddings, biased))


def test_kv_memory_covers_only_layers_with_token_keys(case: Case) -> None:
    assert case.slot_nbytes == 2 * 3 * 2 * 16 * 4  # keys and values, layers, heads, head size, bytes


def specs(tiles: int, padding: int, *, dtype: DType = DType.F32, states: int = 5, hidden: int = 64) -> list[TensorSpec]:
    return [
        TensorSpec(name, dtype, (count, states, hidden)) for name, count in (("tiles", tiles), ("padding", padding))
    ]


def test_tensors_of_another_shape_are_refused(case: Case) -> None:
    engine = case.engine()
    for tiles in (1, 2, 4):
        assert engine.accepts(1, specs(tiles, 4 - tiles))
    refused: list[tuple[int, list[TensorSpec]]] = [
        (2, specs(1, 3)),
        (1, specs(0, 4)),
        (1, specs(2, 3)),
        (1, specs(1, 3, dtype=DType.F16)),
        (1, specs(1, 3, states=6)),
        (1, specs(1, 3, hidden=32)),
        (1, specs(1, 3)[:1]),
        (1, specs(1, 3)[::-1]),
        (1, []),
        (1, [TensorSpec("tiles", DType.F32, (1, 5)), TensorSpec("padding", DType.F32, (3, 5, 64))]),
    ]
    for tokens, tensors in refused:
        assert not engine.accepts(tokens, tensors), tensors
