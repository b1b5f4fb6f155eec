"""Each family with attention by products, of any number of rows: the same embeddings, and the same answers as ``generate``."""

from unittest import mock

import numpy as np
import pytest

from tests.integration.families.conftest import usual_families
from tests.integration.families.harness import Case, finish, items_of
from tests.unit.engine.tiny import encoder_engine
from triptych.engine import encoder_attention, product_attention
from triptych.engine.decoder import attention

pytestmark = pytest.mark.timeout(180)

WITH_MASKS = {"mllama", "qwen2_audio"}
"""Encoders whose attention has a mask or is their own, which remains torch's."""
WITHOUT_PACKING = {"convolutions"}
"""Decoders that have caches of their own."""
ANSWER_TOKENS = 12


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_attention, "is_faster", lambda *_, **__: True)
    monkeypatch.setattr(encoder_attention, "is_faster", lambda *_, **__: True)
    for module in (attention, encoder_attention):
        monkeypatch.setattr(module, "is_worth_it", lambda *_: True)


@usual_families
def test_embeddings_are_the_same(case: Case) -> None:
    items = items_of(case.question(1, 3))
    with mock.patch.object(encoder_attention, "product_attention", wraps=product_attention.product_attention) as used:
        engine = encoder_engine(case.directory)
        found = engine.encode([engine.prepare(item.media, item.info) for item in items])
    assert bool(used.call_count) is (case.tiny.name.partition("-")[0] not in WITH_MASKS)
    for tensors, (_, expected) in zip(found, case.encode(case.directory, items), strict=True):
        for tensor, (spec, data) in zip(tensors, expected, strict=True):
            assert tensor.spec == spec
            made, wanted = (np.frombuffer(memory, np.float32) for memory in (tensor.data, data))
            assert np.allclose(made, wanted, rtol=0.0, atol=1e-4 * float(np.abs(wanted).max(initial=0.0)))


@usual_families
def test_answers_equal_generate(case: Case) -> None:
    """Of requests side by side, in chunks that split items."""
    questions = {f"r{seed}": case.question(seed, seed % 3) for seed in range(4)}
    with mock.patch.object(attention, "product_attention", wraps=product_attention.product_attention) as used:
        engine = case.engine(max_sequences=3, token_budget=3 + 3 * case.tiny.chunk_tokens, enforce_eager=True)
        for name, question in questions.items():
            engine.add(case.request(name, question, ANSWER_TOKENS))
        assert finish(engine) == {name: case.answer(question, ANSWER_TOKENS) for name, question in questions.items()}
    assert bool(used.call_count) is (case.tiny.name not in WITHOUT_PACKING)
