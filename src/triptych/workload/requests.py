"""Requests of a workload and their arrival times. Pure: the same seed gives the same requests."""

import random
import re
from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, count
from typing import Literal, Protocol, Self, get_args

MAX_REQUESTS = 1_000_000
"""Most requests of one run; all are planned before the first is sent."""
DURATION_S = 120.0
"""Of a run, unless another one is asked for, or all of a recording."""
MAX_IMAGES = 1024
MAX_TOKENS = 10_000_000
MAX_SIDE_PIXELS = 16_384
MAX_CLIPS = 64
"""Most videos, and most sounds, of one request."""
MAX_CLIP_S = 3600.0
TEMPLATE_TOKENS = 12
"""Tokens that a chat template adds around one message, about."""
_MAX_WEIGHT = 1e12
_SIZE = re.compile(r"([0-9]{1,5})[xX]([0-9]{1,5})")


class WorkloadError(ValueError):
    """Options or a file that give no valid workload. The message says why."""


@dataclass(frozen=True, slots=True)
class Size:
    """Size of an image, pixels."""

    width: int
    height: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """``336x224``. Raises WorkloadError."""
        sides = _SIZE.fullmatch(text.strip())
        if sides is None:
            raise WorkloadError(f"{text[:40]!r} is not a size: write WIDTHxHEIGHT, for example 336x336")
        size = cls(int(sides[1]), int(sides[2]))
        if not (1 <= size.width <= MAX_SIDE_PIXELS and 1 <= size.height <= MAX_SIDE_PIXELS):
            raise WorkloadError(f"{text}: a side has 1 to {MAX_SIDE_PIXELS} pixels")
        return size


@dataclass(frozen=True, slots=True)
class Clip:
    """A video."""

    size: Size
    seconds: float
    frames_per_s: int = 8


Kind = Literal["text", "image", "video", "audio"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class Planned:
    """A request, sent ``arrival_s`` seconds after the start regardless of earlier ones."""

    arrival_s: float
    text_tokens: int
    images: tuple[Size, ...]
    output_tokens: int
    videos: tuple[Clip, ...] = ()
    sounds_s: tuple[float, ...] = ()
    """Lengths of its sounds, seconds."""
    tenant: str = ""
    """Whose share of the service it takes; empty for that of all who name none."""

    @property
    def kind(self) -> Kind:
        """The costliest kind of its items: video before audio before image; ``text`` without items."""
        if self.videos:
            return "video"
        if self.sounds_s:
            return "audio"
        return "image" if self.images else "text"


@dataclass(frozen=True, slots=True)
class Plan:
    """The requests of one run by arrival, all within ``duration_s``."""

    requests: Sequence[Planned]
    duration_s: float

    @property
    def rate(self) -> float:
        """Offered requests per second."""
        return len(self.requests) / self.duration_s


def check_size(rate: float, duration_s: float) -> None:
    """Raises WorkloadError for too many requests."""
    if not rate * duration_s <= MAX_REQUESTS:
        raise WorkloadError(f"{rate:g} requests/s for {duration_s:g} s are more than {MAX_REQUESTS:,} requests")


@dataclass(frozen=True, slots=True)
class Distribution:
    """A weighted distribution of integers; ``cumulative`` ends with the sum of the weights."""

    values: tuple[int, ...]
    cumulative: tuple[float, ...]

    @classmethod
    def of(cls, weights: Sequence[tuple[int, float]]) -> Self:
        """Raises WorkloadError when no weight is positive."""
        kept = [(value, weight) for value, weight in weights if weight > 0]
        if not kept:
            raise WorkloadError("a distribution has at least one value with a positive weight")
        return cls(tuple(value for value, _ in kept), tuple(accumulate(weight for _, weight in kept)))

    @classmethod
    def parse(cls, text: str, *, least: int = 0, most: int = MAX_TOKENS) -> Self:
        """``64``, or values with weights: ``1:0.6,4:0.3,8:0.1``. Raises WorkloadError."""
        weights = []
        for part in text.split(","):
            value, colon, weight = part.strip().partition(":")
            try:
                weights.append((int(value), float(weight) if colon else 1.0))
            except ValueError:
                raise WorkloadError(f"{text!r}: {part.strip()!r} is not VALUE or VALUE:WEIGHT") from None
            if not least <= weights[-1][0] <= most:
                raise WorkloadError(f"{text!r}: {value} is not between {least} and {most}")
            if not 0 <= weights[-1][1] <= _MAX_WEIGHT:
                raise WorkloadError(f"{text!r}: the weight {weight} is not a number from 0 to {_MAX_WEIGHT:g}")
        return cls.of(weights)

    def draw(self, rng: random.Random) -> int:
        position = bisect(self.cumulative, rng.random() * self.cumulative[-1])
        return self.values[min(position, len(self.values) - 1)]


_NONE = Distribution.of([(0, 1.0)])


@dataclass(frozen=True, slots=True)
class Mix:
    """Distributions of a request's parts, drawn independently: another distribution of one leaves the others' draws as they are."""

    images: Distribution
    text_tokens: Distribution
    output_tokens: Distribution
    size: Size
    videos: Distribution = _NONE
    clip: Clip = Clip(Size(224, 224), 4.0)
    """Size and length of each video."""
    sounds: Distribution = _NONE
    sound_s: float = 5.0
    """Length of each sound, seconds."""

    def request(self, arrival_s: float, rng: random.Random) -> Planned:
        images = (self.size,) * self.images.draw(rng)
        text_tokens, output_tokens = self.text_tokens.draw(rng), self.output_tokens.draw(rng)
        videos = (self.clip,) * self.videos.draw(rng)
        sounds_s = (self.sound_s,) * self.sounds.draw(rng)
        return Planned(arrival_s, text_tokens, images, output_tokens, videos, sounds_s)


def arrivals(rate: float, duration_s: float, burstiness: float, rng: random.Random) -> list[float]:
    """Arrival times within ``duration_s`` at ``rate`` per second on average.

    Gaps are Gamma distributed with coefficient of variation ``sqrt(burstiness)``: 1 is a Poisson process, 0 is even.
    """
    if burstiness:
        return list(gamma_arrivals(1 / burstiness, 1 / rate, 0.0, duration_s, rng))
    return list(until(duration_s, rng.random() / rate, lambda: 1 / rate))


def gamma_arrivals(shape: float, mean_gap_s: float, from_s: float, to_s: float, rng: random.Random) -> Iterator[float]:
    """Arrivals of a stationary process: the gap in progress at ``from_s`` is sampled by its residual time.

    So there are ``(to_s - from_s) / mean_gap_s`` arrivals on average, for any interval and variance.
    """
    scale_s = mean_gap_s / shape
    first_s = from_s + rng.random() * rng.gammavariate(shape + 1, scale_s)
    return until(to_s, first_s, lambda: rng.gammavariate(shape, scale_s))


def until(end_s: float, first_s: float, gap_s: Callable[[], float]) -> Iterator[float]:
    """The times from ``first_s`` on before ``end_s``, with sampled gaps."""
    at_s = first_s
    while at_s < end_s:
        yield at_s
        at_s += gap_s()


class Requests(Protocol):
    """Draws the requests of a workload."""

    def request(self, arrival_s: float, rng: random.Random) -> Planned: ...


def synthetic(mix: Requests, *, rate: float, duration_s: float, burstiness: float, rng: random.Random) -> Plan:
    """Requests of a mix; at least one. Raises WorkloadError for too many.

    Plans of one seed have the same requests at every rate, and gaps that are the same draws divided by the rate. A higher rate
    adds further requests.
    """
    check_size(rate, duration_s)
    draws = sources(rng)
    times = arrivals(rate, duration_s, burstiness, rng) or [0.0]
    return Plan([mix.request(at_s, draw) for at_s, draw in zip(times, draws, strict=False)], duration_s)


def sources(rng: random.Random) -> Iterator[random.Random]:
    """Random sources without end, one for each request, so that what is drawn for one does not shift the draws of others."""
    first = rng.getrandbits(64)
    return (random.Random((first << 64) + number) for number in count())  # noqa: S311 - not for cryptography
