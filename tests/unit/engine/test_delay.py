"""Engines that sleep take as long as their profile predicts, and keep the engines' contract."""

from dataclasses import replace
from pathlib import Path

import pytest

from triptych.demo import MODEL_DIR
from triptych.domain.continuation import ContinuedChoice
from triptych.domain.engine import EngineRequest
from triptych.domain.generation import FinishReason
from triptych.domain.instance import ModelInfo
from triptych.domain.kv_segment import KvSegment
from triptych.domain.media import MediaInfo, Modality
from triptych.domain.profile import BadProfile
from triptych.domain.queue_position import QueuePosition
from triptych.domain.sampling import SamplingParams
from triptych.domain.stage import ModelPart
from triptych.engine.decoder.options import EngineOptions
from triptych.engine.delay import (
    DelayEncoderEngine,
    DelayTextEngine,
    delay_costs,
    synthetic_decoder_profile,
    synthetic_encoder_profile,
    synthetic_profiles,
)
from triptych.errors import ContextTooLong, InvalidRequest
from triptych.policy.costs import Costs, CostWarning
from triptych.runtime.profiles import write_profile
from triptych.testing.fakes import FAKE_MODEL
from triptych.testing.model import FakeFamily

ENCODER = synthetic_encoder_profile(pass_s=0.5, token_s=0.1, prepare_s=0.25, load_s=7.0)
DECODER = synthetic_decoder_profile(step_s=1.0, sequence_s=0.1, prefill_token_s=0.01, load_s=5.0)
OPTIONS = EngineOptions(max_sequences=4, token_budget=64)
IMAGE = MediaInfo(Modality.IMAGE, "png", 28, 28, 100, bytes(32))


class Slept(list[float]):
    def __call__(self, seconds: float) -> None:
        self.append(round(seconds, 6))


def text_engine(slept: Slept, model: ModelInfo = FAKE_MODEL) -> DelayTextEngine:
    return DelayTextEngine(model, FakeFamily(), Costs(DECODER), OPTIONS, sleep=slept)


def request(name: str, prompt: int, tokens: int, *, n: int = 1, queue_position: int = 0) -> EngineRequest:
    sampling = SamplingParams(temperature=0, max_tokens=tokens, n=n, seed=0)
    return EngineRequest(name, (7,) * prompt, (), sampling, queue_position=QueuePosition(0, 0.0, queue_position))


def test_an_encoder_sleeps_to_load_prepare_and_encode() -> None:
    slept = Slept()
    engine = DelayEncoderEngine(FAKE_MODEL, FakeFamily(), Costs(ENCODER), sleep=slept)
    item = engine.prepare(bytes(100), IMAGE)
    (first,), (second,) = engine.encode([item, item])
    assert slept == [7.0, 0.25, 0.5 + 2 * 4 * 0.1]
    assert first.spec == second.spec == item.outputs[0]
    assert bytes(first.data) == bytes(item.outputs[0].nbytes)


def test_a_prompt_is_prefilled_in_chunks_beside_the_decodes() -> None:
    slept = Slept()
    engine = text_engine(slept)
    engine.add(request("a", prompt=30, tokens=3))
    outputs = engine.step()
    engine.add(request("b", prompt=100, tokens=1))
    assert [output.request_id for output in outputs] == ["a"]
    assert [[output.request_id for output in engine.step()] for _ in range(2)] == [["a"], ["a", "b"]]
    chunks = (1.0 + 0.1 + 0.63, 1.0 + 0.1 + 0.37)  # one pass for both
    assert slept == [5.0, 1.3, *(pytest.approx(chunk) for chunk in chunks)]
    assert not engine.has_work
    assert engine.step() == []
    assert len(slept) == 4


def test_a_prompt_of_many_chunks_is_passed_by_one_that_is_due_earlier() -> None:
    engine = text_engine(slept := Slept())
    engine.add(request("long", prompt=160, tokens=1, queue_position=2))
    engine.step()
    engine.add(request("short", prompt=10, tokens=1, queue_position=1))
    assert [[output.request_id for output in engine.step()] for _ in range(3)] == [["short"], ["long"], []]
    assert slept[2] == pytest.approx(1.0 + 0.1 + 0.54)


def test_answers_are_as_long_as_it_is_told_up_to_their_limits() -> None:
    engine = DelayTextEngine(
        FAKE_MODEL, FakeFamily(), Costs(DECODER), OPTIONS, length=lambda asked: len(asked.token_ids), sleep=Slept()
    )
    engine.add(request("stops", prompt=2, tokens=3))
    engine.add(request("is cut", prompt=9, tokens=3))
    ends = [
        (output.request_id, output.finish_reason) for _ in range(3) for output in engine.step() if output.finish_reason
    ]
    assert ends == [("stops", FinishReason.STOP), ("is cut", FinishReason.LENGTH)]


def test_every_choice_gets_max_tokens_tokens_and_the_last_says_so() -> None:
    engine = text_engine(Slept())
    engine.add(request("a", prompt=3, tokens=2, n=2))
    outputs = [output for _ in range(2) for output in engine.step()]
    assert [(output.choice, output.finish_reason) for output in outputs] == [
        (0, None),
        (1, None),
        (0, FinishReason.LENGTH),
        (1, FinishReason.LENGTH),
    ]
    assert all(len(output.token_ids) == 1 for output in outputs)


def test_an_answer_that_goes_on_prefills_its_tokens_and_sends_the_rest() -> None:
    engine = text_engine(slept := Slept())
    continued = (ContinuedChoice(0, (7,) * 6), ContinuedChoice(2, (7,) * 6))
    engine.add(replace(request("one", 10, 8, n=3), continued=continued))
    assert engine.pending_tokens == 10 + 6 + 2 * 2
    outputs = [output for _ in range(2) for output in engine.step()]
    assert [(output.choice, output.finish_reason) for output in outputs] == [
        (0, None),
        (2, None),
        (0, FinishReason.LENGTH),
        (2, FinishReason.LENGTH),
    ]
    assert slept[1] == pytest.approx(1.0 + 16 * 0.01)
    assert not engine.has_work
    assert engine.kv_free_tokens == engine.kv_tokens


def test_requests_wait_for_a_place_and_start_in_the_order_of_their_queue_positions() -> None:
    engine = text_engine(Slept())
    for number in range(6):
        engine.add(request(str(number), prompt=2, tokens=9, queue_position=-number))
    first = {output.request_id for output in engine.step()}
    assert first == {"5", "4", "3", "2"}
    assert engine.waiting == {"0", "1"}
    ready = [engine.prefill_queue_position is not None]
    engine.cancel("5")
    ready.append(engine.prefill_queue_position is not None)
    assert ready == [False, True]
    assert {output.request_id for output in engine.decode_step()} == {"4", "3", "2"}
    assert {output.request_id for output in engine.step()} == {"4", "3", "2", "1"}
    assert engine.pending_tokens == 3 * 6 + 8 + (2 + 9)


def test_one_choice_may_be_cancelled() -> None:
    engine = text_engine(Slept())
    engine.add(request("a", prompt=3, tokens=2, n=2))
    engine.cancel("a", 0)
    assert [output.choice for output in engine.step()] == [1]
    engine.cancel("a", 1)
    assert not engine.has_work
    assert engine.kv_free_tokens == engine.kv_tokens


def test_keys_and_values_take_the_time_of_their_bytes() -> None:
    measured = replace(DECODER.measured, kv_token_nbytes=1 << 20)
    costs = Costs(replace(DECODER, measured=measured))
    slept = Slept()
    source, target = (DelayTextEngine(FAKE_MODEL, FakeFamily(), costs, OPTIONS, sleep=slept) for _ in range(2))
    assert source.kv.kind.position_nbytes == 1 << 20
    source.add(replace(request("a", prompt=70, tokens=3, n=2), pauses=True))
    while source.can_step:
        source.step()
    assert [source.kv.computed("a", choice) for choice in range(3)] == [70, 70, 0]
    target.add(replace(request("a", 70, 3, n=2), continued=(ContinuedChoice(1, (7,)),), arriving=70))
    assert target.step() == []
    assert target.kv.awaiting == {("a", 1)}
    segments = [KvSegment(source.kv.kind, 0, 64), KvSegment(source.kv.kind, 64, 6)]
    for segment in segments:
        assert not target.can_step
        memory = memoryview(bytearray(segment.nbytes))
        slept.clear()
        assert source.kv.pack("a", 1, segment, memory)
        assert target.kv.unpack("a", 1, segment, memory)
        assert list(slept) == pytest.approx([segment.nbytes / 8e9] * 2, abs=1e-6)
        assert source.kv.prefix_hash("a", 1, segment.end) == target.kv.prefix_hash("a", 1, segment.end) is not None
    assert not target.kv.awaiting
    assert [output.finish_reason for _ in range(2) for output in target.step()] == [None, FinishReason.LENGTH]
    source.cancel("a")
    assert not source.has_work


def test_what_does_not_arrive_is_computed() -> None:
    engine = text_engine(slept := Slept())
    engine.add(replace(request("a", prompt=30, tokens=1), arriving=30))
    engine.step()
    engine.kv.pause("unknown")
    assert engine.kv.unpack("a", 0, KvSegment(engine.kv.kind, 0, 20), memoryview(bytearray(20 * 64)))
    assert not engine.kv.unpack("a", 0, KvSegment(engine.kv.kind, 24, 6), memoryview(bytearray(6 * 64)))
    engine.kv.arrived("a")
    assert engine.pending_tokens == 10 + 1
    assert [output.finish_reason for output in engine.step()] == [FinishReason.LENGTH]
    assert slept[-1] == pytest.approx(1.0 + 10 * 0.01)


def test_what_can_never_run_is_refused() -> None:
    engine = text_engine(Slept())
    engine.add(request("a", prompt=3, tokens=2))
    with pytest.raises(InvalidRequest):
        engine.add(request("a", prompt=3, tokens=2))
    with pytest.raises(InvalidRequest):
        engine.add(request("b", prompt=3, tokens=2, n=5))
    with pytest.raises(ContextTooLong):
        engine.add(request("c", prompt=4000, tokens=97))


def test_a_part_must_have_exactly_one_profile(tmp_path: Path) -> None:
    write_profile(tmp_path / "e.json", ENCODER)
    write_profile(tmp_path / "d.json", DECODER)
    costs = delay_costs(tmp_path, ModelPart.ENCODER)
    assert costs.profile.identity.part is ModelPart.ENCODER
    assert CostWarning.SYNTHETIC in costs.encode_s(1, 1).warnings
    with pytest.raises(BadProfile, match="0 profiles of a model's decoder"):
        delay_costs(tmp_path / "e.json", ModelPart.DECODER)
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(BadProfile, match=r"x\.json"):
        delay_costs(tmp_path, ModelPart.ENCODER)


def test_a_synthetic_profile_covers_every_usual_size() -> None:
    encoder, decoder = synthetic_profiles(MODEL_DIR, image_s=0.2, side_px=448, load_s=5.0, process_s=3.0)
    costs, text = Costs(encoder), Costs(decoder)
    usual = [
        costs.encode_s(16),
        costs.encode_s(4096, 8),
        costs.prepare_s(500, 56 * 56),
        costs.prepare_s(30_000_000, 4096 * 4096),
        text.prefill_s(20),
        text.prefill_s(2048, 30_000),
        text.decode_s(256, 4096),
    ]
    assert {output.warnings for output in usual} == {frozenset({CostWarning.SYNTHETIC})}
    assert costs.encode_s(16).value == pytest.approx(0.2)
    assert costs.start_s().value == text.start_s().value == 8.0
    assert encoder.measured.load_s == 5.0


def test_a_waiting_request_gets_another_queue_position() -> None:
    engine = text_engine(Slept())
    for number in range(6):
        engine.add(request(str(number), prompt=2, tokens=9, queue_position=number))
    engine.reorder("0", QueuePosition(0, 30.0, 0))
    engine.reorder("unknown", QueuePosition(0, 30.0, 0))
    assert {output.request_id for output in engine.step()} == {"1", "2", "3", "4"}
    engine.reorder("1", QueuePosition(0, 30.0, 0))
    assert {output.request_id for output in engine.step()} == {"1", "2", "3", "4"}


def test_requests_wait_for_kv_memory_in_their_order() -> None:
    """A request that fits does not pass one that does not."""
    profile = replace(DECODER, measured=replace(DECODER.measured, kv_token_nbytes=64))
    options = replace(OPTIONS, kv_cache_bytes=41 * 64)
    engine = DelayTextEngine(FAKE_MODEL, FakeFamily(), Costs(profile), options, sleep=Slept())
    for number, (name, prompt) in enumerate((("first", 20), ("large", 30), ("small", 5))):
        engine.add(request(name, prompt=prompt, tokens=3, queue_position=number))
    started = [sorted({output.request_id for output in engine.step()}) for _ in range(7)]
    assert started == [["first"], ["first"], ["first"], ["large", "small"], ["large", "small"], ["large", "small"], []]
    assert engine.kv_free_tokens == 41
    assert not engine.can_step


def test_a_profile_of_the_degree_is_taken_where_there_are_several(tmp_path: Path) -> None:
    _, decoder = synthetic_profiles(MODEL_DIR)
    for degree in (1, 2):
        profile = replace(decoder, identity=replace(decoder.identity, tensor_parallel=degree))
        write_profile(tmp_path / f"{degree}.json", profile)
        assert delay_costs(tmp_path, ModelPart.DECODER, degree).profile.identity.tensor_parallel == degree
    with pytest.raises(BadProfile, match="0 profiles of a model's decoder with tensor-parallel degree 4, not one"):
        delay_costs(tmp_path, ModelPart.DECODER, 4)
