"""Conversion of a text instance's requests and events."""

from triptych.domain.generation import (
    Finished,
    KvReport,
    KvTransferred,
    Placement,
    PullReport,
    Ready,
    TextRequest,
)
from triptych.domain.kv_segment import KvPlacement, SealedSegment
from triptych.v1 import text_pb2
from triptych.wire.common import CHUNK, CONTINUED, POSITION, SAMPLING, TICKET
from triptych.wire.flat import Pair, Variants

_KV_PLACEMENT = Pair(KvPlacement, text_pb2.KvPlacement, nested=(TICKET,))
TEXT_REQUEST = Pair(
    TextRequest,
    text_pb2.TextRequest,
    nested=(
        Pair(Placement, text_pb2.Placement, nested=(TICKET,)),
        SAMPLING,
        POSITION,
        CONTINUED,
        _KV_PLACEMENT,
    ),
    given=("timeout_s",),
)
_READY = Pair(
    Ready,
    text_pb2.Ready,
    nested=(Pair(PullReport, text_pb2.PullReport), Pair(KvReport, text_pb2.KvReport)),
)
_KV_TRANSFERRED = Pair(
    KvTransferred,
    text_pb2.KvTransferred,
    nested=(Pair(SealedSegment, text_pb2.SealedSegment, nested=(_KV_PLACEMENT,)),),
)
_EVENT = Variants(
    text_pb2.TextEvent,
    "event",
    {
        "chunk": CHUNK,
        "ready": _READY,
        "finished": Pair(Finished, text_pb2.Finished),
        "kv_transferred": _KV_TRANSFERRED,
    },
)

text_events_to_wire, text_events_from_wire = _EVENT.several(text_pb2.TextEvents, "events")
"""The latter raises InternalError for an unknown event."""
