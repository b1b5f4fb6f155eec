"""The bounds of every request field, in one table, and the check of a message against it.

A field without a row raises TypeError when the check is compiled, at import. Booleans need no row; enums are checked on
conversion; an unset nested message is not checked.
"""

from collections.abc import Callable, Mapping
from typing import Any

from google.protobuf.descriptor import FieldDescriptor as Field

from triptych.domain.bounds import Anything, Between, Bound, Many, OneOf, Pair, Size
from triptych.domain.chat import PRIORITY
from triptych.domain.embedding import KEY_NBYTES, LEASE_ID_NBYTES
from triptych.domain.media import DIGEST_NBYTES
from triptych.domain.sampling import BIAS, PARAMETERS, SCHEMA
from triptych.errors import InvalidRequest
from triptych.wire.flat import compiled

MAX_TOKENS = 1 << 21
"""Prompt tokens: twice the longest context length of current models."""
MAX_ITEMS = 4096
"""Items and shards of one request."""
_MAX_TEXT = 16 << 20
_MAX_MEDIA_NBYTES = 256 << 20
_MAX_ARENA_NBYTES = 1 << 48

_SECONDS = Between(0, 1e9)
_ID = Size(512)
_LEASE = Size(LEASE_ID_NBYTES, low=LEASE_ID_NBYTES, unit="bytes")
_KEY = Size(KEY_NBYTES, low=KEY_NBYTES, unit="bytes")
_SALT = Size(256, unit="bytes")
_MEDIA = Size(_MAX_MEDIA_NBYTES, unit="bytes")
_PLACE = Between(0, MAX_TOKENS)
_UNITS = Between(0, 1 << 22)
_NUMBER = Between(0, 1 << 20)

Rows = Mapping[str, Bound]

TABLE: Mapping[str, Rows] = {
    "MediaInfo": {
        "format": Size(32),
        "width": Between(0, 1 << 20),
        "height": Between(0, 1 << 20),
        "nbytes": Between(0, _MAX_MEDIA_NBYTES),
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
        "address": Size(262),  # a DNS name, brackets, a colon and a port
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
    "LeaseRequest": {"key": _KEY, "generation": Anything(), "lease_s": _SECONDS, "lease_id": _LEASE},
    "ReleaseRequest": {"lease_ids": Many(1 << 16, _LEASE, "leases")},
    "TextRequest": {
        "request_id": _ID,
        "model": _ID,
        "token_ids": Many(MAX_TOKENS, unit="tokens"),  # the engine checks ids against its vocabulary
        "placements": Many(MAX_ITEMS, unit="items"),
        "priority": PRIORITY,
        "tenant_salt": _SALT,
    },
    "Placement": {"item": _NUMBER, "start": _PLACE},
    "ChatRequest": {
        "request_id": _ID,
        "model": _ID,
        "messages": Many(4096, unit="messages"),
        "tenant_salt": _SALT,
        "prompt": Size(_MAX_TEXT),
        "tools": Size(_MAX_TEXT),
        "priority": PRIORITY,
    },
    "Message": {
        "parts": Many(4096, unit="parts"),
        "tool_calls": Many(128, unit="calls"),
        "tool_call_id": _ID,
    },
    "Part": {"text": Size(_MAX_TEXT)},
    "MediaPart": {"data": _MEDIA},
    "ToolCall": {"call_id": _ID, "name": _ID, "arguments": Size(_MAX_TEXT)},
    "ToolChoice": {"name": _ID},
    "TimelineRequest": {"request_id": _ID},
}


def _shard_lies_in_its_item(shard: Any) -> None:
    if shard.count > shard.of - shard.first:
        raise InvalidRequest(f"shard has {shard.count} units from {shard.first} on, of {shard.of}", param="shard")


_TOGETHER: Mapping[str, Callable[[Any], None]] = {"Shard": _shard_lies_in_its_item}
"""Checks that involve several fields of a message."""
_OWN_WORDS = frozenset({"SamplingParams", "ChatRequest"})
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
    path = "" if descriptor.name in _OWN_WORDS else path
    names: dict[str, Any] = {}
    tests = []
    for field in descriptor.fields:
        name, bound, read = field.name, bound_of(field), f"m.{field.name}"
        shown = _API_NAMES.get(name, name) if descriptor.name == "SamplingParams" else name
        test = ""
        if bound is not None:
            names[f"hold_{name}"] = _holder(f"{path}{shown}", bound)
            test = _test(field, bound, read)
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            names[f"check_{name}"] = checker(field.message_type, f"{path}{shown}.")
            each = f"any(map(check_{name}, {read}))" if field.is_repeated else f"check_{name}({read})"
            test = f"{read} and ({test} or {each})" if field.is_repeated else each
        if test:
            tests.append(f"m.HasField({name!r}) and ({test})" if field.has_presence else test)
    if descriptor.name in _TOGETHER:
        names["together"] = _TOGETHER[descriptor.name]
        tests.append("together(m)")
    check: Check = compiled(f"lambda m: {' or '.join(f'({test})' for test in tests) or None}", names)
    return check


def _test(field: Any, bound: Bound, read: str) -> str:
    """Simple comparisons are inlined; a failing value, and any other bound, calls the bound itself."""
    hold = f"hold_{field.name}({read})"
    if isinstance(bound, Between):
        return f"not {bound.low} {'<' if bound.above else '<='} {read} <= {bound.high} and {hold}"
    if isinstance(bound, Size):
        return f"not {bound.low} <= len({read}) <= {bound.high} and {hold}"
    if isinstance(bound, Many) and field.message_type is None and bound.each is not None:
        return f"{read} and {hold}"
    if isinstance(bound, Many) and field.message_type is not None and field.message_type.GetOptions().map_entry:
        return f"{read} and hold_{field.name}({read}.items())"
    if isinstance(bound, Many):
        return f"len({read}) > {bound.high} and {hold}"
    return "" if isinstance(bound, Anything) else hold


def _holder(name: str, bound: Bound) -> Callable[[Any], None]:
    def hold(value: Any) -> None:
        if (fault := bound.fault(name, value)) is not None:
            raise InvalidRequest(fault, param=name.partition(".")[0])

    return hold
