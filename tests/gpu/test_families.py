"""Each family on CUDA: its parity tests, with encoder and decoder on the device and ``generate`` on the CPU, and half precision.

In bfloat16 rounding decides between tokens that are about as likely, so an answer is compared with what the same engine finds likely in
float32: that engine equals ``generate``.
"""

from collections.abc import Iterator
from dataclasses import replace
from math import inf

import pytest
import torch

from tests.integration.families.conftest import TINIES
from tests.integration.families.harness import Case, Encode, encoder_process, finish
from tests.integration.families.test_parity import (  # noqa: F401 - collected here as well, with this module's fixtures
    ANSWER_TOKENS,
    MIXED,
    test_a_full_batch_of_mixed_requests_that_arrive_one_by_one,
    test_answers_equal_generate,
    test_answers_go_on_from_every_position,
    test_cached_prefixes_do_not_change_answers,
    test_drawn_choices_go_on_in_another_engine,
    test_each_modality_alone_and_all_together,
    test_keys_and_values_go_from_engine_to_engine,
    test_mixed_requests_are_prefilled_in_one_engine_and_decoded_in_another,
    test_preempted_sequences_give_the_same_answers,
    test_prefill_chunks_may_split_an_item,
)
from triptych.domain.continuation import ContinuedChoice
from triptych.domain.engine import EngineOutput, EngineRequest
from triptych.engine.decoder.text_engine import TransformersTextEngine
from triptych.engine.tensors import domain_dtype, from_bytes, to_bytes

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="NO CUDA DEVICE: families are not tested on CUDA here"),
]
MARGIN = 1e-4
"""For references: seeds are chosen for the newest transformers, and others draw other weights."""
CLOSE = 0.7
"""How much less likely than the best a token may be that bfloat16 chooses, as a difference of log-probabilities."""


@pytest.fixture(scope="module")
def encode() -> Iterator[Encode]:
    with encoder_process("cuda") as encode:
        yield encode


@pytest.fixture(scope="module", params=TINIES)
def case(request: pytest.FixtureRequest, encode: Encode, tmp_path_factory: pytest.TempPathFactory) -> Case:
    tiny = TINIES[request.param]
    directory = tmp_path_factory.mktemp(tiny.name)
    tiny.make(directory)
    return Case(tiny, directory, encode, device="cuda", margin=MARGIN)


def test_bfloat16_chooses_likely_tokens(case: Case) -> None:
    """Sequences come one by one, so that graphs of several sizes are replayed."""
    requests = {
        f"r{seed}": case.request(f"r{seed}", case.question(seed, items), ANSWER_TOKENS)
        for seed, items in enumerate(MIXED[:5])
    }
    engine = case.engine(dtype="bfloat16")
    outputs: list[EngineOutput] = []
    for request in requests.values():
        engine.add(in_dtype(request, torch.bfloat16))
        outputs += engine.step()
    answers = finish(engine, outputs)
    reference = case.engine()
    for name, request in requests.items():
        rounded = in_dtype(in_dtype(request, torch.bfloat16), torch.float32)
        assert less_likely(reference, rounded, answers[name]) < CLOSE


def in_dtype(request: EngineRequest, dtype: torch.dtype) -> EngineRequest:
    """With embeddings in ``dtype``."""
    embeddings = []
    for embedding in request.embeddings:
        tensors = {}
        for name, tensor in embedding.tensors.items():
            value = from_bytes(tensor, torch.device("cpu"))
            value = value.to(dtype) if value.is_floating_point() else value
            spec = replace(tensor.spec, dtype=domain_dtype(value.dtype))
            tensors[name] = to_bytes(spec, value)
        embeddings.append(replace(embedding, tensors=tensors))
    return replace(request, embeddings=tuple(embeddings))


def less_likely(engine: TransformersTextEngine, request: EngineRequest, answer: list[int]) -> float:
    """By how much its least likely token is, beside the likeliest after the same tokens: a difference of log-probabilities."""
    for position in range(len(answer)):
        sampling = replace(request.sampling, logprobs=20, max_tokens=position + 1)
        begun = (ContinuedChoice(0, tuple(answer[:position])),)
        engine.add(replace(request, request_id=str(position), sampling=sampling, continued=begun))
    worst = 0.0
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            (scores,) = output.scores
            likely = {token.token_id: token.logprob for token in scores.top}
            worst = max(worst, scores.top[0].logprob - likely.get(answer[int(output.request_id)], -inf))
    return worst
