"""Preempted sequences that go on from copies of their keys and values, and such copies between engines."""

import random
from pathlib import Path

import pytest

from tests.unit.engine.kv_transfer import access, transfer_kv
from tests.unit.engine.tiny import (
    Reference,
    engine_request,
    greedy,
    random_question,
    run,
    text_engine,
)
from triptych.domain.engine import EngineOutput, EngineRequest
from triptych.domain.queue_position import QueuePosition
from triptych.domain.sampling import SamplingParams
from triptych.engine.decoder.kv_mover import KvMover
from triptych.engine.decoder.setup import KvOptions
from triptych.engine.decoder.text_engine import TransformersTextEngine
from triptych.engine.encoder import TransformersEncoderEngine

SLOT_NBYTES = 2 * 3 * 2 * 16 * 4
LAYOUTS = [KvOptions(size, contiguous=contiguous) for size in (16, 48, 256) for contiguous in (True, False)]


def name_of(kv: KvOptions) -> str:
    return f"{kv.block_tokens}-{'contiguous' if kv.contiguous else 'scattered'}"


class Alternating:
    """A ``TokenGrammar``: even and odd tokens take turns."""

    def __init__(self, *, even: bool = True) -> None:
        self.even = even

    def fork(self) -> "Alternating":
        return Alternating(even=self.even)

    def allowed(self) -> bytes:
        return b"\x00" + (b"\x55" if self.even else b"\xaa") * 31

    def accept(self, token_id: int) -> None:
        assert token_id % 2 == (not self.even)
        self.even = not self.even


def long_requests() -> list[EngineRequest]:
    """Two that begin alike, and two that go before what was preempted of them; all grow over a boundary of blocks of each size."""
    first, *others = ([*random.Random(seed).choices(range(8, 120), k=250)] for seed in range(4))
    sampling = SamplingParams(temperature=1.2, seed=5, max_tokens=48, ignore_eos=True, frequency_penalty=0.3)
    return [
        EngineRequest("seeded", tuple(first), (), sampling),
        EngineRequest("grammar", (*first[:50], *others[0][50:]), (), sampling, grammar=Alternating()),
        EngineRequest(
            "greedy", tuple(others[1]), (), greedy(48, ignore_eos=True), queue_position=QueuePosition(-1, 0.0, 2)
        ),
        EngineRequest(
            "again", tuple(others[2]), (), greedy(48, ignore_eos=True), queue_position=QueuePosition(-1, 0.0, 3)
        ),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kv", LAYOUTS, ids=name_of)
def test_answers_do_not_depend_on_preemption_or_block_size(model_dir: Path, kv: KvOptions) -> None:
    assert kv.block_tokens is not None
    roomy = text_engine(model_dir)
    for request in long_requests():
        roomy.add(request)
    expected = run(roomy)
    blocks = 2 * -(-251 // kv.block_tokens) + 1
    engine = text_engine(model_dir, kv=kv, kv_cache_bytes=blocks * kv.block_tokens * SLOT_NBYTES)
    outputs: list[EngineOutput] = []
    for request in long_requests():
        engine.add(request)
        outputs += engine.step()
    while not engine.preemptions:
        outputs += engine.step()
    assert engine.kv_copies.held_bytes
    while engine.has_work:
        outputs += engine.step()
    assert run(engine, outputs) == expected
    told = {output.request_id: output.preemptions for output in outputs}
    assert sum(told.values()) == engine.preemptions
    copies = engine.kv_copies
    assert copies.out == engine.preemptions
    assert copies.back, "the prefix cache has not kept everything"
    assert copies.back_tokens * SLOT_NBYTES == copies.back_bytes <= copies.out_bytes
    assert copies.held_bytes == 0
    assert not roomy.preemptions


@pytest.mark.slow
@pytest.mark.parametrize("harm", [False, True])
def test_keys_and_values_go_from_engine_to_engine(
    model_dir: Path, reference: Reference, encoder: TransformersEncoderEngine, *, harm: bool
) -> None:
    """Three tokens in each layout, from prompts with images, without computing anything twice."""
    question = random_question(random.Random(2), 2)
    request = engine_request("one", question, reference, encoder, greedy(24, ignore_eos=True))
    source = text_engine(model_dir, kv=LAYOUTS[-1])
    source.add(request)
    answer: list[int] = []
    while not answer:
        answer += [token for output in source.step() for token in output.token_ids]
    for number, kv in enumerate(LAYOUTS):
        target = text_engine(model_dir, kv=kv)
        target.add(EngineRequest("other", tuple(range(8, 30)), (), greedy(200)))
        target.step()
        transfer_kv(source, request, target, {0: answer}, harm=harm and number == 0)
        assert access(target).computed("one", 0) == len(request.token_ids) + len(answer) - 1, (
            "nothing is left to compute"
        )
        for _ in range(3):
            (token,) = [token for output in target.step() if output.request_id == "one" for token in output.token_ids]
            answer.append(token)
        source = target
    source.cancel("other")
    answer += run(source)["one"]
    assert (answer == reference.answer(question, 24, ignore_eos=True)) != harm


def test_nothing_is_left_of_sequences_that_end_while_they_are_out(model_dir: Path) -> None:
    rng = random.Random(3)
    engine = text_engine(model_dir, kv=KvOptions(4), kv_cache_bytes=110 * SLOT_NBYTES, max_sequences=8)
    held = 0
    for number in range(60):
        sampling = SamplingParams(temperature=1, seed=number, max_tokens=20, ignore_eos=True, n=rng.choice((1, 1, 3)))
        prompt = tuple(rng.choices(range(8, 120), k=rng.randrange(4, 16)))
        engine.add(EngineRequest(str(number), prompt, (), sampling))
        for _ in range(rng.randrange(4)):
            assert all(output.error is None for output in engine.step())
            engine._batch.validate()
            held += engine.kv_copies.held_bytes
        if len(engine.waiting) > 3:
            for request_id in sorted(engine.waiting)[: rng.randrange(1, 3)]:
                engine.cancel(request_id, rng.choice((None, 0, 1)))
                engine._batch.validate()
    run_out(engine)
    assert held
    assert engine.kv_copies.held_bytes == 0
    assert 0 < engine.kv_copies.back < engine.kv_copies.out, "some ended while they were out"
    assert engine.kv_free_tokens == engine.kv_tokens


def run_out(engine: TransformersTextEngine) -> None:
    while engine.has_work:
        assert all(output.error is None for output in engine.step())


def test_the_host_memory_is_as_large_as_the_kv_cache_unless_told(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert text_engine(model_dir, kv_cache_bytes=1 << 20).kv_copies.capacity_bytes == 1 << 20
    assert text_engine(model_dir, preempted_kv_bytes=4096).kv_copies.capacity_bytes == 4096
    assert text_engine(model_dir, preempted_kv_bytes=0).kv_copies.capacity_bytes == 0
    monkeypatch.setattr(KvMover, "round_trip_s", lambda self, positions: 60.0)
    assert text_engine(model_dir).kv_copies.capacity_bytes == 0, "copies would take longer than computing"
