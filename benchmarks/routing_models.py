"""What ``benchmarks.routing`` serves, and the requests that it replays.

Two models by the arithmetic of their published sizes, on one H100 each (BF16 at 40 % of 990 TFLOPS, 80 % of 3.35 TB/s): nothing
here was measured. Both take as many tokens per image as the published ones, but embeddings are narrow.

- ``decoder-only``, after InternVL2-26B: an image has one token per 28 x 28 pixels, each of which is a position of the prompt.
  Vision encoder 5.5e9 parameters and 4 patches per token, 44 GFLOP: 0.11 ms per token. Language model 20e9: 0.1 ms per prompt
  token; 40 GB of weights per step, 15 ms; 0.2 MB of KV cache per token of context, 0.1 ms per sequence and step.
- ``cross-attention``, after Llama 3.2 Vision 11B: an image has one position, and 1,601 states for each of up to 4 tiles, of
  which the encoder always computes 4: 6,404 patches through 0.86e9 parameters and attention, 35 ms for any image. Language
  model 8e9: 0.04 ms per prompt token, 6 ms per step, 0.05 ms per sequence and step.

A pass of either encoder costs 5 ms more, and preprocessing 25 ns per pixel on one core.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tests.simulation.cluster import Engines
from tests.simulation.workload import Ask
from triptych.domain.chat import ChatRequest, MediaPart, Message, Part, TextPart
from triptych.domain.embedding import DType, embedding_tokens
from triptych.domain.engine import EngineRequest
from triptych.domain.media import MediaInfo, Modality
from triptych.domain.profile import EncodeRow, Measured, Origin, PrepareRow, Profile, ProfileIdentity
from triptych.domain.sampling import SamplingParams
from triptych.domain.stage import ModelPart, Stage
from triptych.domain.windows import ClassWindow
from triptych.engine.decoder.options import EngineOptions
from triptych.engine.delay import DelayEncoderEngine, DelayTextEngine, synthetic_decoder_profile
from triptych.families.base import Family
from triptych.families.mllama import Mllama
from triptych.policy.batching import largest_within
from triptych.policy.costs import Costs
from triptych.policy.iteration import ImageBudget
from triptych.policy.pool_facts import Profiles, isolated
from triptych.testing.fakes import FAKE_MODEL, FAKE_PLACEHOLDER_ID
from triptych.testing.media import png_outline
from triptych.testing.model import WORDS, FakeFamily
from triptych.virtual.offload import spend
from triptych.workload import traces
from triptych.workload.requests import Planned, Size, WorkloadError

MAX_TOKENS = 2048
"""Limit of every answer; how long it gets is not known before."""
_CONTEXT = 65_536
_MODEL = replace(FAKE_MODEL, context_length=_CONTEXT)
_DIGEST = "0" * 64
_SEQUENCES = 64
"""Sequences that a text instance computes together."""
_PREPARE_CORES = 8
_ENCODE_PASS_S = 0.005
_TPOT_FACTOR = 5.0
"""The objective of the budgeted monolith: of a step that decodes one sequence, as the router's default for ``tbt``."""
_BUDGET_TOKENS = 256
"""Of the image of 448 x 448 pixels in which an encoder's budget is measured."""


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    family: Family
    image_s: float
    """Of each image, beside the pass."""
    token_s: float
    """Of each of its tokens."""
    step_s: float
    sequence_s: float
    prompt_token_s: float

    @property
    def profiles(self) -> tuple[Profile, Profile]:
        encoder = Profile(
            ProfileIdentity(ModelPart.ENCODER, _DIGEST, frozenset({Stage.ENCODE}), "H100", DType.F32),
            Measured(Origin.SYNTHETIC, "", method="arithmetic"),
            encode=tuple(
                EncodeRow(tokens, items, _ENCODE_PASS_S + items * (self.image_s + self.token_s * tokens))
                for tokens in (1, 65_536)
                for items in (1, 64)
            ),
            prepare=tuple(
                PrepareRow(density * pixels, pixels, 25e-9 * pixels) for density in (0, 64) for pixels in (1, 1 << 26)
            ),
        )
        decoder = synthetic_decoder_profile(
            step_s=self.step_s,
            sequence_s=self.sequence_s,
            prefill_token_s=self.prompt_token_s,
            load_s=0.0,
            digest=_DIGEST,
        )
        return encoder, decoder

    @property
    def engines(self) -> Engines:
        encoder, decoder = self.profiles
        options = EngineOptions(max_sequences=_SEQUENCES)

        def text(_: str) -> DelayTextEngine:
            return DelayTextEngine(_MODEL, self.family, Costs(decoder), options, length=_length, sleep=spend)

        def image(_: str) -> DelayEncoderEngine:
            return DelayEncoderEngine(_MODEL, self.family, Costs(encoder), sleep=spend)

        return Engines(
            image,
            text,
            family=self.family,
            encoder_profile=encoder,
            decoder_profile=decoder,
            prepare_workers=_PREPARE_CORES,
        )

    @property
    def image_budget(self) -> ImageBudget:
        """As an instance that encodes as well measures it: beside a full step of decodes, within the objective."""
        encoder, decoder = map(Costs, self.profiles)
        left_s = _TPOT_FACTOR * decoder.decode_s(1, 1).value - decoder.decode_s(_SEQUENCES, 1).value
        items = largest_within(left_s, 64, lambda items: encoder.encode_s(_BUDGET_TOKENS, items).value)
        return ImageBudget(items * _BUDGET_TOKENS, 1 << 40)

    def tokens(self, size: Size) -> int:
        """Of an image: rows of its embedding."""
        info = MediaInfo(Modality.IMAGE, "png", size.width, size.height, 0, bytes(32))
        return embedding_tokens(self.family.outputs(info, DType.F32))

    def prompt_tokens(self, planned: Planned) -> int:
        """Positions of its prompt, but for a few of the template."""
        in_prompt = isinstance(self.family, FakeFamily)
        return planned.text_tokens + (sum(map(self.tokens, planned.images)) if in_prompt else len(planned.images))

    def isolated_ttft_s(self, planned: Planned, *, encoders: int) -> float:
        """Of a request that has the system to itself, by the profiles. Its images are spread over so many ``encoders``."""
        counts = ClassWindow(
            arrivals=1,
            items=len(planned.images),
            media_tokens=sum(map(self.tokens, planned.images)),
            pixels=sum(size.width * size.height for size in planned.images),
            prompt_tokens=self.prompt_tokens(planned),
        )
        alone = isolated(Profiles(*map(Costs, self.profiles)), counts, encoders=encoders)
        assert alone is not None, "both profiles are known"
        return alone.ttft_s


MODELS: Mapping[str, Model] = {
    model.name: model
    for model in (
        Model(
            "decoder-only",
            FakeFamily(patch_px=28, max_tokens_per_item=_CONTEXT, context_length=_CONTEXT),
            image_s=0.0,
            token_s=0.00011,
            step_s=0.015,
            sequence_s=0.0001,
            prompt_token_s=0.0001,
        ),
        Model(
            "cross-attention",
            Mllama(
                placeholder_id=FAKE_PLACEHOLDER_ID,
                hidden_size=FAKE_MODEL.hidden_size,
                context_length=_CONTEXT,
                tile_px=560,
                max_tiles=4,
                states_per_tile=1601,
            ),
            image_s=0.035,
            token_s=0.0,
            step_s=0.006,
            sequence_s=0.00005,
            prompt_token_s=0.00004,
        ),
    )
}


@dataclass(frozen=True, slots=True)
class Mixed:
    """A workload: the requests of a trace with a synthetic stream of text-only ones over it, by arrival."""

    requests: tuple[Planned, ...]
    """Requests that arrive within ``len(requests)`` seconds: one per second on average."""

    @classmethod
    def sampled(cls, directory: Path, count: int, seed: int) -> "Mixed":  # frozen
        """``count`` requests, of which ``_TEXT_SHARE`` are text only. Raises WorkloadError."""
        rng = random.Random(f"{seed}/requests")
        texts = round(_TEXT_SHARE * count)
        span = traces.Span(_FROM_S, _MARGIN * count / _TRACE_PER_S)
        requests = traces.load(directory, span, None, rng).requests
        of_trace = [request for request in requests if request.images][: count - texts]
        if len(of_trace) < count - texts:
            raise WorkloadError(f"{directory.name} has {len(of_trace)} requests with images from {_FROM_S:g} s on")
        with_images = [
            replace(request, images=request.images[:_MOST_IMAGES]) for request in _stretched(of_trace, count)
        ]
        at_s = 0.0
        overlay = [_text_only(at_s := at_s + rng.expovariate(1.0), rng) for _ in range(texts)]
        both = [*with_images, *_stretched(overlay, count)]
        return cls(tuple(sorted(both, key=lambda request: request.arrival_s)))

    def asks(self, rate_per_s: float | None, *, timeout_s: float) -> list[Ask]:
        """At this rate; None: all at once."""
        return [
            Ask(0.0 if rate_per_s is None else planned.arrival_s / rate_per_s, _request(number, planned, timeout_s))
            for number, planned in enumerate(self.requests)
        ]


def _stretched(requests: list[Planned], duration_s: float) -> list[Planned]:
    factor = duration_s / requests[-1].arrival_s
    return [replace(request, arrival_s=factor * request.arrival_s) for request in requests]


_FROM_S = 36_000.0
"""The tenth hour of the trace, which is as busy as the day gets."""
_TRACE_PER_S, _MARGIN = 12.0, 1.5
"""The trace's rate then, and how much longer is sampled than that many requests should take."""
_TEXT_SHARE = 1 / 3
"""Of the requests. In ModServe's trace text-only requests peak at 170 a minute, those with images at 450."""
_MOST_IMAGES = 16
"""In a request, as in ModServe section 5.1."""
_TEXT_TOKENS, _ANSWER_TOKENS = (800.0, 1.03), (150.0, 0.8)
"""Of text-only requests: log-normal, by median and sigma. The prompts' P90 is 3,000 tokens."""
_LONGEST_TEXT = 16_384


def _text_only(at_s: float, rng: random.Random) -> Planned:
    def drawn(median: float, sigma: float, most: int) -> int:
        return max(1, min(most, round(median * rng.lognormvariate(0.0, sigma))))

    return Planned(at_s, drawn(*_TEXT_TOKENS, _LONGEST_TEXT), (), drawn(*_ANSWER_TOKENS, MAX_TOKENS))


def _request(number: int, planned: Planned, timeout_s: float) -> ChatRequest:
    """The length of its answer is its seed, which the engine alone reads."""
    images: list[Part] = [
        MediaPart(Modality.IMAGE, png_outline(size.width, size.height, b"%d/%d" % (number, at)))
        for at, size in enumerate(planned.images)
    ]
    text = TextPart(" ".join(f"w{WORDS[(number + at) % len(WORDS)]}" for at in range(max(1, planned.text_tokens))))
    sampling = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, seed=min(planned.output_tokens, MAX_TOKENS))
    return ChatRequest(f"r{number}", FAKE_MODEL.model_id, (Message("user", (*images, text)),), sampling, timeout_s)


def _length(request: EngineRequest) -> int:
    assert request.sampling.seed is not None, "every request of this benchmark has one"
    return request.sampling.seed
