"""Measures engines through their own interfaces: for budgets at start, and for profiles.

A measurement calls the engine as its service does. Nothing else may use the engine meanwhile.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from math import ceil, floor, sqrt
from statistics import median

from triptych.domain.engine import EngineOutput, EngineRequest
from triptych.domain.sampling import SamplingParams
from triptych.engine.encoder import PreparedMedia, TransformersEncoderEngine
from triptych.engine.probe_media import image, sound
from triptych.engine.timing import timed_s
from triptych.errors import ContextTooLong, InvalidMedia, InvalidRequest
from triptych.media.sniff import MediaLimits, inspect_media
from triptych.ports import TextEngine

PROBE_SIDE_PX = 448


@dataclass(frozen=True, slots=True)
class Repeats:
    """Repeat until the median is known well enough, or long enough."""

    least: int
    most: int
    width: float
    """Width of the median's 95 % confidence interval, relative to the median, that is narrow enough."""
    most_s: float
    """No repetition starts after this time, but at least one runs."""

    def median_s(self, sample_s: Callable[[], Iterable[float]]) -> float:
        """The median of samples in seconds. Each call of ``sample_s`` makes one or more; the first call is a warm-up."""
        began_s = time.perf_counter()
        sample_s()
        samples: list[float] = []
        while not samples or (len(samples) < self.most and time.perf_counter() - began_s < self.most_s):
            samples += sample_s()
            if len(samples) >= self.least and _interval(samples) <= self.width * median(samples):
                break
        return median(samples)


def _interval(samples: Sequence[float]) -> float:
    """Width of the 95 % confidence interval of the median, by ranks."""
    ordered = sorted(samples)
    half = 0.98 * sqrt(len(ordered))
    low = max(0, floor(len(ordered) / 2 - half))
    high = min(len(ordered) - 1, ceil(len(ordered) / 2 + half))
    return ordered[high] - ordered[low]


class TextProbe:
    """Prompts and answers without items, for an idle text engine."""

    def __init__(self, engine: TextEngine) -> None:
        self._engine = engine
        self._token = next(token for token in count() if token not in engine.placeholder_ids)
        self._names = count()

    def prefill_s(self, new_tokens: int, cached_tokens: int = 0) -> float | None:
        """The time to compute ``new_tokens`` of a prompt after ``cached_tokens`` in the prefix cache, up to the first token.

        None if that does not fit the engine. What the prefix cache does not keep is computed again.
        """
        salt = self._salt()
        if cached_tokens and self._answer_s(cached_tokens, salt=salt) is None:
            return None
        taken = self._answer_s(cached_tokens + new_tokens, salt=salt)
        return None if taken is None else taken[0]

    def decode_s(self, batch: int, context: int, steps: int = 1) -> list[float] | None:
        """The times of ``steps`` decode steps of ``batch`` sequences of ``context`` tokens. None if that does not fit.

        The sequences are choices of one request, so that its prompt is computed once.
        """
        taken = self._answer_s(context, salt=self._salt(), choices=batch, tokens=steps + 1)
        return None if taken is None else taken[-steps:]

    def compute(self, prompts: int, tokens: int) -> None:
        """Compute so many prompts of so many tokens at the same time. Raises ContextTooLong or InvalidRequest if one does not fit."""
        for _ in range(prompts):
            self._add(tokens, salt=self._salt())
        while self._engine.has_work:
            self._step()

    def _salt(self) -> bytes:
        return next(self._names).to_bytes(8, "big")

    def _answer_s(self, prompt: int, *, salt: bytes, choices: int = 1, tokens: int = 1) -> list[float] | None:
        """The time to the first tokens, then the duration of each step."""
        try:
            self._add(prompt, salt=salt, choices=choices, tokens=tokens)
        except (ContextTooLong, InvalidRequest):
            return None
        times: list[float] = []
        first_s = 0.0
        while self._engine.has_work:
            began_s = time.perf_counter()
            outputs = self._step()
            took_s = time.perf_counter() - began_s
            if times:
                times.append(took_s)
            else:
                first_s += took_s
                times += [first_s] if outputs else []
        return times

    def _add(self, prompt: int, *, salt: bytes, choices: int = 1, tokens: int = 1) -> None:
        sampling = SamplingParams(temperature=0, max_tokens=tokens, n=choices, ignore_eos=True, seed=0)
        request = EngineRequest(f"probe-{next(self._names)}", (self._token,) * prompt, (), sampling, tenant_salt=salt)
        self._engine.add(request)

    def _step(self) -> Sequence[EngineOutput]:
        outputs = self._engine.step()
        for output in outputs:
            if output.error is not None:
                raise output.error
        return outputs


class EncoderProbe:
    """Items for an idle encoder engine."""

    def __init__(self, engine: TransformersEncoderEngine) -> None:
        self._engine = engine

    def item(self) -> PreparedMedia:
        """An image of 448 x 448 pixels, or a clip of 10 s if the model takes no images."""
        try:
            return self.prepared(image(PROBE_SIDE_PX))
        except InvalidMedia:
            return self.prepared(sound())

    def prepared(self, media: bytes) -> PreparedMedia:
        return self._engine.prepare(media, inspect_media(media, MediaLimits()))

    def prepare_s(self, media: bytes) -> float:
        return timed_s(lambda: self.prepared(media))

    def encode_s(self, item: PreparedMedia, items: int) -> float:
        return timed_s(lambda: self._engine.encode([item] * items))
