"""Measurements of real, tiny engines."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.engine.tiny import TOKENS_PER_IMAGE, text_engine
from triptych.domain.engine import EngineOutput, EngineRequest
from triptych.engine.encoder import TransformersEncoderEngine
from triptych.engine.measuring import EncoderProbe, Repeats, TextProbe
from triptych.engine.probe_media import image


def samples_of(*values: float) -> Iterator[list[float]]:
    for value in values:
        yield [value]


def test_the_first_run_warms_up_and_equal_samples_end_the_repetition() -> None:
    samples = samples_of(9.0, 1.0, 1.0, 1.0, 1.0)
    assert Repeats(least=3, most=50, width=0.05, most_s=60.0).median_s(lambda: next(samples)) == 1.0
    assert list(samples) == [[1.0]]


def test_spread_samples_are_repeated_up_to_the_bound() -> None:
    samples = samples_of(9.0, 1.0, 2.0, 3.0, 4.0, 100.0, 7.0)
    assert Repeats(least=2, most=5, width=0.05, most_s=60.0).median_s(lambda: next(samples)) == 3.0
    assert list(samples) == [[7.0]]


def test_after_the_time_limit_one_sample_is_enough() -> None:
    samples = samples_of(9.0, 2.0, 3.0)
    assert Repeats(least=5, most=50, width=0.05, most_s=0.0).median_s(lambda: next(samples)) == 2.0


def test_steps_of_a_text_engine_are_measured_and_leave_it_idle(model_dir: Path) -> None:
    engine = text_engine(model_dir, kv_cache_bytes=1 << 20, max_sequences=4, token_budget=256)
    probe = TextProbe(engine)
    steps_s = probe.decode_s(batch=4, context=20, steps=3)
    assert steps_s is not None
    assert len(steps_s) == 3
    assert min(steps_s) > 0
    assert (probe.prefill_s(100) or 0) > 0
    assert not engine.has_work
    assert engine.kv_free_tokens == engine.kv_tokens


class OneByOne:
    """A text engine that begins one choice in each step. Only what a probe asks for is there."""

    placeholder_ids = frozenset[int]()
    kv_block_tokens = 4

    def __init__(self) -> None:
        self.steps: list[int] = []
        """Choices that had begun before each step."""
        self._left: dict[int, int] = {}
        self._waiting: list[int] = []

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._left)

    def add(self, request: EngineRequest) -> None:
        assert request.sampling.max_tokens is not None
        self.tokens = request.sampling.max_tokens
        self._waiting = list(request.begun)

    def step(self) -> list[EngineOutput]:
        self.steps.append(len(self._left))
        if self._waiting:
            self._left[self._waiting.pop(0)] = self.tokens
        outputs = [EngineOutput("probe", (0,), choice=choice) for choice in self._left]
        self._left = {choice: left - 1 for choice, left in self._left.items() if left > 1}
        return outputs


def test_only_steps_in_which_all_choices_decode_are_measured() -> None:
    engine = OneByOne()
    steps_s = TextProbe(engine, step_tokens=7).decode_s(batch=3, context=100, steps=5)  # type: ignore[arg-type]
    assert steps_s is not None
    assert len(steps_s) == 5
    assert engine.steps.count(3) >= 5, "before them, one after the other has begun"


def test_only_the_cached_part_of_a_prompt_comes_from_the_cache(model_dir: Path) -> None:
    engine = text_engine(model_dir, kv_cache_bytes=1 << 20, max_sequences=4, token_budget=256)
    probe = TextProbe(engine)
    probe.prefill_s(64)
    probe.prefill_s(64)
    assert engine.prefix_hits_tokens == 0
    probe.prefill_s(32, cached_tokens=64)
    assert 32 <= engine.prefix_hits_tokens <= 64


def test_what_does_not_fit_the_engine_is_not_measured(model_dir: Path) -> None:
    probe = TextProbe(text_engine(model_dir, kv_cache_bytes=1 << 20, max_sequences=4, token_budget=256))
    assert probe.decode_s(batch=5, context=16) is None
    assert probe.prefill_s(512) is None
    assert probe.prefill_s(16, cached_tokens=512) is None


def test_an_encoder_is_measured_with_images(encoder: TransformersEncoderEngine) -> None:
    probe = EncoderProbe(encoder)
    assert probe.item().tokens == TOKENS_PER_IMAGE
    assert probe.encode_s(probe.item(), 2) > 0
    assert probe.prepare_s(image(64)) > 0


@pytest.mark.parametrize("side_px", [64, 200])
def test_noise_has_more_bytes_per_pixel(side_px: int) -> None:
    assert len(image(side_px, noise=True)) > 3 * len(image(side_px))
