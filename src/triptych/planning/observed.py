"""Requests like those that routers have counted (``domain.mix``), for the planner and its simulations."""

import random
from bisect import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import sqrt
from typing import Self

from triptych.domain.instance import ModelInfo
from triptych.domain.mix import Form, Mix
from triptych.errors import TriptychError
from triptych.families.base import Family
from triptych.policy.sharding import ShardLimits
from triptych.sim.prepare import Prompts
from triptych.workload.requests import MAX_SIDE_PIXELS, Clip, Planned, Size, WorkloadError


@dataclass(frozen=True, slots=True)
class ObservedMix:
    """``workload.requests.Requests``: one request stands for all of a form, with the means of their numbers and square items."""

    requests: Sequence[Planned]
    cumulative: Sequence[float]
    """Of how often each was seen; ends with the sum."""

    @classmethod
    def of(cls, mix: Mix, family: Family, model: ModelInfo) -> Self:
        """Requests that the model does not take are left out. Raises WorkloadError if none is left."""
        prompts = Prompts(family, model, ShardLimits())
        requests, counts, fault = [], [], "there are no requests"
        for number, (form, output_tokens, count) in enumerate(_with_answers(mix)):
            planned = request_of(form, output_tokens)
            try:
                beside = prompts.shape(number, planned).tokens
                text_tokens = max(1, round(form.prompt_tokens / form.count) - beside)
                planned = replace(planned, text_tokens=text_tokens)
                prompts.check_length(number, planned, kv_tokens=0, kv_block_tokens=1)
            except TriptychError as error:
                fault = error.message
                continue
            requests.append(planned)
            counts.append(count)
        if not requests:
            raise WorkloadError(f"the mix cannot be served: {fault}")
        return cls(requests, list(accumulate(counts)))

    def request(self, arrival_s: float, rng: random.Random) -> Planned:
        position = bisect(self.cumulative, rng.random() * self.cumulative[-1])
        return replace(self.requests[min(position, len(self.requests) - 1)], arrival_s=arrival_s)


def _with_answers(mix: Mix) -> Iterator[tuple[Form, int, float]]:
    """Forms of requests that came, each with tokens of an answer and how often both were seen together: as those that ended say, of the same
    form if there are some.
    """
    ended = [form for form in mix.forms if form.answered]
    usual = sum(form.output_tokens for form in ended) / max(1, sum(form.answered for form in ended))
    for form in mix.forms:
        if not form.requests:
            continue
        alike = [answer for answer in ended if answer.key[:-1] == form.key[:-1]]
        whole = sum(answer.answered for answer in alike)
        for answer in alike:
            yield form, max(1, round(answer.output_tokens / answer.answered)), form.requests * answer.answered / whole
        if not alike:
            yield form, max(1, round(usual)), float(form.requests)


def request_of(form: Form, output_tokens: int) -> Planned:
    """A request that stands for those of a form, without its text."""
    items = round(form.items / form.count)
    images: tuple[Size, ...] = ()
    videos: tuple[Clip, ...] = ()
    sounds_s: tuple[float, ...] = ()
    if items:
        side = min(MAX_SIDE_PIXELS, max(1, round(sqrt(form.pixels / max(1, form.frames)))))
        size, seconds = Size(side, side), max(0.1, form.seconds / form.items)
        match form.kind:
            case "video":
                per_s = max(1, round(form.frames / form.items / seconds))
                videos = (Clip(size, seconds, per_s),) * items
            case "audio":
                sounds_s = (seconds,) * items
            case _:
                images = (size,) * items
    return Planned(0.0, 0, images, output_tokens, videos, sounds_s)
