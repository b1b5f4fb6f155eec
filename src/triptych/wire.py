"""The wire contract (``triptych.v1``) to the domain and back, and errors to statuses and back.

What comes in is not trusted: an enum that is not set, a digest of another length or a shape out of bounds is refused
with InvalidRequest, so that behind this module only well-formed domain objects exist.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from triptych import errors
from triptych.domain.chat import ChatRequest, MediaPart, Message, Part, SpeakerRole, TextPart, ToolCall, ToolChoice
from triptych.domain.embedding import DType, TensorSpec, Ticket
from triptych.domain.encoding import EncodeRequest, EncodeResult, LeaseRequest
from triptych.domain.generation import (
    Alternative,
    ChatEvent,
    ChatFinished,
    ChoiceFinished,
    Finished,
    FinishReason,
    Placement,
    PullReport,
    Ready,
    TextEvent,
    TextRequest,
    TokenChunk,
    TokenLogprobs,
    ToolCallMade,
    Usage,
)
from triptych.domain.instance import EncoderLoad, InstanceInfo, ModelInfo, TextLoad, TransportOffer
from triptych.domain.media import MediaInfo, Modality, Shard
from triptych.domain.sampling import Grammar, ResponseFormat, SamplingParams
from triptych.domain.stage import Role
from triptych.domain.timeline import ItemTimeline, Outcome, Readiness, Timeline
from triptych.v1 import common_pb2, encoder_pb2, router_pb2, text_pb2

DIGEST_NBYTES = 32
LEASE_ID_NBYTES = 16
ROTATIONS_DEG = (0, 90, 180, 270)
MAX_TENSORS = 64
MAX_DIMENSIONS = 8
MAX_OPTIONS = 16
MAX_TENANT_SALT_NBYTES = 256

E = TypeVar("E", bound=Enum)

# --- enums -----------------------------------------------------------------------------------------------------------

_MODALITY: Mapping[Modality, common_pb2.Modality] = {
    Modality.IMAGE: common_pb2.MODALITY_IMAGE,
    Modality.VIDEO: common_pb2.MODALITY_VIDEO,
    Modality.AUDIO: common_pb2.MODALITY_AUDIO,
}
_DTYPE: Mapping[DType, common_pb2.DType] = {
    DType.F32: common_pb2.DTYPE_F32,
    DType.F16: common_pb2.DTYPE_F16,
    DType.BF16: common_pb2.DTYPE_BF16,
    DType.I64: common_pb2.DTYPE_I64,
    DType.I32: common_pb2.DTYPE_I32,
    DType.U8: common_pb2.DTYPE_U8,
    DType.BOOL: common_pb2.DTYPE_BOOL,
}
_ROLE: Mapping[Role, common_pb2.Role] = {
    Role.E: common_pb2.ROLE_E,
    Role.P: common_pb2.ROLE_P,
    Role.D: common_pb2.ROLE_D,
    Role.PD: common_pb2.ROLE_PD,
    Role.EP: common_pb2.ROLE_EP,
    Role.ED: common_pb2.ROLE_ED,
    Role.EPD: common_pb2.ROLE_EPD,
}
_FINISH: Mapping[FinishReason, common_pb2.FinishReason] = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.TOOL_CALLS: common_pb2.FINISH_REASON_TOOL_CALLS,
}
_GRAMMAR: Mapping[Grammar, common_pb2.Grammar] = {
    Grammar.JSON_OBJECT: common_pb2.GRAMMAR_JSON_OBJECT,
    Grammar.JSON_SCHEMA: common_pb2.GRAMMAR_JSON_SCHEMA,
    Grammar.LARK: common_pb2.GRAMMAR_LARK,
}
_SPEAKER: Mapping[SpeakerRole, router_pb2.SpeakerRole] = {
    "system": router_pb2.SPEAKER_ROLE_SYSTEM,
    "user": router_pb2.SPEAKER_ROLE_USER,
    "assistant": router_pb2.SPEAKER_ROLE_ASSISTANT,
    "tool": router_pb2.SPEAKER_ROLE_TOOL,
}
_OUTCOME: Mapping[Outcome, router_pb2.Outcome] = {
    Outcome.RUNNING: router_pb2.OUTCOME_RUNNING,
    Outcome.DONE: router_pb2.OUTCOME_DONE,
    Outcome.FAILED: router_pb2.OUTCOME_FAILED,
    Outcome.CANCELLED: router_pb2.OUTCOME_CANCELLED,
}

K = TypeVar("K")
V = TypeVar("V")


def _from_enum(table: Mapping[K, V], value: V, name: str) -> K:
    for domain, wire in table.items():
        if wire == value:
            return domain
    raise errors.InvalidRequest(f"{name} is not set to a known value (got {value})", param=name)


def _digest(value: bytes, name: str) -> bytes:
    if len(value) != DIGEST_NBYTES:
        raise errors.InvalidRequest(f"{name} has {len(value)} bytes, not {DIGEST_NBYTES}", param=name)
    return value


def _lease_id(value: bytes, name: str = "lease_id") -> bytes:
    if len(value) != LEASE_ID_NBYTES:
        raise errors.InvalidRequest(f"{name} has {len(value)} bytes, not {LEASE_ID_NBYTES}", param=name)
    return value


def _duration(value: float, name: str) -> float:
    if not (math.isfinite(value) and value >= 0):
        raise errors.InvalidRequest(f"{name} is {value}, not a duration in seconds", param=name)
    return value


# --- shared messages -------------------------------------------------------------------------------------------------


def media_info_to_wire(info: MediaInfo) -> common_pb2.MediaInfo:
    return common_pb2.MediaInfo(
        modality=_MODALITY[info.modality],
        format=info.format,
        width=info.width,
        height=info.height,
        nbytes=info.nbytes,
        digest=info.digest,
        frames=info.frames,
        duration_s=info.duration_s,
        samples=info.samples,
        sample_rate_hz=info.sample_rate_hz,
        rotation_deg=info.rotation_deg,
        options=dict(info.options),
    )


def media_info_from_wire(message: common_pb2.MediaInfo) -> MediaInfo:
    if message.rotation_deg not in ROTATIONS_DEG:
        raise errors.InvalidRequest(f"info.rotation_deg is {message.rotation_deg}, not one of {ROTATIONS_DEG}")
    if len(message.options) > MAX_OPTIONS:
        raise errors.InvalidRequest(f"an item has {len(message.options)} options, the limit is {MAX_OPTIONS}")
    return MediaInfo(
        modality=_from_enum(_MODALITY, message.modality, "modality"),
        format=message.format,
        width=message.width,
        height=message.height,
        nbytes=message.nbytes,
        digest=_digest(message.digest, "info.digest"),
        frames=message.frames,
        duration_s=_duration(message.duration_s, "info.duration_s"),
        samples=message.samples,
        sample_rate_hz=message.sample_rate_hz,
        rotation_deg=message.rotation_deg,
        options=tuple(sorted(message.options.items())),
    )


def shard_to_wire(shard: Shard) -> common_pb2.Shard:
    return common_pb2.Shard(first=shard.first, count=shard.count, of=shard.of)


def shard_from_wire(message: common_pb2.Shard) -> Shard:
    if not 0 < message.count <= message.of - message.first:
        raise errors.InvalidRequest(f"a shard has {message.count} units from {message.first} on, of {message.of}")
    return Shard(message.first, message.count, message.of)


def ticket_to_wire(ticket: Ticket) -> common_pb2.Ticket:
    return common_pb2.Ticket(
        key=ticket.key,
        holder=ticket.holder,
        epoch=ticket.epoch,
        offset=ticket.offset,
        payload_nbytes=ticket.payload_nbytes,
        generation=ticket.generation,
        checksum=ticket.checksum,
        tensors=[
            common_pb2.TensorSpec(name=spec.name, dtype=_DTYPE[spec.dtype], shape=spec.shape) for spec in ticket.tensors
        ],
        tokens=ticket.tokens,
        lease_id=ticket.lease_id,
        lease_s=ticket.lease_s,
    )


def ticket_from_wire(message: common_pb2.Ticket) -> Ticket:
    if len(message.tensors) > MAX_TENSORS:
        raise errors.InvalidRequest(f"ticket has {len(message.tensors)} tensors, at most {MAX_TENSORS} are taken")
    return Ticket(
        key=_digest(message.key, "ticket.key"),
        holder=message.holder,
        epoch=message.epoch,
        offset=message.offset,
        payload_nbytes=message.payload_nbytes,
        generation=message.generation,
        checksum=message.checksum,
        tensors=tuple(_tensor_spec(spec) for spec in message.tensors),
        tokens=message.tokens,
        lease_id=_lease_id(message.lease_id),
        lease_s=_duration(message.lease_s, "lease_s"),
    )


def _tensor_spec(message: common_pb2.TensorSpec) -> TensorSpec:
    if len(message.shape) > MAX_DIMENSIONS:
        raise errors.InvalidRequest(f"tensor has {len(message.shape)} dimensions, at most {MAX_DIMENSIONS} are taken")
    return TensorSpec(message.name, _from_enum(_DTYPE, message.dtype, "dtype"), tuple(message.shape))


def sampling_to_wire(params: SamplingParams) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        seed=params.seed,
        n=params.n,
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        repetition_penalty=params.repetition_penalty,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        logit_bias=[common_pb2.LogitBias(token_id=token_id, bias=bias) for token_id, bias in params.logit_bias],
        logprobs=params.logprobs,
        response_format=_response_format_to_wire(params.response_format),
    )


def _response_format_to_wire(response_format: ResponseFormat | None) -> common_pb2.ResponseFormat | None:
    if response_format is None:
        return None
    return common_pb2.ResponseFormat(grammar=_GRAMMAR[response_format.grammar], schema=response_format.schema)


def sampling_from_wire(message: common_pb2.SamplingParams) -> SamplingParams:
    return SamplingParams(
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        min_p=message.min_p,
        seed=message.seed if message.HasField("seed") else None,
        n=message.n,
        max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
        min_tokens=message.min_tokens,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        repetition_penalty=message.repetition_penalty,
        frequency_penalty=message.frequency_penalty,
        presence_penalty=message.presence_penalty,
        logit_bias=tuple((entry.token_id, entry.bias) for entry in message.logit_bias),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        response_format=ResponseFormat(
            _from_enum(_GRAMMAR, message.response_format.grammar, "response_format"), message.response_format.schema
        )
        if message.HasField("response_format")
        else None,
    )


def model_to_wire(model: ModelInfo) -> common_pb2.ModelInfo:
    return common_pb2.ModelInfo(
        model_id=model.model_id,
        revision=model.revision,
        dtype=_DTYPE[model.dtype],
        hidden_size=model.hidden_size,
        context_length=model.context_length,
    )


def model_from_wire(message: common_pb2.ModelInfo) -> ModelInfo:
    return ModelInfo(
        model_id=message.model_id,
        revision=message.revision,
        dtype=_from_enum(_DTYPE, message.dtype, "model.dtype"),
        hidden_size=message.hidden_size,
        context_length=message.context_length,
    )


def instance_to_wire(info: InstanceInfo) -> common_pb2.InstanceInfo:
    return common_pb2.InstanceInfo(
        instance_id=info.instance_id,
        epoch=info.epoch,
        role=_ROLE[info.role],
        model=model_to_wire(info.model),
        arena_bytes=info.arena_bytes,
        offers=[
            common_pb2.TransportOffer(backend=offer.backend, host=offer.host, metadata=offer.metadata)
            for offer in info.offers
        ],
        encoder_version=info.encoder_version,
        max_items=info.max_items,
        kv_tokens=info.kv_tokens,
    )


def instance_from_wire(message: common_pb2.InstanceInfo) -> InstanceInfo:
    return InstanceInfo(
        instance_id=message.instance_id,
        epoch=message.epoch,
        role=_from_enum(_ROLE, message.role, "role"),
        model=model_from_wire(message.model),
        arena_bytes=message.arena_bytes,
        offers=tuple(TransportOffer(offer.backend, offer.host, offer.metadata) for offer in message.offers),
        encoder_version=message.encoder_version,
        max_items=message.max_items,
        kv_tokens=message.kv_tokens,
    )


def _chunk_to_wire(chunk: TokenChunk) -> common_pb2.TokenChunk:
    if not chunk.logprobs:  # every token passes here
        return common_pb2.TokenChunk(token_ids=chunk.token_ids, text=chunk.text, choice=chunk.choice)
    return common_pb2.TokenChunk(
        token_ids=chunk.token_ids,
        text=chunk.text,
        choice=chunk.choice,
        logprobs=[
            common_pb2.TokenLogprobs(
                chosen=_alternative_to_wire(entry.chosen), top=[_alternative_to_wire(one) for one in entry.top]
            )
            for entry in chunk.logprobs
        ],
    )


def _chunk_from_wire(message: common_pb2.TokenChunk) -> TokenChunk:
    if not message.logprobs:
        return TokenChunk(tuple(message.token_ids), message.text, message.choice)
    logprobs = (
        TokenLogprobs(_alternative_from_wire(entry.chosen), tuple(_alternative_from_wire(one) for one in entry.top))
        for entry in message.logprobs
    )
    return TokenChunk(tuple(message.token_ids), message.text, message.choice, tuple(logprobs))


def _alternative_to_wire(one: Alternative) -> common_pb2.Alternative:
    return common_pb2.Alternative(token_id=one.token_id, token=one.token, logprob=one.logprob)


def _alternative_from_wire(message: common_pb2.Alternative) -> Alternative:
    return Alternative(message.token_id, message.token, message.logprob)


# --- encoder ---------------------------------------------------------------------------------------------------------


def encode_request_to_wire(request: EncodeRequest) -> encoder_pb2.EncodeRequest:
    return encoder_pb2.EncodeRequest(
        request_id=request.request_id,
        item=request.item,
        model=request.model,
        media=request.media,
        info=media_info_to_wire(request.info),
        tokens=request.tokens,
        tenant_salt=request.tenant_salt,
        lease_s=request.lease_s,
        reader_lease=request.reader_lease,
        holder_lease=request.holder_lease,
        shard=None if request.shard is None else shard_to_wire(request.shard),
    )


def encode_request_from_wire(message: encoder_pb2.EncodeRequest, timeout_s: float) -> EncodeRequest:
    return EncodeRequest(
        request_id=message.request_id,
        item=message.item,
        model=message.model,
        media=message.media,
        info=media_info_from_wire(message.info),
        tokens=message.tokens,
        tenant_salt=_salt(message.tenant_salt),
        timeout_s=timeout_s,
        lease_s=_duration(message.lease_s, "lease_s"),
        reader_lease=_lease_id(message.reader_lease, "reader_lease"),
        holder_lease=_lease_id(message.holder_lease, "holder_lease"),
        shard=shard_from_wire(message.shard) if message.HasField("shard") else None,
    )


def encode_result_to_wire(result: EncodeResult) -> encoder_pb2.EncodeResponse:
    return encoder_pb2.EncodeResponse(
        ticket=ticket_to_wire(result.ticket),
        holder_lease=result.holder_lease,
        cached=result.cached,
        queue_s=result.queue_s,
        encode_s=result.encode_s,
    )


def encode_result_from_wire(message: encoder_pb2.EncodeResponse) -> EncodeResult:
    return EncodeResult(
        ticket=ticket_from_wire(message.ticket),
        holder_lease=_lease_id(message.holder_lease, "holder_lease"),
        cached=message.cached,
        queue_s=message.queue_s,
        encode_s=message.encode_s,
    )


def lease_request_to_wire(request: LeaseRequest) -> encoder_pb2.LeaseRequest:
    return encoder_pb2.LeaseRequest(
        key=request.key, generation=request.generation, lease_s=request.lease_s, lease_id=request.lease_id
    )


def lease_request_from_wire(message: encoder_pb2.LeaseRequest, timeout_s: float) -> LeaseRequest:
    return LeaseRequest(
        key=_digest(message.key, "key"),
        generation=message.generation,
        lease_id=_lease_id(message.lease_id, "lease_id"),
        lease_s=_duration(message.lease_s, "lease_s"),
        timeout_s=timeout_s,
    )


def encoder_load_to_wire(load: EncoderLoad) -> encoder_pb2.EncoderLoad:
    return encoder_pb2.EncoderLoad(
        pending_tokens=load.pending_tokens,
        pending_items=load.pending_items,
        arena_bytes=load.arena_bytes,
        arena_leased_bytes=load.arena_leased_bytes,
        cached_embeddings=load.cached_embeddings,
        draining=load.draining,
    )


def encoder_load_from_wire(message: encoder_pb2.EncoderLoad) -> EncoderLoad:
    return EncoderLoad(
        pending_tokens=message.pending_tokens,
        pending_items=message.pending_items,
        arena_bytes=message.arena_bytes,
        arena_leased_bytes=message.arena_leased_bytes,
        cached_embeddings=message.cached_embeddings,
        draining=message.draining,
    )


# --- text ------------------------------------------------------------------------------------------------------------


def text_request_to_wire(request: TextRequest) -> text_pb2.TextRequest:
    return text_pb2.TextRequest(
        request_id=request.request_id,
        model=request.model,
        token_ids=request.token_ids,
        placements=[
            text_pb2.Placement(
                item=place.item, start=place.start, ticket=ticket_to_wire(place.ticket), continues=place.continues
            )
            for place in request.placements
        ],
        sampling=sampling_to_wire(request.sampling),
        priority=request.priority,
        tenant_salt=request.tenant_salt,
    )


def text_request_from_wire(message: text_pb2.TextRequest, timeout_s: float) -> TextRequest:
    return TextRequest(
        request_id=message.request_id,
        model=message.model,
        token_ids=tuple(message.token_ids),
        placements=tuple(
            Placement(place.item, place.start, ticket_from_wire(place.ticket), place.continues)
            for place in message.placements
        ),
        sampling=sampling_from_wire(message.sampling),
        timeout_s=timeout_s,
        priority=message.priority,
        tenant_salt=_salt(message.tenant_salt),
    )


def text_event_to_wire(event: TextEvent) -> text_pb2.TextEvent:
    match event:
        case TokenChunk():
            return text_pb2.TextEvent(chunk=_chunk_to_wire(event))
        case Ready():
            pulls = [
                text_pb2.PullReport(
                    item=pull.item,
                    backend=pull.backend,
                    nbytes=pull.nbytes,
                    duration_s=pull.duration_s,
                    cached=pull.cached,
                )
                for pull in event.pulls
            ]
            return text_pb2.TextEvent(ready=text_pb2.Ready(pulls=pulls, queue_s=event.queue_s, pull_s=event.pull_s))
        case Finished():
            return text_pb2.TextEvent(
                finished=text_pb2.Finished(
                    reason=_FINISH[event.reason],
                    completion_tokens=event.completion_tokens,
                    prefill_s=event.prefill_s,
                    decode_s=event.decode_s,
                    choice=event.choice,
                )
            )


def text_event_from_wire(message: text_pb2.TextEvent) -> TextEvent:
    match message.WhichOneof("event"):
        case "chunk":
            return _chunk_from_wire(message.chunk)
        case "ready":
            pulls = (
                PullReport(pull.item, pull.backend, pull.nbytes, pull.duration_s, pull.cached)
                for pull in message.ready.pulls
            )
            return Ready(tuple(pulls), message.ready.queue_s, message.ready.pull_s)
        case "finished":
            done = message.finished
            reason = _from_enum(_FINISH, done.reason, "finished.reason")
            return Finished(reason, done.completion_tokens, done.prefill_s, done.decode_s, done.choice)
        case _:
            raise errors.InternalError("the text instance sent an event of an unknown kind")


def text_load_to_wire(load: TextLoad) -> text_pb2.TextLoad:
    return text_pb2.TextLoad(
        pending_tokens=load.pending_tokens,
        waiting_requests=load.waiting_requests,
        running_requests=load.running_requests,
        draining=load.draining,
    )


def text_load_from_wire(message: text_pb2.TextLoad) -> TextLoad:
    return TextLoad(message.pending_tokens, message.waiting_requests, message.running_requests, message.draining)


# --- router ----------------------------------------------------------------------------------------------------------


def _write_part(part: Part, into: router_pb2.Part) -> None:
    match part:
        case TextPart():
            into.text = part.text
        case MediaPart():
            into.media.modality = _MODALITY[part.modality]
            into.media.data = part.data


def _part_from_wire(message: router_pb2.Part) -> Part:
    match message.WhichOneof("part"):
        case "text":
            return TextPart(message.text)
        case "media":
            return MediaPart(_from_enum(_MODALITY, message.media.modality, "media.modality"), message.media.data)
        case _:
            raise errors.InvalidRequest("a content part is neither text nor media", param="messages")


def _write_message(message: Message, into: router_pb2.Message) -> None:
    into.role = _SPEAKER[message.role]
    into.tool_calls.extend(_tool_call_to_wire(call) for call in message.tool_calls)
    into.tool_call_id = message.tool_call_id
    for part in message.parts:
        _write_part(part, into.parts.add())


def _message_from_wire(message: router_pb2.Message) -> Message:
    return Message(
        role=_from_enum(_SPEAKER, message.role, "messages.role"),
        parts=tuple(_part_from_wire(part) for part in message.parts),
        tool_calls=tuple(_tool_call_from_wire(call) for call in message.tool_calls),
        tool_call_id=message.tool_call_id,
    )


def _tool_call_to_wire(call: ToolCall) -> router_pb2.ToolCall:
    return router_pb2.ToolCall(call_id=call.call_id, name=call.name, arguments=call.arguments)


def _tool_call_from_wire(message: router_pb2.ToolCall) -> ToolCall:
    return ToolCall(message.call_id, message.name, message.arguments)


def _tool_choice_to_wire(choice: ToolChoice) -> router_pb2.ToolChoice | None:
    if choice == ToolChoice():
        return None
    return router_pb2.ToolChoice(required=choice.required, name=choice.name, one_call=not choice.parallel)


def _tool_choice_from_wire(message: router_pb2.ToolChoice) -> ToolChoice:
    return ToolChoice(message.required, message.name, not message.one_call)


def chat_request_to_wire(request: ChatRequest) -> router_pb2.ChatRequest:
    """Items are written where they belong: a message that is put into another is copied, at each level once more."""
    written = router_pb2.ChatRequest(
        request_id=request.request_id,
        model=request.model,
        sampling=sampling_to_wire(request.sampling),
        tenant_salt=request.tenant_salt,
        prompt=request.prompt,
        tools=request.tools,
        priority=request.priority,
        tool_choice=_tool_choice_to_wire(request.tool_choice),
    )
    for message in request.messages:
        _write_message(message, written.messages.add())
    return written


def chat_request_from_wire(message: router_pb2.ChatRequest, timeout_s: float) -> ChatRequest:
    return ChatRequest(
        request_id=message.request_id,
        model=message.model,
        messages=tuple(_message_from_wire(entry) for entry in message.messages),
        sampling=sampling_from_wire(message.sampling),
        timeout_s=timeout_s,
        tenant_salt=_salt(message.tenant_salt),
        prompt=message.prompt if message.HasField("prompt") else None,
        tools=message.tools,
        priority=message.priority,
        tool_choice=_tool_choice_from_wire(message.tool_choice),
    )


def _salt(value: bytes) -> bytes:
    if len(value) > MAX_TENANT_SALT_NBYTES:
        raise errors.InvalidRequest(
            f"tenant_salt has {len(value)} bytes, at most {MAX_TENANT_SALT_NBYTES} are taken", param="tenant_salt"
        )
    return value


def chat_event_to_wire(event: ChatEvent) -> router_pb2.ChatEvent:
    match event:
        case TokenChunk():
            return router_pb2.ChatEvent(chunk=_chunk_to_wire(event))
        case ToolCallMade():
            made = router_pb2.ToolCallMade(call=_tool_call_to_wire(event.call), index=event.index, choice=event.choice)
            return router_pb2.ChatEvent(tool_call=made)
        case ChoiceFinished():
            finished = router_pb2.ChoiceFinished(reason=_FINISH[event.reason], choice=event.choice)
            return router_pb2.ChatEvent(choice_finished=finished)
        case ChatFinished():
            usage = router_pb2.Usage(
                prompt_tokens=event.usage.prompt_tokens,
                completion_tokens=event.usage.completion_tokens,
                image_tokens=event.usage.image_tokens,
            )
            return router_pb2.ChatEvent(finished=router_pb2.ChatFinished(usage=usage))


def chat_event_from_wire(message: router_pb2.ChatEvent) -> ChatEvent:
    match message.WhichOneof("event"):
        case "chunk":
            return _chunk_from_wire(message.chunk)
        case "tool_call":
            made = message.tool_call
            return ToolCallMade(_tool_call_from_wire(made.call), made.index, made.choice)
        case "choice_finished":
            choice = message.choice_finished
            return ChoiceFinished(_from_enum(_FINISH, choice.reason, "choice_finished.reason"), choice.choice)
        case "finished":
            usage = message.finished.usage
            return ChatFinished(Usage(usage.prompt_tokens, usage.completion_tokens, usage.image_tokens))
        case _:
            raise errors.InternalError("the router sent an event of an unknown kind")


_ITEM_FIELDS = tuple(ItemTimeline.__dataclass_fields__)
_TIMELINE_FIELDS = tuple(name for name in Timeline.__dataclass_fields__ if name not in {"items", "outcome"})
"""Named alike on both sides, so they are carried over by name; a test holds the two to each other."""


def timeline_to_wire(timeline: Timeline) -> router_pb2.Timeline:
    message = router_pb2.Timeline(
        outcome=_OUTCOME[timeline.outcome],
        items=[
            router_pb2.ItemTimeline(**{name: getattr(item, name) for name in _ITEM_FIELDS}) for item in timeline.items
        ],
    )
    for name in _TIMELINE_FIELDS:
        setattr(message, name, getattr(timeline, name))
    return message


def timeline_from_wire(message: router_pb2.Timeline) -> Timeline:
    return Timeline(
        outcome=_from_enum(_OUTCOME, message.outcome, "outcome"),
        items=tuple(ItemTimeline(**{name: getattr(item, name) for name in _ITEM_FIELDS}) for item in message.items),
        **{name: getattr(message, name) for name in _TIMELINE_FIELDS},
    )


def readiness_to_wire(readiness: Readiness) -> router_pb2.ReadinessResponse:
    return router_pb2.ReadinessResponse(ready=readiness.ready, missing=readiness.missing, instances=readiness.instances)


def readiness_from_wire(message: router_pb2.ReadinessResponse) -> Readiness:
    return Readiness(message.ready, tuple(message.missing), tuple(message.instances))


# --- errors ----------------------------------------------------------------------------------------------------------

_CODE_KEY = "triptych-code"
_PARAM_KEY = "triptych-param"
_RETRY_AFTER_KEY = "triptych-retry-after-s"
_ITEMS_KEY = "triptych-items"
_TREE = errors.tree()
_BY_GRPC_CODE: Mapping[str, type[errors.TriptychError]] = {
    cls.grpc_code: cls
    for cls in (
        errors.InvalidRequest,
        errors.Unauthenticated,
        errors.PermissionDenied,
        errors.NotFound,
        errors.Cancelled,
        errors.InternalError,
    )
}


@dataclass(frozen=True, slots=True)
class Status:
    """An error as gRPC carries it: the code's name, the message, and trailing metadata with what is left."""

    grpc_code: str
    message: str
    metadata: tuple[tuple[str, str], ...]


def error_to_status(error: errors.TriptychError) -> Status:
    metadata = [(_CODE_KEY, error.code)]
    if error.param is not None:
        metadata.append((_PARAM_KEY, error.param.encode("ascii", "backslashreplace").decode("ascii")))
    if error.retry_after_s is not None:
        metadata.append((_RETRY_AFTER_KEY, repr(error.retry_after_s)))
    if isinstance(error, errors.TransferFailed):
        metadata.append((_ITEMS_KEY, ",".join(map(str, error.items))))
    return Status(error.grpc_code, error.message, tuple(metadata))


def error_from_status(
    grpc_code: str, message: str, metadata: Iterable[tuple[str, str | bytes]]
) -> errors.TriptychError:
    """The error of the tree that a peer meant; for what is no status of ours, the class nearest to the gRPC code.

    A connection that broke says UNAVAILABLE without our metadata: that is an InstanceLost. The messages of gRPC
    itself name addresses, so they are replaced.
    """
    found = {key: value for key, value in metadata if isinstance(value, str)}
    cls = _TREE.get(found.get(_CODE_KEY, ""))
    if cls is None:
        return _foreign_status(grpc_code)
    param = found.get(_PARAM_KEY)
    retry_after_s = _float_or_none(found.get(_RETRY_AFTER_KEY))
    if issubclass(cls, errors.TransferFailed):
        items = tuple(int(item) for item in found.get(_ITEMS_KEY, "").split(",") if item.isdecimal())
        return cls(message, items=items, param=param, retry_after_s=retry_after_s)
    return cls(message, param=param, retry_after_s=retry_after_s)


def _foreign_status(grpc_code: str) -> errors.TriptychError:
    match grpc_code:
        case "UNAVAILABLE":
            return errors.InstanceLost("the connection to the instance was lost")
        case "DEADLINE_EXCEEDED":
            return errors.DeadlineExceeded("the call did not end within its deadline")
        case "RESOURCE_EXHAUSTED":  # of gRPC itself: a message over the size that the peer takes
            return errors.RequestTooLarge("the message is larger than the peer takes")
        case _:
            return _BY_GRPC_CODE.get(grpc_code, errors.InternalError)(f"the call failed with {grpc_code}")


def _float_or_none(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None
