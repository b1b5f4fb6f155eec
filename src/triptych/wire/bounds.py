"""The bounds of every request field, in one table, and the check of a message against it.

A field without a row raises TypeError when the check is compiled, at import. Booleans need no row; enums are checked on
conversion; an unset nested message is not checked.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from google.protobuf.descriptor import FieldDescriptor as Field

from triptych.domain.bounds import Anything, Between, Bound, Many, OneOf, Pair, Size
from triptych.domain.chat import MAX_TEMPLATE_KWARGS_CHARS, PRIORITY
from triptych.domain.embedding import KEY_NBYTES, LEASE_ID_NBYTES
from triptych.domain.embedding_hints import HINT_NBYTES, MAX_HINTS
from triptych.domain.instance import MAX_FAULT
from triptych.domain.limits import MAX_MESSAGE_NBYTES
from triptych.domain.lora import DIGEST_CHARS, MAX_LOADED, MAX_NAME
from triptych.domain.media import DIGEST_NBYTES
from triptych.domain.membership import MAX_MEMBERS
from triptych.domain.mix import MAX_FORMS
from triptych.domain.pool import MAX_OVERRIDE_S
from triptych.domain.sampling import BIAS, PARAMETERS, SCHEMA
from triptych.domain.slo import CLASSES, MAX_OBJECTIVES
from triptych.domain.stage import ModelPart, Stage
from triptych.domain.tenant import TENANT_NAME, WEIGHT
from triptych.domain.tier import MAX_TIER
from triptych.domain.windows import MAX_BLAMED, SKETCH_BUCKETS, ClassWindow
from triptych.errors import InvalidRequest
from triptych.machine.text.prefix_hashes import MAX_SALT_NBYTES
from triptych.wire.flat import compiled

MAX_TOKENS = 1 << 21
"""Prompt tokens: twice the longest context length of current models."""
MAX_ITEMS = 4096
"""Items and shards of one request."""
MAX_KV_SEGMENTS = 4096
"""Segments of keys and values of one request."""
MAX_CALL_NBYTES = 256 << 10
"""Request of a call that shares a stream with others."""
_MAX_TEXT = 16 << 20
_MAX_ARENA_NBYTES = 1 << 48

_SECONDS = Between(0, 1e9)
_LEFT_S = Between(-1e9, 1e9)
_ID = Size(512)
_DIGEST = Size(DIGEST_CHARS, low=DIGEST_CHARS)
_LEASE = Size(LEASE_ID_NBYTES, low=LEASE_ID_NBYTES, unit="bytes")
_KEY = Size(KEY_NBYTES, low=KEY_NBYTES, unit="bytes")
_HINT = Size(HINT_NBYTES, low=HINT_NBYTES, unit="bytes")
_SALT = Size(MAX_SALT_NBYTES, unit="bytes")
_MEDIA = Size(MAX_MESSAGE_NBYTES, unit="bytes")
_PLACE = Between(0, MAX_TOKENS)
_UNITS = Between(0, 1 << 22)
_NUMBER = Between(0, 1 << 20)
_LIMIT = Between(1, 1 << 20)
_COUNT = Between(0, 1 << 48)
_ADDRESS = Size(262)
"""A DNS name, brackets, a colon and a port."""

Rows = Mapping[str, Bound]

TABLE: Mapping[str, Rows] = {
    "MediaInfo": {
        "format": Size(32),
        "width": Between(0, 1 << 20),
        "height": Between(0, 1 << 20),
        "nbytes": Between(0, MAX_MESSAGE_NBYTES),
        "digest": Size(DIGEST_NBYTES, low=DIGEST_NBYTES, unit="bytes"),
        "frames": _UNITS,
        "duration_s": _SECONDS,
        "samples": Between(0, 1 << 36),
        "sample_rate_hz": Between(0, 1 << 22),
        "rotation_deg": OneOf((0, 90, 180, 270)),
        "options": Many(16, Pair(Size(64), Size(256))),
    },
    "Shard": {"first": _UNITS, "count": Between(1, 1 << 22), "of": _UNITS},
    "TensorSpec": {"name": Size(256), "shape": Many(8, Between(0, _MAX_ARENA_NBYTES), "dimensions")},
    "Ticket": {
        "key": _KEY,
        "holder": _ID,
        "epoch": Anything(),
        "offset": Between(0, _MAX_ARENA_NBYTES),
        "payload_nbytes": Between(0, _MAX_ARENA_NBYTES),
        "generation": Anything(),
        "checksum": Anything(),
        "tensors": Many(64, unit="tensors"),
        "tokens": _PLACE,
        "lease_id": _LEASE,
        "lease_s": _SECONDS,
        "address": _ADDRESS,
    },
    "SamplingParams": {row.name: row.bound for row in PARAMETERS.values() if row.bound is not None},
    "LogitBias": {"token_id": BIAS.first, "bias": BIAS.second},
    "ResponseFormat": {"schema": SCHEMA},
    "EncodeRequest": {
        "request_id": _ID,
        "item": _NUMBER,
        "model": _ID,
        "media": _MEDIA,
        "tokens": _PLACE,
        "tenant_salt": _SALT,
        "lease_s": _SECONDS,
        "reader_lease": _LEASE,
        "router_lease": _LEASE,
        "priority": PRIORITY,
    },
    "RelativeQueuePosition": {"due_in_s": _LEFT_S, "lost_in_s": _LEFT_S, "aged_in_s": _LEFT_S, "behind_s": _LEFT_S},
    "LeaseRequest": {"key": _KEY, "generation": Anything(), "lease_s": _SECONDS, "lease_id": _LEASE},
    "ReleaseRequest": {"lease_ids": Many(1 << 16, _LEASE, "leases")},
    "TextRequest": {
        "request_id": _ID,
        "model": _ID,
        "token_ids": Many(MAX_TOKENS, unit="tokens"),  # the engine checks ids against its vocabulary
        "placements": Many(MAX_ITEMS, unit="items"),
        "priority": PRIORITY,
        "tenant_salt": _SALT,
        "continued": Many(16, unit="choices"),
        "kv_segments": Many(MAX_KV_SEGMENTS, unit="segments"),
        "kv_lease_s": _SECONDS,
        "lora": Size(DIGEST_CHARS),
    },
    "KvPlacement": {"first": _PLACE, "choices": Many(16, Between(0, 15), "choices")},
    "ContinuedChoice": {"choice": Between(0, 15), "token_ids": Many(MAX_TOKENS, unit="tokens")},
    "Placement": {"item": _NUMBER, "start": _PLACE},
    "ChatRequest": {
        "request_id": _ID,
        "model": _ID,
        "messages": Many(4096, unit="messages"),
        "tenant_salt": _SALT,
        "prompt": Size(_MAX_TEXT),
        "prompt_tokens": Many(MAX_TOKENS, unit="tokens"),
        "tools": Size(_MAX_TEXT),
        "template_kwargs": Size(MAX_TEMPLATE_KWARGS_CHARS),
        "priority": PRIORITY,
        "continued": Many(16, unit="choices"),
    },
    "Tenant": {"name": TENANT_NAME, "weight": WEIGHT},
    "Message": {
        "parts": Many(4096, unit="parts"),
        "tool_calls": Many(128, unit="calls"),
        "tool_call_id": _ID,
        "reasoning": Size(_MAX_TEXT),
    },
    "Part": {"text": Size(_MAX_TEXT)},
    "MediaPart": {"data": _MEDIA},
    "ToolCall": {"call_id": _ID, "name": _ID, "arguments": Size(_MAX_TEXT)},
    "ToolChoice": {"name": _ID},
    "TimelineRequest": {"request_id": _ID},
    "ResolveRequest": {
        "request_id": _ID,
        "model": _ID,
        "media": Many(MAX_ITEMS, unit="items"),
        "keys": Many(MAX_ITEMS, _KEY, "keys"),
        "tenant_salt": _SALT,
        "priority": PRIORITY,
    },
    "Registration": {
        "instance_id": Size(128, low=1),
        "epoch": Anything(),
        "address": _ADDRESS,
        "model": Size(512, low=1),
        "revision": _ID,
        "arena_bytes": Between(0, _MAX_ARENA_NBYTES),
        "max_items": _NUMBER,
        "kv_tokens": Between(0, 1 << 40),
        "transports": Many(8, Size(32), "transports"),
        "parts": Many(len(ModelPart), unit="parts"),
        "slo": Many(MAX_OBJECTIVES, Size(64), "objectives"),
        "metrics": _ID,
    },
    "Tier": {
        "name": Size(MAX_TIER, low=1),
        "device": Size(64),
        "usd_per_hour": Between(0, 1e6),
        "speed": Between(1e-3, 1e3),
    },
    "ServedPart": {"max_batch": _NUMBER, "token_budget": _PLACE, "prepare_cores": _NUMBER},
    "PartIdentity": {
        "digest": Size(64, low=16),
        "stages": Many(len(Stage), unit="stages"),
        "hardware": Size(128),
        "tensor_parallel": Between(1, 1024),
        "software": _ID,
        "options": Many(16, Pair(Size(64), Size(256))),
    },
    "Heartbeat": {"sequence": Anything()},
    "Farewell": {"reason": _ID},
    "WindowReport": {
        "epoch": Anything(),
        "sequence": Between(1, 1 << 62),
        "duration_s": Between(0, 86_400),
        "age_s": Between(0, 86_400),
        "model": _ID,
        "classes": Many(len(CLASSES), unit="classes"),
        "instances": Many(MAX_BLAMED, unit="instances"),
        "waiting": _COUNT,
        "waiting_media_tokens": _COUNT,
        "waiting_prompt_tokens": _COUNT,
        "forms": Many(MAX_FORMS, unit="forms"),
    },
    "Form": {
        "kind": Size(32),
        "seconds": Between(0, 1 << 40),
        **dict.fromkeys(
            ("requests", "answered", "items", "pixels", "frames", "prompt_tokens", "output_tokens"), _COUNT
        ),
    },
    "ClassWindow": {field.name: _COUNT for field in fields(ClassWindow) if field.type is int},
    "NamedClass": {"name": Size(32)},
    "NamedInstance": {"instance_id": Size(128)},
    "Judged": {"met": _COUNT, "missed": _COUNT},
    "Refusals": {"overloaded": _COUNT, "other": _COUNT},
    "Sketch": {"first": Between(0, SKETCH_BUCKETS - 1), "counts": Many(SKETCH_BUCKETS, _COUNT, "buckets")},
    "StageLoad": {
        "pending_tokens": Between(0, 1 << 48),
        "pending": Anything(),
        "served": _COUNT,
        "leased_bytes": Between(0, _MAX_ARENA_NBYTES),
        "free_tokens": Between(0, 1 << 48),
    },
    "ClosedStage": {"opens_s": _SECONDS, "fault": Size(MAX_FAULT)},
    "InstanceLoad": {
        "stages": Many(3, unit="stages"),
        "stages_version": Anything(),
        "closed": Many(3, unit="stages"),
        "loras": Many(MAX_LOADED, unit="adapters"),
    },
    "LoadedLora": {
        "name": Size(MAX_NAME, low=1),
        "digest": _DIGEST,
        "rank": Between(1, 1 << 20),
        "nbytes": Between(0, _MAX_ARENA_NBYTES),
    },
    "LoadLoraRequest": {"name": Size(MAX_NAME, low=1), "directory": Size(4096, low=1), "parent": _ID},
    "UnloadLoraRequest": {"name": Size(MAX_NAME, low=1)},
    "InstanceLimits": {
        "max_batch_items": _LIMIT,
        "max_sequences": _LIMIT,
        "token_budget": Between(1, MAX_TOKENS),
    },
    "LimitsReport": {"version": Anything(), "fault": Size(MAX_FAULT)},
    "EmbeddingHints": {
        "sequence": Anything(),
        "held": Many(MAX_HINTS, _HINT, "hints"),
        "encoding": Many(MAX_HINTS, _HINT, "hints"),
        "dropped": Many(MAX_HINTS, _HINT, "hints"),
    },
    "WatchRequest": {
        "incarnation": Anything(),
        "version": Anything(),
        "model": _ID,
        "kinds": Many(8, unit="kinds"),
        "metrics": _ID,
    },
    "SwitchRequest": {"instance_id": Size(128, low=1)},
    "SetLimitsRequest": {"instance_id": Size(128, low=1)},
    "DrainRequest": {"instance_id": Size(128, low=1), "force": Anything()},
    "PoolName": {"model": Size(512, low=1), "tier": Size(MAX_TIER)},
    "ScaleRequest": {"size": Anything(), "token": Anything()},  # each scaler has its own largest size
    "SetDegreeRequest": {"degree": Between(1, 1024), "token": Anything()},
    "RollRequest": {"model": Size(512, low=1), "tier": Size(MAX_TIER), "degree": Between(1, 1024)},
    "RemoveRequest": {"instance": Size(128, low=1), "token": Anything()},
    "SetSizeRequest": {
        "model": Size(512, low=1),
        "size": Between(0, MAX_MEMBERS),
        "for_s": Between(0, MAX_OVERRIDE_S),
        "tier": Size(MAX_TIER),
    },
    "CallRequests": {"requests": Many(4096, unit="requests")},
    "CallRequest": {"call": Between(1, 1 << 62), "received_nbytes": Between(0, 1 << 40)},
    "StartCall": {
        "method": Size(128),
        "request": Size(MAX_CALL_NBYTES, unit="bytes"),
        "timeout_s": _SECONDS,
        "metadata": Many(8, Pair(Size(64), Size(1024))),
    },
}


def _shard_lies_in_its_item(shard: Any) -> None:
    if shard.count > shard.of - shard.first:
        raise InvalidRequest(f"shard has {shard.count} units from {shard.first} on, of {shard.of}", param="shard")


_TOGETHER: Mapping[str, Callable[[Any], None]] = {"Shard": _shard_lies_in_its_item}
"""Checks that involve several fields of a message."""
_OWN_WORDS = frozenset({"SamplingParams", "ChatRequest", "ResolveRequest"})
"""Messages whose fields clients know by their own names, wherever the message is nested."""
_API_NAMES = {row.name: row.api_name for row in PARAMETERS.values()}
_NEEDS_NONE = (Field.CPPTYPE_BOOL, Field.CPPTYPE_ENUM, Field.CPPTYPE_MESSAGE)

Check = Callable[[Any], None]


def bound_of(field: Any) -> Bound | None:
    """The row of a field, None if it needs none. Raises TypeError if one is missing."""
    bound = TABLE.get(field.containing_type.name, {}).get(field.name)
    if bound is None and (field.is_repeated or field.cpp_type not in _NEEDS_NONE):
        raise TypeError(f"{field.full_name} has no bound: add a row to triptych.wire.bounds.TABLE")
    return bound


def checker(descriptor: Any, path: str = "") -> Check:
    """A function that checks a message and raises InvalidRequest for the first field out of bounds.

    It is compiled for speed, as every request passes it: one expression that is false for a valid message.
    """
    names: dict[str, Any] = {}
    check: Check = compiled(f"lambda m: {_wrong(descriptor, path, 'm', names)}", names)
    return check


def _wrong(descriptor: Any, path: str, message: str, names: dict[str, Any]) -> str:
    """An expression that is false for a valid message in this variable. ``names`` gets what it refers to."""
    path = "" if descriptor.name in _OWN_WORDS else path
    tests = []
    for field in descriptor.fields:
        name, bound, read = field.name, bound_of(field), f"{message}.{field.name}"
        own = f"{message}_{field.number}"  # names have underscores: a.b_c would be taken for a_b.c
        shown = _API_NAMES.get(name, name) if descriptor.name == "SamplingParams" else name
        test = ""
        if bound is not None:
            names[f"hold_{own}"] = _holder(f"{path}{shown}", bound)
            test = _test(field, bound, read, f"hold_{own}")
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            if field.is_repeated:
                names[f"check_{own}"] = checker(field.message_type, f"{path}{shown}.")
                test = f"{read} and ({test} or any(map(check_{own}, {read})))"
            else:
                test = (
                    f"({own} := {read}) is not None and ({_wrong(field.message_type, f'{path}{shown}.', own, names)})"
                )
        if test:
            tests.append(f"{message}.HasField({name!r}) and ({test})" if field.has_presence else test)
    if descriptor.name in _TOGETHER:
        names[f"together_{message}"] = _TOGETHER[descriptor.name]
        tests.append(f"together_{message}({message})")
    return " or ".join(f"({test})" for test in tests) or "None"


def _test(field: Any, bound: Bound, read: str, holder: str) -> str:
    """Simple comparisons are inlined; a failing value, and any other bound, calls the bound itself by the name ``holder``."""
    hold = f"{holder}({read})"
    is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
    match bound:
        case Anything():
            return ""
        case Between(low, high, above):
            test = f"not {low} {'<' if above else '<='} {read} <= {high}"
        case Size(high, low):
            test = f"not {low} <= len({read}) <= {high}"
        case OneOf(values):
            test = f"{read} not in {values}"
        case Many(high, Pair(Size(most, least), Size(longest, shortest))) if is_map:
            within = f"{least} <= len(k) <= {most} and {shortest} <= len(v) <= {longest}"
            test = f"{read} and not (len({read}) <= {high} and all({within} for k, v in {read}.items()))"
            hold = f"{holder}({read}.items())"
        case Many() if is_map:
            test, hold = read, f"{holder}({read}.items())"
        case Many(high, Between(low, most, above)) if field.message_type is None:
            within = f"{low} {'<' if above else '<='} min({read}) and max({read}) <= {most}"
            test = f"{read} and not (len({read}) <= {high} and {within})"
        case Many(high, Size(most, low)) if field.message_type is None:
            within = f"{low} <= min(map(len, {read})) and max(map(len, {read})) <= {most}"
            test = f"{read} and not (len({read}) <= {high} and {within})"
        case Many(each=each) if each is not None and field.message_type is None:
            test = read
        case Many(high):
            test = f"len({read}) > {high}"
        case _:
            return hold
    return f"{test} and {hold}"


def _holder(name: str, bound: Bound) -> Callable[[Any], None]:
    def hold(value: Any) -> None:
        if (fault := bound.fault(name, value)) is not None:
            raise InvalidRequest(fault, param=name.partition(".")[0])

    return hold
