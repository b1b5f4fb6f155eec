"""A workload as a command line describes it: a mix or a trace, and the rates at which it is offered."""

import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from . import traces
from .requests import DURATION_S, MAX_CLIPS, MAX_IMAGES, Clip, Distribution, Mix, Plan, Size, WorkloadError, synthetic


@dataclass(frozen=True, slots=True)
class Workload:
    """A ``trace`` overrides ``mix``."""

    mix: Mix
    trace: Path | None
    size: Size | None
    asked_rates: tuple[float, ...]
    """Empty if none was asked for."""
    start_s: float
    duration_s: float
    """Infinite for all of a recording."""
    burstiness: float
    seed: int

    @classmethod
    def from_options(
        cls,
        *,
        mix: tuple[str, str, str],
        image_size: str | None,
        clips: tuple[str, str, float],
        sounds: tuple[str, float],
        trace: Path | None,
        rates: tuple[float | None, str | None],
        start_s: float,
        duration_s: float | None,
        burstiness: float,
        seed: int,
    ) -> Self:
        """Make a load from the command line; ``mix`` is images, text tokens, output tokens; ``clips`` videos, their size and
        seconds; ``sounds`` sounds and their seconds. Without a duration a recording is replayed to its end. Raises WorkloadError.
        """
        if duration_s is None:
            duration_s = math.inf if trace is not None and traces.is_recorded(trace) else DURATION_S
        rate, sweep = rates
        if rate is not None and sweep is not None:
            raise WorkloadError("--rate and --sweep exclude each other")
        images, text_tokens, output_tokens = mix
        size = None if image_size is None else Size.parse(image_size)
        made_of = Mix(
            Distribution.parse(images, most=MAX_IMAGES),
            Distribution.parse(text_tokens),
            Distribution.parse(output_tokens, least=1),
            size or traces.DEFAULT_SIZE,
            videos=Distribution.parse(clips[0], most=MAX_CLIPS),
            clip=Clip(Size.parse(clips[1]), clips[2]),
            sounds=Distribution.parse(sounds[0], most=MAX_CLIPS),
            sound_s=sounds[1],
        )
        return cls(
            mix=made_of,
            trace=trace,
            size=size,
            asked_rates=_rates(sweep) if sweep is not None else () if rate is None else (rate,),
            start_s=start_s,
            duration_s=duration_s,
            burstiness=burstiness,
            seed=seed,
        )

    @property
    def rates(self) -> tuple[float | None, ...]:
        """The rates to run at; None keeps the trace's own. Raises WorkloadError if there is none."""
        if not self.asked_rates and self.trace is None:
            raise WorkloadError("a request rate is missing: --rate 2, or --sweep 1,2,4,8")
        return self.asked_rates or (None,)

    def plan(self, rate: float | None, seed: int | None = None) -> Plan:
        """The requests at a rate. With one seed they are the same at all rates. ``seed``: another than its own. Raises WorkloadError."""
        rng = random.Random(f"{self.seed if seed is None else seed}")  # noqa: S311 - not for cryptography
        if self.trace is not None:
            span = traces.Span(self.start_s, self.duration_s, rate)
            return traces.load(self.trace, span, self.size, rng)
        if rate is None:
            raise WorkloadError("only a trace has a rate of its own")
        return synthetic(self.mix, rate=rate, duration_s=self.duration_s, burstiness=self.burstiness, rng=rng)


def _rates(text: str) -> tuple[float, ...]:
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError:
        rates = ()
    if not rates or not all(0 < rate < float("inf") for rate in rates):
        raise WorkloadError(f"--sweep {text}: write positive rates with commas, for example 1,2,4,8")
    return rates
