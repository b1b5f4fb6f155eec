"""What an instance says of its engine: the bounds of its steps, and what its profile is found by."""

from collections.abc import Iterator

import pytest

from tests.contract.text_engine_kit import MAX_EMBEDDING_BYTES, VLLM_ARGS, assert_idle, checkpoint, greedy, request
from tests.e2e.reference import Question
from triptych.demo import MODEL_ID
from triptych.domain.profile import ProfileIdentity
from triptych.domain.stage import ModelPart
from triptych.engine.compute import ComputeOptions
from triptych.engine.part_identity import part_identity
from triptych.integrations.vllm.engine import VllmTextEngine

pytestmark = pytest.mark.timeout(300)

SEQUENCES = 3
REQUESTS = 5
COMPUTE = ComputeOptions()


@pytest.fixture(scope="module")
def engine() -> Iterator[VllmTextEngine]:
    arguments = f"{VLLM_ARGS} --max-num-seqs 8 --max-num-active-seqs {SEQUENCES} --max-num-batched-tokens 512 --seed 3"
    made = VllmTextEngine(
        checkpoint(), arguments, model_id=MODEL_ID, max_embedding_bytes=MAX_EMBEDDING_BYTES, compute=COMPUTE
    )
    yield made
    made.close()


def test_it_runs_as_many_sequences_as_it_says(engine: VllmTextEngine) -> None:
    assert engine.max_sequences == SEQUENCES
    names = [f"r{number}" for number in range(REQUESTS)]
    for name in names:
        engine.add(request(name, Question("Hello!"), greedy(8, ignore_eos=True)))
    for _ in range(3):
        engine.step()
    assert len(engine.waiting) == REQUESTS - SEQUENCES
    for name in names:
        engine.cancel(name)
    assert_idle(engine)


def test_a_step_has_as_many_tokens_as_it_says(engine: VllmTextEngine) -> None:
    assert engine.token_budget == 512


def test_its_identity_is_neither_that_of_another_engine_nor_of_other_arguments(engine: VllmTextEngine) -> None:
    identity = engine.identity
    own = part_identity(checkpoint(), ModelPart.DECODER, COMPUTE)
    assert identity.key != own.key
    assert without_vllm(identity) == without_vllm(own)
    assert identity.software == f"{own.software} vllm/0.32.0"
    assert identity.options["vllm"] == (
        "--block-size=32 --enforce-eager=True --kv-cache-memory-bytes=67108864 "
        f"--max-num-active-seqs={SEQUENCES} --max-num-batched-tokens=512 --max-num-seqs=8"
    )


def without_vllm(identity: ProfileIdentity) -> tuple[object, ...]:
    options = {name: value for name, value in identity.options.items() if name != "vllm"}
    return identity.part, identity.digest, identity.hardware, identity.dtype, identity.tensor_parallel, options
