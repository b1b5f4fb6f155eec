"""What the requests of a workload need, by a sample of them: items, prompts, answers and bytes, in few forms."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from triptych.domain.instance import ModelInfo
from triptych.domain.mix import NO_REQUESTS, Form, Mix
from triptych.errors import TriptychError
from triptych.families.base import Family
from triptych.policy.attainment import form_of
from triptych.policy.sharding import ShardLimits
from triptych.sim.prepare import Prompts
from triptych.sim.queues.request import ItemSize
from triptych.workload.requests import Kind, Planned, WorkloadError

MOST_FORMS = 48
"""Forms of requests that are told apart."""
SAMPLE = 300
"""Requests of a sample, about."""


@dataclass(frozen=True, slots=True)
class Need:
    """Requests of one form."""

    kind: Kind
    item_tokens: tuple[int, ...]
    """Embedding tokens of each item."""
    item_pixels: tuple[int, ...]
    """Pixels of each image, or of a video's frames; samples of a sound."""
    embedding_nbytes: int
    """Of all items."""
    prompt_tokens: int
    output_tokens: int
    share: float
    """Of all requests that can be served."""

    @property
    def items(self) -> int:
        return len(self.item_tokens)


@dataclass(frozen=True, slots=True)
class Demand:
    """Needs of a workload. The order is by kind and size."""

    needs: Sequence[Need]
    burstiness: float
    """Squared coefficient of variation of the gaps between arrivals."""
    served: float
    """Share of the requests that the model can serve: of those whose prompt it takes."""
    mix: Mix = NO_REQUESTS
    """The sample as routers count requests."""

    @property
    def tokens(self) -> float:
        """Tokens of prompt and answer of a request, mean."""
        return sum(need.share * (need.prompt_tokens + need.output_tokens) for need in self.needs)

    @classmethod
    def of(cls, requests: Sequence[Planned], family: Family, model: ModelInfo, burstiness: float) -> "Demand":
        """Raises WorkloadError if the model can serve none of the requests."""
        sampled = requests[:: max(1, len(requests) // SAMPLE)]
        counts: Counter[Need] = Counter()
        forms: list[Form] = []
        fault = ""
        prompts = Prompts(family, model, ShardLimits())
        for number, planned in enumerate(sampled):
            try:
                shape = prompts.shape(number, planned)
                prompts.check_length(number, planned, kv_tokens=0, kv_block_tokens=1)
            except TriptychError as error:
                fault = error.message
                continue
            sizes = [ItemSize.of(item) for item in shape.items]
            need = Need(
                planned.kind,
                tuple(size.embedding_tokens for size in sizes),
                tuple(size.pixels for size in sizes),
                sum(size.nbytes for size in sizes),
                shape.tokens + planned.text_tokens,
                planned.output_tokens,
                share=0.0,
            )
            counts[need] += 1
            form = form_of([item.info for item in shape.items], need.prompt_tokens)
            forms += [form, form.after_answer(need.output_tokens)]
        served = sum(counts.values())
        if not served:
            raise WorkloadError(f"no request can be served: {fault}")
        return cls(tuple(_forms(counts)), burstiness, served / len(sampled), Mix.of(forms))


def _forms(counts: Counter[Need]) -> Iterator[Need]:
    """At most ``MOST_FORMS``: of those that are next to each other, the middle one stands for all."""
    whole = sum(counts.values())
    ordered = sorted(
        counts, key=lambda need: (need.kind, sum(need.item_tokens), need.prompt_tokens, need.output_tokens)
    )
    size = -(-len(ordered) // MOST_FORMS)
    for first in range(0, len(ordered), size):
        alike = ordered[first : first + size]
        middle = alike[len(alike) // 2]
        share = sum(counts[need] for need in alike) / whole
        yield Need(
            middle.kind,
            middle.item_tokens,
            middle.item_pixels,
            middle.embedding_nbytes,
            middle.prompt_tokens,
            middle.output_tokens,
            share,
        )
