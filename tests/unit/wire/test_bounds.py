"""Every field of every request has a bound, checked before anything is built from it."""

import math
import tracemalloc
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.message_factory import GetMessageClass

from triptych.domain.sampling import PARAMETERS, SamplingParams
from triptych.errors import InvalidRequest
from triptych.v1 import (
    calls_pb2,
    common_pb2,
    encoder_pb2,
    instance_pb2,
    pool_manager_pb2,
    router_pb2,
    scaler_pb2,
    text_pb2,
)
from triptych.wire.bounds import TABLE, bound_of, checker
from triptych.wire.common import SAMPLING
from triptych.wire.decode import COUNTED_FROM_NBYTES, MAX_FIELDS, REQUESTS, decoder

CHAT, TOKENIZE = REQUESTS["/triptych.v1.Router/Chat"], REQUESTS["/triptych.v1.Router/Tokenize"]
GENERATE = REQUESTS["/triptych.v1.Text/Generate"]
ENCODE = REQUESTS["/triptych.v1.Encoder/Encode"]
RELEASE = REQUESTS["/triptych.v1.Encoder/Release"]
NUL = float("nan")


def test_every_rpc_has_its_request_decoded() -> None:
    services = [
        service
        for module in (calls_pb2, encoder_pb2, instance_pb2, pool_manager_pb2, router_pb2, scaler_pb2, text_pb2)
        for service in module.DESCRIPTOR.services_by_name.values()
    ]
    assert REQUESTS.keys() == {
        f"/{service.full_name}/{method.name}" for service in services for method in service.methods
    }


def test_every_row_of_the_table_names_a_request_field() -> None:
    seen: dict[str, set[str]] = {}

    def walk(descriptor: Any) -> None:
        for field in descriptor.fields:
            if bound_of(field) is not None:
                seen.setdefault(descriptor.name, set()).add(field.name)
            if field.message_type is not None and not field.message_type.GetOptions().map_entry:
                walk(field.message_type)

    for module in (calls_pb2, encoder_pb2, instance_pb2, pool_manager_pb2, router_pb2, scaler_pb2, text_pb2):
        for service in module.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                walk(method.input_type)
    assert seen == {name: set(rows) for name, rows in TABLE.items()}


@pytest.mark.parametrize("repeated", [False, True])
@pytest.mark.parametrize("kind", ["TYPE_UINT32", "TYPE_DOUBLE", "TYPE_STRING", "TYPE_BYTES"])
def test_a_new_field_without_a_bound_is_an_error(kind: str, *, repeated: bool) -> None:
    file = descriptor_pb2.FileDescriptorProto(name=f"{kind}{repeated}.proto", package=f"p{kind}{repeated}")
    message = file.message_type.add(name="TimelineRequest")
    message.field.add(name="new", number=1, type=kind, label="LABEL_REPEATED" if repeated else "LABEL_OPTIONAL")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    made = GetMessageClass(pool.FindMessageTypeByName(f"{file.package}.TimelineRequest"))
    with pytest.raises(TypeError, match="new has no bound"):
        decoder(made)


@pytest.mark.parametrize("nested_first", [False, True])
def test_fields_whose_joined_names_are_alike_keep_their_own_bounds(*, nested_first: bool) -> None:
    """``waiting_media.tokens`` and ``waiting_media_tokens``, of which the first has a lower bound."""
    package = f"alike{nested_first}"
    file = descriptor_pb2.FileDescriptorProto(name=f"{package}.proto", package=package)
    file.message_type.add(name="Ticket").field.add(name="tokens", number=1, type="TYPE_UINT64", label="LABEL_OPTIONAL")
    report = file.message_type.add(name="WindowReport")
    fields = {"waiting_media": {"type": "TYPE_MESSAGE", "type_name": f".{package}.Ticket"}}
    fields["waiting_media_tokens"] = {"type": "TYPE_UINT64"}
    for number, name in enumerate(sorted(fields, reverse=not nested_first), 1):
        report.field.add(name=name, number=number, label="LABEL_OPTIONAL", **fields[name])
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    made: Any = GetMessageClass(pool.FindMessageTypeByName(f"{package}.WindowReport"))
    check = checker(made.DESCRIPTOR)
    check(made(waiting_media={"tokens": 1 << 21}, waiting_media_tokens=1 << 48))
    with pytest.raises(InvalidRequest, match=r"^waiting_media\.tokens"):
        check(made(waiting_media={"tokens": (1 << 21) + 1}))
    with pytest.raises(InvalidRequest, match=r"^waiting_media_tokens"):
        check(made(waiting_media_tokens=(1 << 48) + 1))


def _sampling(**fields: Any) -> common_pb2.SamplingParams:
    message = SAMPLING.to_wire(SamplingParams(max_tokens=1))
    message.MergeFrom(common_pb2.SamplingParams(**fields))
    return message


def _encode(**fields: Any) -> encoder_pb2.EncodeRequest:
    info = {"digest": bytes(32), **fields.pop("info", {})}
    whole = {"reader_lease": bytes(16), "router_lease": bytes(16), **fields}
    return encoder_pb2.EncodeRequest(info=info, **whole)


def _ticket(**fields: Any) -> text_pb2.TextRequest:
    ticket = common_pb2.Ticket(**{"key": bytes(32), "lease_id": bytes(16), **fields})
    return text_pb2.TextRequest(sampling=_sampling(), placements=[text_pb2.Placement(ticket=ticket)])


SPEC = common_pb2.TensorSpec(dtype=common_pb2.DTYPE_F32)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 20_000_000}, "n"),
        ({"n": 17}, "n"),
        ({"temperature": math.inf}, "temperature"),
        ({"temperature": NUL}, "temperature"),
        ({"top_k": -2}, "top_k"),
        ({"max_tokens": 2**32 - 1}, "max_tokens"),
        ({"min_tokens": 2**31}, "min_tokens"),
        ({"logprobs": 21}, "top_logprobs"),
        ({"stop": ["a"] * 65}, "stop"),
        ({"stop": ["a" * 1025]}, "stop"),
        ({"stop_token_ids": [2**31]}, "stop_token_ids"),
        ({"stop_token_ids": range(4097)}, "stop_token_ids"),
        ({"logit_bias": [{"token_id": 1, "bias": NUL}]}, "logit_bias"),
        ({"logit_bias": [{"token_id": 2**31}]}, "logit_bias"),
        ({"logit_bias": [{}] * 4097}, "logit_bias"),
        ({"response_format": {"schema": "x" * ((4 << 20) + 1)}}, "response_format"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else value,
)
def test_a_sampling_parameter_out_of_bounds_is_named_as_the_api_names_it(fields: dict[str, Any], param: str) -> None:
    for decode, message in (
        (GENERATE, text_pb2.TextRequest(sampling=_sampling(**fields))),
        (CHAT, router_pb2.ChatRequest(sampling=_sampling(**fields))),
        (TOKENIZE, router_pb2.TokenizeRequest(chat=router_pb2.ChatRequest(sampling=_sampling(**fields)))),
    ):
        with pytest.raises(InvalidRequest) as caught:
            decode(message.SerializeToString())
        assert (caught.value.param, caught.value.message.startswith(param)) == (param, True) or param in str(
            caught.value
        )


@pytest.mark.parametrize(
    ("message", "name"),
    [
        (_ticket(key=b"short"), "placements.ticket.key"),
        (_ticket(lease_id=b"short"), "placements.ticket.lease_id"),
        (_ticket(lease_s=-1.0), "placements.ticket.lease_s"),
        (_ticket(lease_s=NUL), "placements.ticket.lease_s"),
        (_ticket(offset=2**63), "placements.ticket.offset"),
        (_ticket(payload_nbytes=2**64 - 1), "placements.ticket.payload_nbytes"),
        (_ticket(tokens=2**32 - 1), "placements.ticket.tokens"),
        (_ticket(holder="x" * 513), "placements.ticket.holder"),
        (_ticket(tensors=[SPEC] * 65), "placements.ticket.tensors"),
        (_ticket(tensors=[{"dtype": 1, "shape": [1] * 9}]), "placements.ticket.tensors.shape"),
        (_ticket(tensors=[{"dtype": 1, "shape": [2**64 - 1]}]), "placements.ticket.tensors.shape"),
        (text_pb2.TextRequest(request_id="x" * 513), "request_id"),
        (text_pb2.TextRequest(priority=2**40), "priority"),
        (text_pb2.TextRequest(tenant_salt=bytes(257)), "tenant_salt"),
        (text_pb2.TextRequest(placements=[{}] * 4097), "placements"),
        (text_pb2.TextRequest(position={"due_in_s": -2e9}), "position.due_in_s"),
        (text_pb2.TextRequest(position={"lost_in_s": math.nan}), "position.lost_in_s"),
        (text_pb2.TextRequest(continued=[{}] * 17), "continued"),
        (text_pb2.TextRequest(continued=[{"choice": 16}]), "continued.choice"),
    ],
    ids=str,
)
def test_a_field_of_a_text_request_out_of_bounds_is_named(message: text_pb2.TextRequest, name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        GENERATE(message.SerializeToString())
    assert caught.value.message.startswith(name)
    assert caught.value.param == name.partition(".")[0]


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"lease_s": math.inf}, "lease_s"),
        ({"position": {"due_in_s": math.nan}}, "position.due_in_s"),
        ({"position": {"lost_in_s": -math.inf}}, "position.lost_in_s"),
        ({"tokens": 2**32 - 1}, "tokens"),
        ({"item": 2**32 - 1}, "item"),
        ({"reader_lease": b""}, "reader_lease"),
        ({"info": {"width": 2**32 - 1}}, "info.width"),
        ({"info": {"frames": 2**32 - 1}}, "info.frames"),
        ({"info": {"duration_s": NUL}}, "info.duration_s"),
        ({"info": {"rotation_deg": 45}}, "info.rotation_deg"),
        ({"info": {"digest": b"short"}}, "info.digest"),
        ({"info": {"options": {str(n): "" for n in range(17)}}}, "info.options"),
        ({"info": {"options": {"k": "v" * 257}}}, "info.options"),
        ({"shard": {"first": 1, "count": 0, "of": 2}}, "shard.count"),
        ({"shard": {"first": 2, "count": 2, "of": 3}}, "shard"),
        ({"shard": {"first": 2**32 - 1, "count": 2**32 - 1, "of": 2**32 - 1}}, "shard.first"),
    ],
    ids=str,
)
def test_a_field_of_an_encode_request_out_of_bounds_is_named(fields: dict[str, Any], name: str) -> None:
    ENCODE(_encode().SerializeToString())
    with pytest.raises(InvalidRequest, match=name):
        ENCODE(_encode(**fields).SerializeToString())


@pytest.mark.parametrize(
    "data",
    [
        b"\x0a",
        b"\xff" * 50,
        b"\x0a\x02\xff\xfe",
        b"\x0a\xff\xff\xff\xff\x0f",
        bytes(COUNTED_FROM_NBYTES + 1),
        b"\x0a" * (COUNTED_FROM_NBYTES + 1),
        b"\x0f" * (COUNTED_FROM_NBYTES + 1),
        b"\xff" * (COUNTED_FROM_NBYTES + 1),
    ],
    ids=lambda data: f"{data[:3].hex()} {len(data)}",
)
def test_malformed_bytes_are_refused(data: bytes) -> None:
    for path in ("/triptych.v1.Text/Generate", "/triptych.v1.Router/Chat", "/triptych.v1.Encoder/Release"):
        with pytest.raises(InvalidRequest):
            REQUESTS[path](data)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("decode", "data"),
    [
        (GENERATE, b"\x22\x00" * (4 << 20)),  # empty placements
        (CHAT, b"\x1a\x00" * (4 << 20)),  # empty messages
        (CHAT, b"\x1a\x80\x80\x80\x04" + b"\x12\x00" * (4 << 20)),  # one message with empty parts
        (GENERATE, b"\x1a\x80\x80\x80\x20" + b"\x01" * (64 << 20)),  # token ids
        (RELEASE, b"\x0a\x00" * (4 << 20)),  # empty lease ids
        (RELEASE, b"\xfa\x01\x00" * (3 << 20)),  # unknown fields
    ],
    ids=["placements", "messages", "parts", "token ids", "leases", "unknown"],
)
def test_small_bytes_do_not_become_large_messages(decode: Any, data: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest):
            decode(data)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_large_messages_within_bounds_are_accepted() -> None:
    media = router_pb2.ChatRequest(sampling=_sampling())
    media.messages.add(role=router_pb2.SPEAKER_ROLE_USER).parts.add().media.data = bytes(8 << 20)
    for _ in range(4095):
        media.messages.add(role=router_pb2.SPEAKER_ROLE_USER).parts.add(text="a word and another")
    assert len(CHAT(media.SerializeToString()).messages) == 4096
    prompt = text_pb2.TextRequest(sampling=_sampling(), token_ids=range(300_000))
    assert len(GENERATE(prompt.SerializeToString()).token_ids) == 300_000
    leases = encoder_pb2.ReleaseRequest(lease_ids=[bytes(16)] * 10_000)
    assert len(RELEASE(leases.SerializeToString()).lease_ids) == 10_000
    assert MAX_FIELDS > 4 * 4096


def test_an_absent_field_is_not_checked() -> None:
    check = checker(common_pb2.SamplingParams.DESCRIPTOR)
    check(SAMPLING.to_wire(SamplingParams()))
    assert PARAMETERS["max_tokens"].bound is not None
