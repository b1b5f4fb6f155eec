"""An engine is ready once it has computed something of everything that it serves."""

from collections.abc import Sequence
from typing import ClassVar

import pytest

from triptych.domain.embedding import Tensor
from triptych.domain.engine import EngineOutput
from triptych.domain.media import Modality
from triptych.engine.first_pass import answer_first, encode_first
from triptych.errors import EngineFailure, InstanceLost, InvalidMedia
from triptych.families.model_files import BadModel
from triptych.testing.fakes import FakeEncoderEngine, FakePrepared, FakeTextEngine
from triptych.testing.model import WORDS, FakeFamily
from triptych.virtual import virtual_time
from triptych.virtual.offload import InlineOffload


def test_a_text_engine_that_works_is_idle_afterwards() -> None:
    engine = FakeTextEngine(WORDS)
    answer_first(engine)
    assert not engine.has_work


class Ending(FakeTextEngine):
    def decode_step(self) -> list[EngineOutput]:
        raise InstanceLost("the engine has failed") from ValueError("head size 20 is not supported")


class Failing(FakeTextEngine):
    def decode_step(self) -> list[EngineOutput]:
        return [EngineOutput("first", (), error=EngineFailure("the engine failed on this request"))]


class Silent(FakeTextEngine):
    def decode_step(self) -> list[EngineOutput]:
        return []


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        (Ending(WORDS), "its first prompt fails: ValueError: head size 20 is not supported"),
        (Failing(WORDS), "its first prompt fails: EngineFailure: the engine failed on this request"),
        (Silent(WORDS), "its first answer has 0 tokens of 2"),
    ],
    ids=["it ends", "it fails", "it says nothing"],
)
def test_a_text_engine_that_cannot_compute_is_a_bad_model(engine: FakeTextEngine, reason: str) -> None:
    with pytest.raises(BadModel, match=f"^the language model cannot be run: {reason}$"):
        answer_first(engine)


class Unable(FakeEncoderEngine):
    def encode(self, batch: Sequence[FakePrepared]) -> list[tuple[Tensor, ...]]:
        raise EngineFailure(f"failed on a batch of {len(batch)}") from RuntimeError("no kernel for this size")


class Blind(FakeEncoderEngine):
    def prepare(self, *_: object) -> FakePrepared:
        raise InvalidMedia("the image cannot be processed") from ImportError("no decoder")


def encode(engine: FakeEncoderEngine, *modalities: Modality) -> None:
    class Family(FakeFamily):
        replacement_targets: ClassVar = dict.fromkeys(modalities, (1,))

    offload = InlineOffload(1)
    virtual_time.run(encode_first(engine, Family(), prepare=offload, compute=offload))


@pytest.mark.parametrize("modalities", [(Modality.IMAGE,), (Modality.IMAGE, Modality.VIDEO), (Modality.AUDIO,)])
def test_an_encoder_encodes_an_item_of_each_modality_that_goes_another_way(modalities: tuple[Modality, ...]) -> None:
    engine = FakeEncoderEngine(tokens_of=lambda _: 2)
    encode(engine, *modalities)
    assert engine.encoded_items == 1


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        (Unable(tokens_of=lambda _: 2), "RuntimeError: no kernel for this size"),
        (Blind(tokens_of=lambda _: 2), "ImportError: no decoder"),
    ],
    ids=["encode", "prepare"],
)
def test_an_encoder_that_cannot_compute_is_a_bad_model(engine: FakeEncoderEngine, reason: str) -> None:
    with pytest.raises(BadModel, match=f"^the encoder cannot be run: its first image fails: {reason}$"):
        encode(engine, Modality.IMAGE)
