import asyncio
from collections.abc import Callable
from dataclasses import replace
from hashlib import blake2b

import pytest

from triptych.domain.continuation import ContinuedChoice
from triptych.domain.engine import EmbeddingInput, EngineRequest
from triptych.domain.generation import FinishReason
from triptych.domain.kv_segment import KvSegment
from triptych.domain.media import MediaInfo, Modality
from triptych.domain.sampling import SamplingParams
from triptych.errors import ContextTooLong, EngineFailure, InvalidMedia, InvalidRequest
from triptych.testing.fake_kv import Spliced, answer_tokens
from triptych.testing.fakes import (
    BROKEN_MEDIA,
    FakeEncoderEngine,
    FakeTextEngine,
    fake_embedding,
)
from triptych.testing.media import png
from triptych.virtual import virtual_time
from triptych.virtual.offload import ConcurrentUse, InlineOffload

VOCABULARY = range(10, 1000)
PROMPT = tuple(range(20))
SAMPLING = SamplingParams(temperature=0, max_tokens=100)


def info_of(media: bytes) -> MediaInfo:
    return MediaInfo(Modality.IMAGE, "png", 28, 28, len(media), blake2b(media, digest_size=32).digest())


def encoder() -> FakeEncoderEngine:
    return FakeEncoderEngine(tokens_of=lambda info: 4)


def embed(engine: FakeEncoderEngine, start: int, media: bytes) -> EmbeddingInput:
    (tensors,) = engine.encode([engine.prepare(media, info_of(media))])
    return EmbeddingInput(start, 4, {tensor.spec.name: tensor for tensor in tensors})


def drain(engine: FakeTextEngine) -> dict[str, list[int]]:
    answers: dict[str, list[int]] = {}
    while engine.can_step:
        for output in engine.step():
            answers.setdefault(output.request_id, []).extend(output.token_ids)
    return answers


def ask(*items: EmbeddingInput, request_id: str = "r", prompt: tuple[int, ...] = PROMPT) -> EngineRequest:
    return EngineRequest(request_id, prompt, items, SAMPLING)


def test_an_embedding_matches_its_announced_outputs() -> None:
    engine = encoder()
    prepared = engine.prepare(png(28, 28), info_of(png(28, 28)))
    (tensors,) = engine.encode([prepared])
    assert tuple(tensor.spec for tensor in tensors) == prepared.outputs
    assert tensors[0].data.tobytes() == fake_embedding(png(28, 28), 4, engine.model.hidden_size)
    assert engine.encoded_items == 1


def test_undecodable_media_is_invalid() -> None:
    with pytest.raises(InvalidMedia):
        encoder().prepare(png(28, 28) + BROKEN_MEDIA, info_of(png(28, 28)))


def test_the_answer_is_a_function_of_the_media() -> None:
    engine = FakeTextEngine(VOCABULARY)
    engine.add(ask(embed(encoder(), 2, png(28, 28, seed=1)), embed(encoder(), 9, png(28, 28, seed=2))))
    hidden = engine.model.hidden_size
    items = [Spliced(start, 4, fake_embedding(png(28, 28, seed=seed), 4, hidden)) for start, seed in ((2, 1), (9, 2))]
    assert tuple(drain(engine)["r"]) == answer_tokens(PROMPT, items, vocabulary=VOCABULARY)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda a, b: ask(a),
        lambda a, b: ask(replace(a, start=b.start), replace(b, start=a.start)),
        lambda a, b: ask(a, replace(b, tensors=a.tensors)),
        lambda a, b: ask(a, replace(b, start=b.start + 1)),
        lambda a, b: ask(a, b, prompt=(*PROMPT[:-1], 5)),
    ],
    ids=["lost", "swapped", "mixed up", "misplaced", "other prompt"],
)
def test_every_wrong_embedding_changes_the_answer(
    spoil: Callable[[EmbeddingInput, EmbeddingInput], EngineRequest],
) -> None:
    first, second = embed(encoder(), 2, png(28, 28, seed=1)), embed(encoder(), 9, png(28, 28, seed=2))
    right, wrong = FakeTextEngine(VOCABULARY), FakeTextEngine(VOCABULARY)
    right.add(ask(first, second))
    wrong.add(spoil(first, second))
    assert drain(right) != drain(wrong)


def test_sequences_join_and_leave_between_steps() -> None:
    engine = FakeTextEngine(VOCABULARY, max_running=2)
    for number in range(5):
        engine.add(ask(request_id=f"r{number}", prompt=(number,)))
    assert [output.request_id for output in engine.step()] == ["r0", "r1"]
    engine.cancel("r0")
    engine.cancel("nobody")
    assert [output.request_id for output in engine.step()] == ["r1", "r2"]
    assert set(drain(engine)) == {"r1", "r2", "r3", "r4"}
    assert engine.pending_tokens == 0


def test_max_tokens_ends_an_answer() -> None:
    engine = FakeTextEngine(VOCABULARY)
    engine.add(replace(ask(), sampling=SamplingParams(max_tokens=2)))
    outputs = engine.step() + engine.step()
    assert [output.finish_reason for output in outputs] == [None, FinishReason.LENGTH]
    assert not engine.has_work


def test_an_answer_goes_on_beyond_its_end_if_that_is_ignored() -> None:
    sampling = SamplingParams(max_tokens=50, ignore_eos=True)
    right = answer_tokens(PROMPT, (), vocabulary=VOCABULARY, length=50)
    assert right[:4] == answer_tokens(PROMPT, (), vocabulary=VOCABULARY)[:4]
    engine = FakeTextEngine(VOCABULARY)
    engine.add(replace(ask(), sampling=sampling))
    assert tuple(drain(engine)["r"]) == right
    engine.add(replace(ask(), sampling=sampling, continued=(ContinuedChoice(0, right[:20]),)))
    assert tuple(drain(engine)["r"]) == right[20:]
    with pytest.raises(InvalidRequest):
        engine.add(replace(ask(), sampling=sampling, continued=(ContinuedChoice(0, right[1:20]),)))


def test_failures_are_injected() -> None:
    faulty = encoder()
    faulty.failures.append(EngineFailure("on purpose"))
    with pytest.raises(EngineFailure):
        embed(faulty, 0, png(28, 28))
    text = FakeTextEngine(VOCABULARY)
    text.failures.append(EngineFailure("on purpose"))
    text.add(ask(request_id="a"))
    text.add(ask(request_id="b"))
    outputs = text.step()
    assert [(output.request_id, output.error is not None) for output in outputs] == [("a", True), ("b", False)]
    assert set(drain(text)) == {"b"}


def kv_transferred(
    request: EngineRequest, spoil: Callable[[int, bytearray], bytearray | None], *, ends: bool = True
) -> tuple[list[int], int]:
    """The answer of an engine that goes on with segments of another, and the number of tokens that the other gave.

    ``spoil`` gets the index and the contents of each segment; what it returns None for does not come.
    """
    source, target = FakeTextEngine(VOCABULARY, chunk_tokens=7), FakeTextEngine(VOCABULARY)
    source.add(replace(request, pauses=True))
    begun = drain(source)["r"]
    assert source.has_work
    kind, computed = source.kv.kind, source.kv.computed("r", 0)
    assert kind is not None
    assert computed == len(request.token_ids)
    target.add(replace(request, continued=(ContinuedChoice(0, tuple(begun)),), arriving=computed))
    assert target.step() == []
    assert target.kv.awaiting == {("r", 0)}
    for index, first in enumerate(range(0, computed, kind.segment_tokens)):
        segment = KvSegment(kind, first, min(kind.segment_tokens, computed - first))
        memory = bytearray(segment.nbytes)
        assert source.kv.pack("r", 0, segment, memoryview(memory))
        if (came := spoil(index, memory)) is not None:
            target.kv.unpack("r", 0, segment, memoryview(came))
    if ends:
        target.kv.arrived("r")
    return begun + drain(target).get("r", []), len(begun)


def a_request() -> EngineRequest:
    return ask(embed(encoder(), 2, png(28, 28, seed=1)), prompt=tuple(range(40)))


def alone(request: EngineRequest) -> list[int]:
    engine = FakeTextEngine(VOCABULARY)
    engine.add(request)
    return drain(engine)["r"]


def test_an_answer_is_the_same_from_another_engines_keys_and_values() -> None:
    answer, begun = kv_transferred(a_request(), lambda index, memory: memory, ends=False)
    assert answer == alone(a_request())
    assert begun == 1


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_positions_of_a_segment_that_does_not_come_are_computed(lost: int) -> None:
    answer, _ = kv_transferred(a_request(), lambda index, memory: memory if index != lost else None)
    assert answer == alone(a_request())
    answer, begun = kv_transferred(a_request(), lambda index, memory: memory if index != lost else None, ends=False)
    assert len(answer) == begun, "until it is told that no more come"


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize(
    "harm",
    [
        lambda memory: memory[::-1],
        lambda memory: bytearray(len(memory)),
        lambda memory: memory[32:] + memory[:32],
        lambda memory: memory[len(memory) // 2 :] + memory[: len(memory) // 2],
        lambda memory: memory[:-1] + bytes([memory[-1] ^ 1]),
    ],
    ids=["reversed", "zeros", "moved", "keys as values", "one bit"],
)
def test_every_wrong_segment_changes_the_answer(index: int, harm: Callable[[bytearray], bytearray]) -> None:
    answer, _ = kv_transferred(a_request(), lambda at, memory: harm(memory) if at == index else memory)
    assert answer != alone(a_request())


def test_a_preempted_arrival_is_computed_and_a_preempted_paused_answer_stays_out() -> None:
    engine = FakeTextEngine(VOCABULARY)
    engine.add(replace(a_request(), arriving=32))
    engine.step()
    engine.preempt("r")
    assert engine.waiting == {"r"}
    assert drain(engine)["r"] == alone(a_request())
    engine.add(replace(a_request(), pauses=True))
    engine.step()
    engine.preempt("r")
    assert engine.kv.computed("r", 0) == 0
    assert not engine.can_step
    assert engine.has_work


def test_a_prompt_over_the_context_is_refused() -> None:
    engine = FakeTextEngine(VOCABULARY)
    with pytest.raises(ContextTooLong, match="4096"):
        engine.add(ask(prompt=(1,) * 4097))


def test_steps_take_virtual_time_and_concurrent_adds_are_detected() -> None:
    engine = FakeTextEngine(VOCABULARY)

    async def main() -> float:
        offload = InlineOffload()
        await offload.run(engine.add, ask())
        async with asyncio.TaskGroup() as group:
            group.create_task(offload.run(engine.step))
            await asyncio.sleep(0.001)
            with pytest.raises(ConcurrentUse):
                engine.add(ask(request_id="late"))
        return asyncio.get_running_loop().time()

    assert virtual_time.run(main()) == pytest.approx(0.006)
