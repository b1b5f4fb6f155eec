"""Messages that several services have: items, tickets, sampling, what an instance is, chunks of text."""

from collections.abc import Mapping

from triptych import errors
from triptych.domain.embedding import DType, TensorSpec, Ticket
from triptych.domain.generation import (
    Alternative,
    FinishReason,
    TokenChunk,
    TokenLogprobs,
)
from triptych.domain.instance import InstanceInfo, ModelInfo, TransportOffer
from triptych.domain.media import MediaInfo, Modality, Shard
from triptych.domain.sampling import Grammar, ResponseFormat, SamplingParams
from triptych.domain.stage import Role
from triptych.v1 import common_pb2
from triptych.wire.checks import checked_address, checked_digest, checked_duration, checked_lease_id, from_enum

ROTATIONS_DEG = (0, 90, 180, 270)
MAX_TENSORS = 64
MAX_DIMENSIONS = 8
MAX_OPTIONS = 16

MODALITY: Mapping[Modality, common_pb2.Modality] = {
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
_GRAMMAR: Mapping[Grammar, common_pb2.Grammar] = {
    Grammar.JSON_OBJECT: common_pb2.GRAMMAR_JSON_OBJECT,
    Grammar.JSON_SCHEMA: common_pb2.GRAMMAR_JSON_SCHEMA,
    Grammar.LARK: common_pb2.GRAMMAR_LARK,
}


FINISH_REASON: Mapping[FinishReason, common_pb2.FinishReason] = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.TOOL_CALLS: common_pb2.FINISH_REASON_TOOL_CALLS,
}


def media_info_to_wire(info: MediaInfo) -> common_pb2.MediaInfo:
    return common_pb2.MediaInfo(
        modality=MODALITY[info.modality],
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
        modality=from_enum(MODALITY, message.modality, "modality"),
        format=message.format,
        width=message.width,
        height=message.height,
        nbytes=message.nbytes,
        digest=checked_digest(message.digest, "info.digest"),
        frames=message.frames,
        duration_s=checked_duration(message.duration_s, "info.duration_s"),
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
        address=ticket.address,
    )


def ticket_from_wire(message: common_pb2.Ticket) -> Ticket:
    if len(message.tensors) > MAX_TENSORS:
        raise errors.InvalidRequest(f"ticket has {len(message.tensors)} tensors, at most {MAX_TENSORS} are taken")
    return Ticket(
        key=checked_digest(message.key, "ticket.key"),
        holder=message.holder,
        epoch=message.epoch,
        offset=message.offset,
        payload_nbytes=message.payload_nbytes,
        generation=message.generation,
        checksum=message.checksum,
        tensors=tuple(_tensor_spec(spec) for spec in message.tensors),
        tokens=message.tokens,
        lease_id=checked_lease_id(message.lease_id),
        lease_s=checked_duration(message.lease_s, "lease_s"),
        address=checked_address(message.address, "ticket.address"),
    )


def _tensor_spec(message: common_pb2.TensorSpec) -> TensorSpec:
    if len(message.shape) > MAX_DIMENSIONS:
        raise errors.InvalidRequest(f"tensor has {len(message.shape)} dimensions, at most {MAX_DIMENSIONS} are taken")
    return TensorSpec(message.name, from_enum(_DTYPE, message.dtype, "dtype"), tuple(message.shape))


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
            from_enum(_GRAMMAR, message.response_format.grammar, "response_format"), message.response_format.schema
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
        dtype=from_enum(_DTYPE, message.dtype, "model.dtype"),
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
        role=from_enum(_ROLE, message.role, "role"),
        model=model_from_wire(message.model),
        arena_bytes=message.arena_bytes,
        offers=tuple(TransportOffer(offer.backend, offer.host, offer.metadata) for offer in message.offers),
        encoder_version=message.encoder_version,
        max_items=message.max_items,
        kv_tokens=message.kv_tokens,
    )


def chunk_to_wire(chunk: TokenChunk) -> common_pb2.TokenChunk:
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


def chunk_from_wire(message: common_pb2.TokenChunk) -> TokenChunk:
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
