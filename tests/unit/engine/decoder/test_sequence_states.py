"""Sequences with state outside of KV blocks go on in another engine, token for token as by ``generate``."""

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.engine.kv_transfer import access, go_on, prefill, transfer_kv
from tests.unit.engine.tiny import (
    Reference,
    encoder_engine,
    engine_request,
    greedy,
    make_model,
    random_question,
    run,
    text_config,
    text_engine,
    transformers,
)
from triptych.domain.embedding import DType
from triptych.domain.engine import EngineOutput, EngineRequest
from triptych.domain.kv_segment import KvSegment
from triptych.domain.sequence_state import StateKind, StateTensor
from triptych.engine.decoder.per_sequence_runner import PerSequenceModelRunner
from triptych.engine.decoder.text_engine import TransformersTextEngine
from triptych.engine.families.plain import PlainDecoder
from triptych.errors import EngineFailure

WINDOW = 12
TOKENS = 10
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
LINEAR = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": ROPE | {"partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
}
STATE_SPACE = {
    "mamba_d_ssm": 64,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 16,
}
DECODERS: dict[str, Any] = {
    "convolutions": lambda: text_config(
        transformers.Lfm2Config,
        layer_types=["conv", "full_attention", "conv"],
        conv_L_cache=3,
        block_auto_adjust_ff_dim=False,
        rope_parameters=ROPE,
    ),
    "linear attention": lambda: text_config(transformers.Qwen3_5TextConfig, **LINEAR),
    "both in one layer": lambda: text_config(transformers.FalconH1Config, **STATE_SPACE),
    "windows": lambda: text_config(
        transformers.Qwen2Config,
        sliding_window=WINDOW,
        use_sliding_window=True,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
}
"""The last one is not packed: of a decoder whose passes differ from transformers'."""


@dataclass
class Model:
    directory: Path

    @cached_property
    def reference(self) -> Reference:
        return Reference(self.directory)

    @cached_property
    def _encoder(self) -> Any:
        return encoder_engine(self.directory)

    def engine(self, **changes: Any) -> TransformersTextEngine:
        return text_engine(self.directory, **changes)

    def request(self, name: str = "one", *, seed: int = 2, images: int = 1) -> EngineRequest:
        question = random_question(random.Random(seed), images)
        return engine_request(name, question, self.reference, self._encoder, greedy(TOKENS, ignore_eos=True))

    def answer(self, *, seed: int = 2, images: int = 1) -> list[int]:
        return self.reference.answer(random_question(random.Random(seed), images), TOKENS, ignore_eos=True)


@pytest.fixture(scope="module", params=DECODERS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    directory = make_model(tmp_path_factory.mktemp("states"), text=DECODERS[request.param]())
    with pytest.MonkeyPatch.context() as patched:
        if request.param == "windows":
            patched.setattr(PlainDecoder, "is_packable", False, raising=False)
            patched.setattr(PlainDecoder, "embedding_parts", frozenset(), raising=False)
        yield Model(directory)


@pytest.fixture(scope="module")
def convolutions(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(make_model(tmp_path_factory.mktemp("states"), text=DECODERS["convolutions"]()))


def tokens_of(outputs: list[EngineOutput], name: str = "one") -> list[int]:
    return [token for output in outputs if output.request_id == name for token in output.token_ids]


@pytest.mark.slow
def test_an_answer_goes_on_elsewhere_after_its_prompt_and_in_its_middle(model: Model) -> None:
    """Amid other requests, and nothing of it is computed twice."""
    request, other = model.request(), model.request("other", seed=4, images=2)
    engines = [model.engine() for _ in range(3)]
    outputs, packed = prefill(engines[0], request)
    answer = tokens_of(outputs)
    assert not engines[0].has_work
    engines[1].add(other)
    outputs = go_on(engines[1], request, {0: answer}, {0: packed})
    assert access(engines[1]).computed("one", 0) == len(request.token_ids)
    while len(answer) < TOKENS // 2:
        outputs += engines[1].step()
        answer += tokens_of(outputs)
        outputs = []
    engines[2].add(replace(other, request_id="again"))
    outputs = transfer_kv(engines[1], request, engines[2], {0: answer})
    assert access(engines[2]).computed("one", 0) == len(request.token_ids) + len(answer) - 1
    finished = run(engines[2], outputs)
    assert answer + finished["one"] == model.answer()
    assert finished["again"] == model.answer(seed=4, images=2)


def test_a_window_may_be_longer_than_the_prompts_that_states_are_learned_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PlainDecoder, "is_packable", False, raising=False)
    monkeypatch.setattr(PlainDecoder, "embedding_parts", frozenset(), raising=False)
    text = text_config(transformers.MistralConfig, sliding_window=40)
    model = Model(make_model(tmp_path, text=text))
    kind = access(model.engine()).kind
    assert kind.nbytes(38) < kind.nbytes(39) == kind.nbytes(60)
    for images in (1, 3):
        request = model.request(images=images)
        outputs, packed = prefill(model.engine(), request)
        target, begun = model.engine(), tokens_of(outputs)
        outputs = go_on(target, request, {0: begun}, {0: packed})
        assert access(target).computed("one", 0) == len(request.token_ids)
        assert begun + run(target, outputs)["one"] == model.answer(images=images)


@pytest.mark.slow
def test_a_state_has_exactly_the_bytes_that_its_positions_say(model: Model) -> None:
    engine, kind = model.engine(), access(model.engine()).kind
    for number, images in enumerate((0, 1, 2)):
        request = model.request(str(number), seed=number, images=images)
        _, ((segment, memory),) = prefill(engine, request)
        assert (segment.first, segment.end) == (0, len(request.token_ids))
        assert len(memory) == kind.nbytes(segment.positions) == segment.spec.nbytes
    assert kind.nbytes(100) < kind.nbytes(1) + 99 * kind.position_nbytes + 1


@pytest.mark.slow
def test_drawn_choices_go_on_elsewhere(model: Model) -> None:
    """By seed, from the state of one prompt for both, and from one each in the middle."""
    request = model.request()
    request = replace(request, sampling=replace(request.sampling, temperature=0.8, top_p=0.95, seed=7, n=2))
    engines = [model.engine() for _ in range(3)]
    engines[0].add(request)
    whole = by_choice(run_out(engines[0]))
    outputs, packed = prefill(engines[0], request)
    outputs += go_on(engines[1], request, by_choice(outputs), dict.fromkeys(range(2), packed))
    outputs += engines[1].step()
    outputs += transfer_kv(engines[1], request, engines[2], by_choice(outputs))
    assert by_choice([*outputs, *run_out(engines[2])]) == whole
    assert whole[0] != whole[1]


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 4])
def test_what_is_lost_on_the_way_is_computed(model: Model, tokens: int) -> None:
    source, target = model.engine(), model.engine()
    request, expected = model.request(), model.answer()
    _, packed = prefill(source, request)
    outputs = go_on(target, request, {0: expected[:tokens]}, {0: packed}, lost={0})
    assert expected[:tokens] + run(target, outputs)["one"] == expected


@pytest.mark.slow
def test_tokens_after_the_state_are_computed_one_by_one(model: Model) -> None:
    """As when an answer goes on from its prompt once more."""
    source, target = model.engine(), model.engine()
    request, expected = model.request(), model.answer()
    _, packed = prefill(source, request)
    outputs = go_on(target, request, {0: expected[:5]}, {0: packed})
    assert access(target).computed("one", 0) == len(request.token_ids)
    assert expected[:5] + run(target, outputs)["one"] == expected


def test_a_state_of_another_kind_or_length_is_refused(convolutions: Model) -> None:
    """Nothing changes, and all is computed."""
    request, expected = convolutions.request(), convolutions.answer()
    _, ((segment, memory),) = prefill(convolutions.engine(), request)
    kind = segment.kind
    assert isinstance(kind, StateKind)
    other = bytearray(memory)
    other[: len(kind.header(0))] = replace(kind, model_revision="another").header(segment.positions)
    longer = bytearray(memory)
    longer[: len(kind.header(0))] = kind.header(segment.positions + 1)
    target = convolutions.engine()
    for number, (offered, bad) in enumerate(
        (
            (segment, other),
            (segment, longer),
            (segment, bytearray(len(memory))),
            (segment, memory[:-16]),
            (segment, bytearray()),
            (KvSegment(kind, 0, segment.positions - 1), memory),
            (KvSegment(kind, 0, segment.positions + 1), memory),
            (KvSegment(kind, 1, segment.positions - 1), memory),
        )
    ):
        asked = replace(request, request_id=str(number))
        outputs = go_on(target, asked, {0: expected[:1]}, {0: [(offered, bytearray(bad))]})
        assert access(target).computed(str(number), 0) == 0
        assert expected[:1] + run(target, outputs)[str(number)] == expected


def test_a_damaged_state_makes_a_wrong_answer_at_most(convolutions: Model) -> None:
    request = convolutions.request()
    _, ((segment, memory),) = prefill(convolutions.engine(), request)
    assert isinstance(segment.kind, StateKind)
    header, rest = len(segment.kind.header(0)), random.Random(1)
    target = convolutions.engine()
    begun = {0: convolutions.answer()[:1]}
    for byte in (0x00, 0x7F, 0xFF, None):
        harmed = rest.randbytes(len(memory)) if byte is None else bytes([byte]) * len(memory)
        memory[header:] = harmed[header:]
        outputs = go_on(target, request, begun, {0: [(segment, memory)]})
        while target.has_work:
            outputs += target.step()
        assert all(isinstance(output.error, EngineFailure | None) for output in outputs)
    asked = replace(request, request_id="sound")
    target.add(asked)
    assert run(target)["sound"] == convolutions.answer()


def test_a_later_state_is_not_an_earlier_one(convolutions: Model) -> None:
    source, request = convolutions.engine(), convolutions.request()
    source.add(request)
    for _ in range(3):
        source.step()
    kv, positions = access(source), len(request.token_ids)
    assert kv.computed("one", 0) == positions + 2
    for segment in kv.kind.segments(0, positions + 1):
        with pytest.raises(EngineFailure, match=f"after {positions + 2} positions only, not after {positions + 1}"):
            kv.pack("one", 0, segment, memoryview(bytearray(segment.nbytes)))
    for segment in kv.kind.segments(0, positions + 3):
        assert not kv.pack("one", 0, segment, memoryview(bytearray(segment.nbytes))), "it is not computed"


@pytest.mark.parametrize(
    ("attribute", "reason"),
    [
        ("history", "layers.0.history is torch.int64"),
        ("seen", r"layers.0.seen is 8 and 72 after prompts of \(4, 36\) tokens"),
        ("tokens", "two prompts are built differently"),
    ],
)
def test_a_decoder_with_other_state_transfers_nothing(
    convolutions: Model,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    attribute: str,
    reason: str,
) -> None:
    caches = PerSequenceModelRunner.probe_caches

    def with_more(runner: PerSequenceModelRunner, prompt: Sequence[int]) -> list[Any]:
        found = caches(runner, prompt)
        for cache in found:
            length = cache.get_seq_length(1)
            more = {"history": torch.arange(length), "seen": 2 * length, "tokens": list(range(length))}
            setattr(cache.layers[0], attribute, more[attribute])
        return found

    monkeypatch.setattr(PerSequenceModelRunner, "probe_caches", with_more)
    with caplog.at_level("INFO"):
        assert convolutions.engine().kv is None
    assert re.match(f"sequences cannot be transferred: .*{reason}", caplog.messages[-1])


def test_a_decoder_that_does_not_go_on_from_a_copy_transfers_nothing(
    convolutions: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = PerSequenceModelRunner.take

    def harmed(runner: PerSequenceModelRunner, sequence_id: str, cache: Any) -> None:
        cache.layers[0].conv_states[0] += 1
        take(runner, sequence_id, cache)

    monkeypatch.setattr(PerSequenceModelRunner, "take", harmed)
    assert convolutions.engine().kv is None


def test_kinds_differ_between_models_data_types_and_layouts(convolutions: Model, tmp_path: Path) -> None:
    again = make_model(tmp_path / "again", text=DECODERS["convolutions"]())
    other = make_model(tmp_path / "other", seed=1, text=DECODERS["convolutions"]())
    kinds = [
        access(engine).kind
        for engine in (
            convolutions.engine(),
            text_engine(again),
            convolutions.engine(dtype="bfloat16"),
            text_engine(other),
        )
    ]
    assert kinds[0].digest == kinds[1].digest
    assert len({kind.digest for kind in kinds}) == 3
    tensor = StateTensor("a", DType.F32, (2, 0, 3), of_positions=1, most=4)
    layouts = [
        tensor,
        replace(tensor, name="b"),
        replace(tensor, dtype=DType.BF16),
        replace(tensor, shape=(2, 0, 4)),
        replace(tensor, shape=(0, 2, 3), of_positions=0),
        replace(tensor, most=None),
    ]
    assert len({StateKind("model", (layout,)).digest for layout in layouts}) == len(layouts)
    assert StateKind("model", (tensor,)).nbytes(3) == 32 + 80
    assert StateKind("model", (tensor,)).nbytes(9) == StateKind("model", (tensor,)).nbytes(4) == 32 + 96


def run_out(engine: TransformersTextEngine) -> list[EngineOutput]:
    outputs: list[EngineOutput] = []
    while engine.has_work:
        outputs += engine.step()
    return outputs


def by_choice(outputs: list[EngineOutput]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for output in outputs:
        found.setdefault(output.choice, []).extend(output.token_ids)
    return found
