"""Measures engines through their own interfaces: for budgets at start, and for profiles.

A measurement calls the engine as its service does. Nothing else may use the engine meanwhile.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from math import ceil, floor, sqrt
from statistics import median
from typing import NamedTuple

from triptych.domain.engine import EngineOutput, EngineRequest
from triptych.domain.sampling import SamplingParams
from triptych.engine.encoder import AdapterEncoderEngine, PreparedMedia
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


class _Answered(NamedTuple):
    """How long a request's answers took."""

    first_s: float
    """Until the first token."""
    decodes_s: list[float]
    """Steps in which all choices decoded."""


class TextProbe:
    """Prompts and answers without items, for an idle text engine."""

    def __init__(self, engine: TextEngine, *, step_tokens: int | None = None) -> None:
        """``step_tokens``: most tokens of a step, of an engine that begins the choices of a request one by one. Each computes what of the
        prompt is not in whole blocks.
        """
        self._engine = engine
        self._step_tokens = step_tokens
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
        return None if taken is None else taken.first_s

    def decode_s(self, batch: int, context: int, steps: int = 1) -> list[float] | None:
        """The times of ``steps`` decode steps of ``batch`` sequences of ``context`` tokens. None if that does not fit.

        The sequences are choices of one request, so that its prompt is computed once.
        """
        tokens = steps + 1 + self._late_steps(batch, context)
        taken = self._answer_s(context, salt=self._salt(), choices=batch, tokens=tokens)
        return None if taken is None or not taken.decodes_s else taken.decodes_s[:steps]

    def _late_steps(self, batch: int, context: int) -> int:
        """How many steps after the first choice the last one may begin."""
        if self._step_tokens is None:
            return 0
        rest = min(context, self._engine.kv_block_tokens)
        return ceil(batch * rest / max(1, self._step_tokens - batch))

    def compute(self, prompts: int, tokens: int) -> None:
        """Compute so many prompts of so many tokens at the same time. Raises ContextTooLong or InvalidRequest if one does not fit."""
        for _ in range(prompts):
            self._add(tokens, salt=self._salt())
        while self._engine.has_work:
            self._step()

    def _salt(self) -> bytes:
        return next(self._names).to_bytes(8, "big")

    def _answer_s(self, prompt: int, *, salt: bytes, choices: int = 1, tokens: int = 1) -> _Answered | None:
        """None if that does not fit."""
        try:
            self._add(prompt, salt=salt, choices=choices, tokens=tokens)
        except (ContextTooLong, InvalidRequest):
            return None
        first_s, decodes_s, begun = 0.0, list[float](), set[int]()
        while self._engine.has_work:
            began_s = time.perf_counter()
            outputs = self._step()
            took_s = time.perf_counter() - began_s
            first_s += 0.0 if begun else took_s
            answered = {output.choice for output in outputs}
            if len(answered) == len(begun) == choices:
                decodes_s.append(took_s)
            begun |= answered
        return _Answered(first_s, decodes_s)

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

    def __init__(self, engine: AdapterEncoderEngine) -> None:
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
