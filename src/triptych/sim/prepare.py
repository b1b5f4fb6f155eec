"""Prompts of planned requests: as many tokens and items as the plan says, without tokenizer, template and media."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from triptych.domain.chat import ChatRequest, MediaPart, Message
from triptych.domain.embedding import slot_nbytes
from triptych.domain.instance import ModelInfo
from triptych.domain.item_plan import ItemPlan, content_of
from triptych.domain.media import MediaInfo, Modality, digest_of
from triptych.domain.resolving import ResolveRequest
from triptych.domain.sampling import SamplingParams
from triptych.domain.tenant import Tenant
from triptych.errors import ContextTooLong, InvalidMedia
from triptych.families.base import Family, Placeholders, Span, as_in_request, filled_positions, refuse_unless, units_of
from triptych.policy import admission
from triptych.policy.sharding import ShardLimits, can_split
from triptych.services.router.prepare import Prompted
from triptych.workload.requests import TEMPLATE_TOKENS, Planned

_SEPARATOR, _TEXT = 1, 2
"""Ids of separators within an item and of text, unless they are placeholders."""
_FIRST_OWN = 1 << 20
"""The first token of each prompt is a number from here on, so that prompts share no prefix."""
_SAMPLE_RATE_HZ = 16_000
_ID_NBYTES = 8


def chat_request(number: int, planned: Planned, model: str, *, timeout_s: float) -> ChatRequest:
    """The request of a plan. Its items have a few bytes, by which they are told apart."""
    items = [
        *((Modality.IMAGE, at) for at in range(len(planned.images))),
        *((Modality.VIDEO, at) for at in range(len(planned.videos))),
        *((Modality.AUDIO, at) for at in range(len(planned.sounds_s))),
    ]
    media = tuple(MediaPart(modality, item_bytes(number, modality, at)) for modality, at in items)
    return ChatRequest(
        request_id=f"request-{number}",
        model=model,
        messages=(Message("user", media),),
        sampling=SamplingParams(max_tokens=planned.output_tokens, temperature=0.0),
        timeout_s=timeout_s,
        tenant=Tenant(planned.tenant) if planned.tenant else None,
    )


def item_bytes(number: int, modality: Modality, at: int) -> bytes:
    """Bytes that stand for the item of a request, the ``at``-th of its modality, and tells it from all others."""
    return number.to_bytes(_ID_NBYTES, "big") + modality.value.encode() + at.to_bytes(2, "big")


def media_infos(planned: Planned, family: Family, media: Sequence[MediaPart]) -> tuple[MediaInfo, ...]:
    """Infos that a header would give of the items: images, videos, sounds. Raises InvalidMedia for what the model does not take."""
    known = iter(media)

    def info(modality: Modality, form: str, width: int = 0, height: int = 0) -> MediaInfo:
        data = next(known).data
        return MediaInfo(modality, form, width, height, len(data), digest_of(data))

    images = [info(Modality.IMAGE, "png", size.width, size.height) for size in planned.images]
    videos = [
        replace(
            info(Modality.VIDEO, "mp4", clip.size.width, clip.size.height),
            frames=max(1, round(clip.seconds * clip.frames_per_s)),
            duration_s=clip.seconds,
        )
        for clip in planned.videos
    ]
    sounds = [
        replace(
            info(Modality.AUDIO, "wav"),
            samples=max(1, round(seconds * _SAMPLE_RATE_HZ)),
            sample_rate_hz=_SAMPLE_RATE_HZ,
            duration_s=seconds,
        )
        for seconds in planned.sounds_s
    ]
    infos = (*images, *videos, *sounds)
    for item in infos:
        refuse_unless(item, *family.replacement_targets)
    return as_in_request(family, infos)


class PlannedPrepare:
    """``services.router.prepare.Prepare`` of the requests that ``expect`` was told of."""

    def __init__(self, family: Family) -> None:
        self._family = family
        self._planned: dict[str, tuple[int, Planned]] = {}
        placeholders = family.placeholder_ids
        self._separator, self._text = (
            next(token for token in range(first, first + len(placeholders) + 1) if token not in placeholders)
            for first in (_SEPARATOR, _TEXT + len(placeholders))
        )

    @property
    def counts_at_once(self) -> bool:
        return True

    def expect(self, request: ChatRequest, number: int, planned: Planned) -> None:
        self._planned[request.request_id] = number, planned

    def forget(self, request: ChatRequest) -> None:
        self._planned.pop(request.request_id, None)

    def __call__(self, request: ChatRequest, model: ModelInfo) -> Prompted:
        """Raises InvalidMedia and ContextTooLong, as with a real prompt."""
        number, planned = self._planned[request.request_id]
        infos = media_infos(planned, self._family, request.media)
        token_ids: list[int] = [_FIRST_OWN + number]
        spans: list[Span] = []
        for info in infos:
            start, filled = len(token_ids), 0
            for part in self._family.prompt_replacement(info):
                if isinstance(part, Placeholders):
                    start = start if filled else len(token_ids)
                    token_ids += [part.token_id] * part.count
                    filled += part.count
                else:
                    token_ids.append(self._separator)
            spans.append(Span(start, filled))
        token_ids += [self._text] * (planned.text_tokens + TEMPLATE_TOKENS - 1)
        if len(token_ids) + planned.output_tokens > model.context_length:
            raise ContextTooLong(
                f"the prompt has {len(token_ids)} tokens and the answer {planned.output_tokens}; the model's context is "
                f"{model.context_length}",
                param="messages",
            )
        prompt = tuple(token_ids)
        items = [
            self._plan(at, request.media[at], info, span, model, prompt)
            for at, (info, span) in enumerate(zip(infos, spans, strict=True))
        ]
        placeholder_ids = self._family.placeholder_ids
        return Prompted(prompt, tuple(items), request.sampling, placeholder_ids=placeholder_ids)

    def items(self, request: ResolveRequest, model: ModelInfo) -> tuple[ItemPlan, ...]:
        """Raises InvalidMedia: nothing is resolved here."""
        del request, model
        raise InvalidMedia("a simulated workload has chats alone")

    def spell(self, token_ids: Sequence[int]) -> tuple[str, ...]:
        return ("",) * len(token_ids)

    def _plan(
        self, number: int, part: MediaPart, info: MediaInfo, span: Span, model: ModelInfo, prompt: tuple[int, ...]
    ) -> ItemPlan:
        tensors = self._family.outputs(info, model.dtype)
        units = units_of(self._family, info, span.tokens)
        starts: tuple[int, ...] = ()
        if len(units) > 1:
            positions = filled_positions(prompt, span, self._family.placeholder_ids)
            starts = tuple(positions[done] for done in (0, *accumulate(units[:-1])))
        return ItemPlan(
            item=number,
            param=f"messages[0].content[{number}]",
            media=part.data,
            info=info,
            content=content_of(info.digest, None, b""),
            start=span.start,
            tokens=span.tokens,
            tensors=tensors,
            nbytes=slot_nbytes(tensors),
            units=units,
            unit_starts=starts,
        )


@dataclass(frozen=True, slots=True)
class Shape:
    """What requests with the same items have in common."""

    items: tuple[ItemPlan, ...]
    tokens: int
    """Of the prompt, but for its text."""
    divides: bool
    """Whether an item can be split over encoders."""


class Prompts:
    """Prompts of planned requests as counts. Those with the same items are prepared once."""

    def __init__(self, family: Family, model: ModelInfo, limits: ShardLimits) -> None:
        self._limits = limits
        self._prepare = PlannedPrepare(family)
        self._model = model
        self._shapes: dict[object, Shape] = {}
        """By the items."""

    def shape(self, number: int, planned: Planned) -> Shape:
        """``number``: in the plan. Raises InvalidMedia."""
        key = _media(planned)
        if (shape := self._shapes.get(key)) is None:
            prompted = self._prepared(number, replace(planned, text_tokens=0, output_tokens=1))
            divides = can_split(prompted.items, self._limits)
            shape = self._shapes[key] = Shape(prompted.items, len(prompted.token_ids), divides)
        return shape

    def tokens(self, planned: Planned) -> int:
        """Of the prompt of a request whose shape is known."""
        return self._shapes[_media(planned)].tokens + planned.text_tokens

    def check_length(self, number: int, planned: Planned, *, kv_tokens: int, kv_block_tokens: int) -> None:
        """Raise ContextTooLong as the router would. ``kv_tokens``: most that an instance can hold for a request; 0 if unknown."""
        tokens = self.tokens(planned)
        longest = min(self._model.context_length, kv_tokens or self._model.context_length)
        if tokens + planned.output_tokens <= longest:
            return
        prompted = self._prepared(number, planned)
        admission.complete(
            prompted.sampling,
            prompt_tokens=tokens,
            context_length=self._model.context_length,
            kv_tokens=kv_tokens,
            kv_block_tokens=kv_block_tokens,
        )

    def _prepared(self, number: int, planned: Planned) -> Prompted:
        request = chat_request(number, planned, self._model.model_id, timeout_s=1.0)
        self._prepare.expect(request, number, planned)
        try:
            return self._prepare(request, self._model)
        finally:
            self._prepare.forget(request)


def _media(planned: Planned) -> object:
    """What a request's items are like; equal for those of the same form."""
    return planned.images if planned.kind in ("text", "image") else (planned.images, planned.videos, planned.sounds_s)
