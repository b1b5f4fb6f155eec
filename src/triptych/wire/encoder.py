"""What is said to an encoder, and by it."""

from triptych.domain.encoding import EncodeRequest, EncodeResult, LeaseRequest
from triptych.domain.instance import EncoderLoad
from triptych.v1 import encoder_pb2
from triptych.wire.checks import checked_digest, checked_duration, checked_lease_id, checked_salt
from triptych.wire.common import (
    media_info_from_wire,
    media_info_to_wire,
    shard_from_wire,
    shard_to_wire,
    ticket_from_wire,
    ticket_to_wire,
)


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
        router_lease=request.router_lease,
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
        tenant_salt=checked_salt(message.tenant_salt),
        timeout_s=timeout_s,
        lease_s=checked_duration(message.lease_s, "lease_s"),
        reader_lease=checked_lease_id(message.reader_lease, "reader_lease"),
        router_lease=checked_lease_id(message.router_lease, "router_lease"),
        shard=shard_from_wire(message.shard) if message.HasField("shard") else None,
    )


def encode_result_to_wire(result: EncodeResult) -> encoder_pb2.EncodeResponse:
    return encoder_pb2.EncodeResponse(
        ticket=ticket_to_wire(result.ticket),
        router_lease=result.router_lease,
        cached=result.cached,
        queue_s=result.queue_s,
        encode_s=result.encode_s,
    )


def encode_result_from_wire(message: encoder_pb2.EncodeResponse) -> EncodeResult:
    return EncodeResult(
        ticket=ticket_from_wire(message.ticket),
        router_lease=checked_lease_id(message.router_lease, "router_lease"),
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
        key=checked_digest(message.key, "key"),
        generation=message.generation,
        lease_id=checked_lease_id(message.lease_id, "lease_id"),
        lease_s=checked_duration(message.lease_s, "lease_s"),
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
