"""What every encoder engine promises (``ports.EncoderEngine``): the same suite over Triptych's own and vLLM."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch

from tests.contract.text_engine_kit import NO_VLLM, checkpoint
from tests.e2e.reference import DIGITS
from triptych.demo import MODEL_ID
from triptych.domain.embedding import Tensor
from triptych.domain.media import MediaInfo, Modality, Shard
from triptych.engine.compute import ComputeOptions
from triptych.engine.encoder import AdapterEncoderEngine, TransformersEncoderEngine
from triptych.errors import EngineFailure, InstanceLost, InvalidMedia, InvalidRequest
from triptych.families.base import shard_outputs
from triptych.media.sniff import MediaLimits, inspect_media

pytestmark = pytest.mark.timeout(300)

IMAGES = ("3_a", "7_b", "5_c", "1_a", "9_b")
CLOSE = 1e-4


def _own() -> AdapterEncoderEngine:
    return TransformersEncoderEngine(checkpoint(), model_id=MODEL_ID, compute=ComputeOptions())


def _vllm() -> AdapterEncoderEngine:
    if find_spec("vllm") is None:
        pytest.skip(NO_VLLM)
    from triptych.integrations.vllm.encoder import VllmEncoderEngine

    return VllmEncoderEngine(checkpoint(), "", model_id=MODEL_ID, compute=ComputeOptions())


ENGINES: Mapping[str, Callable[[], AdapterEncoderEngine]] = {"triptych": _own, "vllm": _vllm}


@pytest.fixture(scope="module", params=sorted(ENGINES))
def engine(request: pytest.FixtureRequest) -> Iterator[AdapterEncoderEngine]:
    engine = ENGINES[request.param]()
    yield engine
    if close := getattr(engine, "close", None):
        close()


def item(name: str) -> tuple[bytes, MediaInfo]:
    media = (DIGITS / f"{name}.png").read_bytes()
    return media, inspect_media(media, MediaLimits())


def rows(tensors: tuple[Tensor, ...]) -> list[np.ndarray[Any, np.dtype[Any]]]:
    return [np.frombuffer(tensor.data, np.float32).reshape(tensor.spec.shape) for tensor in tensors]


def alone(engine: AdapterEncoderEngine, name: str) -> list[np.ndarray[Any, np.dtype[Any]]]:
    return rows(engine.encode([engine.prepare(*item(name))])[0])


def with_pixels(engine: AdapterEncoderEngine, pixels: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """An item whose features no image has."""
    prepared = engine.prepare(*item("3_a"))
    return replace(prepared, features={"pixel_values": pixels(prepared.features["pixel_values"])})


def test_tensors_are_those_that_were_announced(engine: AdapterEncoderEngine) -> None:
    media, info = item("3_a")
    prepared = engine.prepare(media, info)
    tokens, outputs = shard_outputs(checkpoint().family, info, engine.model.dtype, None)
    assert (prepared.tokens, prepared.outputs) == (tokens, outputs)
    (tensors,) = engine.encode([prepared])
    assert tuple(tensor.spec for tensor in tensors) == outputs
    assert all(tensor.data.readonly for tensor in tensors)
    assert engine.encode([]) == []


def test_a_batch_gives_each_item_what_it_gets_alone(engine: AdapterEncoderEngine) -> None:
    together = engine.encode([engine.prepare(*item(name)) for name in (*IMAGES, IMAGES[0])])
    for name, tensors in zip((*IMAGES, IMAGES[0]), together, strict=True):
        for found, expected in zip(rows(tensors), alone(engine, name), strict=True):
            np.testing.assert_allclose(found, expected, rtol=CLOSE, atol=CLOSE)
    assert not np.allclose(rows(together[0])[0], rows(together[1])[0], rtol=CLOSE, atol=CLOSE)


def test_items_are_prepared_by_several_threads(engine: AdapterEncoderEngine) -> None:
    with ThreadPoolExecutor(4) as pool:
        prepared = list(pool.map(lambda name: engine.prepare(*item(name)), IMAGES * 4))
    for name, first in zip(IMAGES * 4, prepared, strict=True):
        again = engine.prepare(*item(name))
        assert all(torch.equal(first.features[key], again.features[key]) for key in again.features)


@pytest.mark.parametrize("damage", [lambda media: media[: len(media) // 2], lambda _: b"", lambda media: media[:40]])
def test_what_cannot_be_decoded_is_invalid_media(
    engine: AdapterEncoderEngine, damage: Callable[[bytes], bytes]
) -> None:
    media, info = item("3_a")
    with pytest.raises(InvalidMedia, match=r"^the png image (cannot be decoded|is cut off)$"):
        engine.prepare(damage(media), info)


def test_other_modalities_and_shards_that_do_not_exist_are_refused(engine: AdapterEncoderEngine) -> None:
    media, info = item("3_a")
    with pytest.raises(InvalidMedia, match="audio"):
        engine.prepare(media, replace(info, modality=Modality.AUDIO))
    with pytest.raises(InvalidRequest):
        engine.prepare(media, info, Shard(1, 1, 2))


def test_an_item_that_fails_is_found_one_by_one_and_the_engine_goes_on(engine: AdapterEncoderEngine) -> None:
    expected = alone(engine, "7_b")[0]
    batch = [engine.prepare(*item("7_b")), with_pixels(engine, lambda pixels: pixels[..., :-1])]
    with pytest.raises(EngineFailure, match=r"^the encoder failed on a batch of 2$"):
        engine.encode(batch)
    with pytest.raises(EngineFailure):
        engine.encode(batch[1:])
    np.testing.assert_array_equal(rows(engine.encode(batch[:1])[0])[0], expected)


def test_an_embedding_that_is_not_finite_is_an_engine_failure(engine: AdapterEncoderEngine) -> None:
    good = engine.prepare(*item("7_b"))
    bad = with_pixels(engine, lambda pixels: torch.full_like(pixels, float("nan")))
    with pytest.raises(EngineFailure, match="not finite"):
        engine.encode([good, bad])
    assert len(engine.encode([good])) == 1


def test_a_device_that_has_failed_loses_the_instance(
    engine: AdapterEncoderEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    bad = with_pixels(engine, lambda pixels: pixels[..., :-1])
    monkeypatch.setattr(torch, "ones", fail)
    with pytest.raises(InstanceLost, match=r"^the cpu device has failed$"):
        engine.encode([bad])


def test_memory_of_decoding_is_known_before_it_starts(engine: AdapterEncoderEngine) -> None:
    _, info = item("3_a")
    assert engine.decoded_nbytes(info) == 4 * info.pixels


def test_an_engine_describes_what_decides_on_its_embeddings(engine: AdapterEncoderEngine) -> None:
    assert all(f"{name}/" in engine.version for name in ("triptych", "transformers", "torch", "pillow", "device"))
    assert engine.model == checkpoint().model_info(model_id=MODEL_ID, dtype=engine.model.dtype)
    assert len(engine.processor_digest) == 32
